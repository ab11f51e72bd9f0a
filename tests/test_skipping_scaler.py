"""Skipping beside a gradient scaler: its own overflows are its own, and its decisions stay."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, attach
from tests.accelerate_loops import make_accelerator
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES
from tests.loggers import Points, points_of
from tests.models import loss_of, token_batch
from tests.skip_tools import INF, MODEL, OPTIMIZERS, changed, snapshot, train
from tests.spread import spread
from tests.tiny_loops import OneLayer, loss_at, told

SCALE = 1024.0
#: A gradient that is finite, and not when it is multiplied by the scale.
OVERFLOW = 1e37
SPIKE = 1e4
RULE = {"name": "fixed", "threshold": 100.0}


@dataclasses.dataclass
class Scaled:
    """What a training with a scaler has left, step by step."""

    moved: list[bool]
    scales: list[float]
    points: Points
    warnings: list[str]
    flags: list[bool]

    def row(self, tag: str) -> list[float | None]:
        """Values of a tag, by step."""
        return [self.points.get((tag, step)) for step in range(len(self.moved))]


def scaled(host: str, values: Sequence[float], callbacks: list[Any], *, name: str, touch: str = "") -> Scaled:
    """One weight whose gradient a test chooses, in a loop with a scaler.

    Args:
        host: "plain" or "accelerate".
        values: Gradients.
        callbacks: Ours.
        name: Of the optimizer.
        touch: "clip": the loop clips; "unscale": it only divides by the scale; "measure": it says when to measure.
    """
    bare = OneLayer()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    inner = OPTIMIZERS[name](bare.parameters())
    accelerator: Any = None
    model, optimizer = bare, inner
    if host == "accelerate":
        accelerator = make_accelerator()
        accelerator.scaler = scaler
        model, optimizer = accelerator.prepare(bare, inner)
        accelerator.native_amp = True
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
    rows: list[Any] = []
    found = Scaled([], [], {}, [], [])
    with told() as found.warnings:  # noqa: SIM117
        with attach(
            accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *row: rows.append(row)
        ) as handle:
            for value in values:
                before = snapshot(bare, inner)
                loss = loss_at(model, value)
                if accelerator is not None:
                    accelerator.backward(loss)
                    if touch == "clip":
                        accelerator.clip_grad_norm_(model.parameters(), 1e9)
                    elif touch == "unscale":
                        accelerator.unscale_gradients(optimizer)
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    if touch in ("unscale", "clip"):
                        scaler.unscale_(inner)
                    if touch == "measure":
                        handle.measure()
                    scaler.step(inner)
                    scaler.update()
                optimizer.zero_grad()
                found.moved.append(bool(changed(before, snapshot(bare, inner), absent_is_zero=True)))
                found.scales.append(scaler.get_scale())
                found.flags.append(hasattr(inner, "found_inf"))
    found.points = points_of([(dict(values), step) for values, step in rows])
    return found


def clips(**options: Any) -> list[Any]:
    """Both, one of which skips for spikes."""
    return [
        LayerClipCallback(rule=RULE, on_spike="skip_step", every_n_steps=1, **options),
        AdaptiveClipThreshold(warmup_cap=None, name="total", **options),
    ]


def check(found: Scaled) -> None:
    """After the steps: good, overflow, good, spike, good."""
    assert found.moved == [True, False, True, False, True]
    assert found.scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2, SCALE / 2], "a skip of ours is no overflow"
    for start in ("", "total/"):
        assert found.row(f"{start}skip/overflows") == [0, 1, 1, 1, 1]
        assert found.row(f"{start}skip/count") == [0, 0, 0, 1, 1]
        assert found.row(f"{start}skip/consecutive") == [0, 0, 0, 1, 0]
    # What clips beside us is told of.
    assert [text for text in found.warnings if not text.startswith("two clips act")] == []
    assert not any(found.flags), "nobody's flag is left"


VALUES = (1.0, OVERFLOW, 1.0, SPIKE, 1.0)


@pytest.mark.parametrize("touch", ["", "clip", "unscale"])
@pytest.mark.parametrize("name", ["adamw", "adamw_fused", "sgd", "sgd_fused"])
def test_accelerate_keeps_overflows_and_skips_apart(name: str, touch: str) -> None:
    check(scaled("accelerate", VALUES, clips(), name=name, touch=touch))


@pytest.mark.parametrize("name", ["adamw_fused", "sgd_fused"])
def test_a_plain_loop_keeps_them_apart(name: str) -> None:
    check(scaled("plain", VALUES, clips(), name=name))


@pytest.mark.parametrize("touch", ["", "unscale"])
def test_a_scaler_that_calls_no_step_leaves_nothing_to_see_in_a_plain_loop(touch: str) -> None:
    """It does not call an optimizer that is not fused, so that an overflow is no step."""
    found = scaled("plain", VALUES, clips(), name="adamw", touch=touch)
    assert found.moved == [True, False, True, False, True]
    assert found.scales == [SCALE, *[SCALE / 2] * 4]
    assert found.row("skip/count")[:4] == [0, 0, 1, 1]
    assert found.warnings == []


@pytest.mark.parametrize("name", ["adamw_fused", "sgd_fused"])
def test_gradients_that_a_plain_loop_has_unscaled_are_the_scaler_s_all_the_same(name: str) -> None:
    check(scaled("plain", VALUES, clips(), name=name, touch="unscale"))


@pytest.mark.parametrize("host", ["plain", "accelerate"])
def test_overflows_neither_end_nor_lengthen_a_row_of_skips(host: str) -> None:
    values = (SPIKE, OVERFLOW, SPIKE, OVERFLOW, 1.0, OVERFLOW)
    found = scaled(host, values, clips(max_consecutive_skips=2), name="adamw_fused")
    assert found.row("skip/consecutive") == [1, 1, 2, 2, 0, 0]
    assert found.row("skip/count") == [1, 1, 2, 2, 2, 2]
    assert found.row("skip/overflows") == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("host", ["plain", "accelerate"])
def test_no_row_of_overflows_ends_a_run(host: str) -> None:
    """A scaler starts with a scale that is far too large, on purpose."""
    found = scaled(host, [INF] * 8, clips(max_consecutive_skips=1), name="adamw_fused")
    assert found.scales == [SCALE / 2**number for number in range(1, 9)]
    assert found.row("skip/overflows") == list(range(1, 9))
    assert found.row("skip/count") == [0] * 8
    assert found.warnings == []


@pytest.mark.parametrize("verb", ["skip_step", "raise", "zero_layer", "ignore"])
@pytest.mark.parametrize("host", ["plain", "accelerate"])
def test_an_overflow_is_nobody_else_s_business(host: str, verb: Any) -> None:
    found = scaled(host, (1.0, OVERFLOW, 1.0), clips(on_nonfinite=verb), name="adamw_fused")
    assert found.moved == [True, False, True]
    assert found.scales == [SCALE, SCALE / 2, SCALE / 2]
    assert found.row("skip/overflows") == [0, 1, 1]
    assert found.row("skip/count") == [0, 0, 0]


def overflow_in_one_layer(step: int, model: nn.Module) -> None:
    """The norms of all other layers are as good as ever."""
    if step == 1:
        gradient = model.get_parameter("layers.1.attention.q.weight").grad
        assert gradient is not None
        gradient.view(-1)[0] = INF


@pytest.mark.parametrize("name", ["adamw", "adamw_fused"])
def test_an_overflow_enters_no_history(name: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    callbacks = clips()
    run = train(
        PACKAGES[0],
        callbacks,
        num_steps=3,
        after_backward=overflow_in_one_layer,
        optimizer=name,
        plugins=importlib.import_module(f"{PACKAGES[0]}.plugins").MixedPrecision("16-mixed", "cpu", scaler=scaler),
        look=lambda: str([callback.extra_state()["clips"].get("0", {}).get("thresholds") for callback in callbacks]),
    )
    _, before, after, later = run.extra
    assert "num_accepted" in before
    assert before == after != later
    assert scaler.get_scale() == 8.0


def multiply(step: int, model: nn.Module) -> None:
    """A spike at step 3."""
    for parameter in model.parameters():
        if step == 3 and parameter.grad is not None:
            parameter.grad.mul_(1e5)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("manual", ["", " manual"])
@pytest.mark.parametrize("name", ["adamw", "adamw_fused", "sgd_fused"])
def test_lightning_keeps_them_apart(package: str, manual: str, name: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    plugin = importlib.import_module(f"{package}.plugins").MixedPrecision("16-mixed", "cpu", scaler=scaler)
    callbacks = clips()
    run = train(
        package + manual,
        callbacks,
        num_steps=5,
        faults={(1, None): INF},
        after_backward=multiply,
        optimizer=name,
        plugins=plugin,
        look=scaler.get_scale,
    )
    assert run.extra == [16.0, 16.0, 8.0, 8.0, 8.0, 8.0]
    moved = [bool(changed(*pair)) for pair in zip(run.states, run.states[1:], strict=False)]
    assert moved == [True, False, True, False, True]
    for tag, expected in {
        "overflows": [0, 1, 1, 1, 1],
        "count": [0, 0, 0, 1, 1],
        "consecutive": [0, 0, 0, 1, 0],
    }.items():
        assert [run.points.get((f"skip/{tag}", step)) for step in range(5)] == expected, tag
    assert run.warnings == []


def infinity_in_one_shard(rank: int, world_size: int) -> tuple[list[bool], list[bool]]:
    """The scaler of torch looks at this rank's shards only: with FSDP1 it finds nothing on rank 0."""
    model = spread("fsdp1", rank, **MODEL)[0]
    optimizer = OPTIMIZERS["adamw_fused"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    moved, found = [], []
    with told(), attach(None, model=model, optimizer=optimizer, callbacks=clips(), log=lambda *row: None):
        for step in range(3):
            before = snapshot(model, optimizer)
            scaler.scale(loss_of(model, token_batch(rank, step=step))).backward()
            if step == 1 and rank == 1:
                next(p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()).view(-1)[0] = INF
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale() < scale)
            optimizer.zero_grad()
            moved.append(bool(changed(before, snapshot(model, optimizer))))
    return moved, found


def test_ranks_whose_scaler_sees_nothing_do_not_move_alone() -> None:
    first, second = run_distributed(infinity_in_one_shard)
    assert (first[1], second[1]) == ([False] * 3, [False, True, False]), "rank 0's scaler sees nothing"
    assert first[0] == second[0] == [True, False, True]
