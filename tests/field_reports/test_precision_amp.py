"""Field reports, area precision-amp: norms, clips and histories beside a loss scale."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from stabilizer.callbacks import AdaptiveClipThreshold, LossMeanVarCallback, attach
from tests.event_files import read_run
from tests.field_reports.clip_tools import Received, layer_clip, series, total_clip
from tests.field_reports.helpers import covers, fit, norm_logger, our_warnings
from tests.lightning_variants import Manual, Plain
from tests.loggers import points_of
from tests.models import loss_of, make_transformer, token_batch
from tests.test_skipping_scaler import scaled
from tests.tiny_loops import Loop

#: What autocast to fp16 may change.
FP16 = 0.02
Scalars = dict[str, dict[int, float]]


def _still(**options: Any) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.0, **options)


def _fit(module: Any, folder: Path, *, scale: float | None = None, **options: Any) -> Scalars:
    """What a fit writes for TensorBoard, with a real scaler if there is a scale to begin with."""
    if scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        options["plugins"] = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fit(module, folder, **options)
    return read_run(folder / "run").scalars


@covers("single")
def test_B013_clip_decisions_know_nothing_of_the_loss_scale(tmp_path: Path) -> None:
    runs, norms = {}, {}
    for scale in (None, 2.0**10, 2.0**14):
        received = Received()
        callbacks = [norm_logger(), layer_clip(0.85), total_clip(1.8), received]
        runs[scale] = _fit(Plain(optimizer=_still()), tmp_path / f"{scale}", scale=scale, callbacks=callbacks)
        norms[scale] = received.norms[0]
    for scale, run in runs.items():
        ours = {tag for tag in runs[None] if tag.startswith(("grad_norm/", "clip/"))}
        assert {tag for tag in run if tag.startswith(("grad_norm/", "clip/"))} == ours
        for tag in ours:
            assert run[tag] == pytest.approx(runs[None][tag], rel=FP16), (scale, tag)
        assert norms[scale] == pytest.approx([1.8] * 3, rel=FP16), "the optimizer got something else"


@covers("single")
@pytest.mark.parametrize("clip", [None, 1e6])
def test_B059_manual_optimization_with_a_scaler(clip: float | None, tmp_path: Path) -> None:
    runs = {}
    for scale in (None, 2.0**12):
        module, received = Manual(clip=clip), Received()
        module.make_optimizer = _still()
        callbacks = [norm_logger(), total_clip(0.7), received]
        with our_warnings() as messages:
            runs[scale] = _fit(module, tmp_path / f"{scale}", scale=scale, callbacks=callbacks)
        # The module's own clip beside ours is said.
        assert [message.startswith("two clips act") for message in messages] == [True] * (clip is not None)
        assert received.norms[0] == pytest.approx([0.7] * 3, rel=FP16)
    for tag in ("grad_norm/total", "clip/total_coefficient", "grad_norm/layer/model.lm_head"):
        assert runs[2.0**12][tag] == pytest.approx(runs[None][tag], rel=FP16)


@covers("single")
def test_B061_norms_are_in_real_units_and_once_a_step(tmp_path: Path) -> None:
    plain, amp = (
        _fit(
            Plain(optimizer=_still()),
            tmp_path / f"{scale}",
            scale=scale,
            callbacks=[norm_logger(max_abs_every_n_steps=1)],
            accumulate_grad_batches=2,
        )
        for scale in (None, 2.0**12)
    )
    ours = [tag for tag in amp if tag.startswith("grad_norm/")]
    assert len(ours) == 2 + 2 * 7
    for tag in ours:
        # Nothing after a micro-batch: one point a step.
        assert list(amp[tag]) == [0, 1, 2]
        assert amp[tag] == pytest.approx(plain[tag], rel=FP16), tag


@covers("single")
@pytest.mark.parametrize("fused", [False, True])
def test_B054_steps_that_overflow_enter_no_history(fused: bool, tmp_path: Path) -> None:
    rule = {"name": "mean_multiple", "k": 3.0, "warmup_steps": 2}
    adaptive = AdaptiveClipThreshold(rule=rule, warmup_cap=None, strict=True)
    callbacks = [norm_logger(), adaptive]
    run = _fit(Plain(optimizer=_still(fused=fused)), tmp_path, scale=2.0**28, callbacks=callbacks, max_steps=16)
    totals = run["grad_norm/total"]
    overflows = [step for step, total in totals.items() if not math.isfinite(total)]
    healthy = [step for step in range(16) if step not in overflows]
    assert overflows[:3] == [0, 1, 2]
    assert len(healthy) > 3
    assert run["skip/overflows"] == {step: sum(bad <= step for bad in overflows) for step in range(16)}
    assert set(run["skip/count"].values()) == {0}
    assert [step for step, total in run["grad_norm/total_after"].items() if math.isfinite(total)] == healthy
    # The first limit is that of the first two steps that were done.
    first, second, *_ = healthy
    assert list(run["clip/total_threshold"]) == list(range(second + 1, 16))
    expected = 3 * statistics.geometric_mean([totals[first], totals[second]])
    assert run["clip/total_threshold"][second + 1] == pytest.approx(expected, rel=1e-5)
    [rule_state] = adaptive.state_dict()["extra"]["clips"]["0"]["thresholds"]["rules"]
    assert rule_state["state"]["num_accepted"].tolist() == [len(healthy)]
    assert set(run["clip/total_rate"].values()) == {0}


@covers("single")
def test_B129_a_step_that_is_left_out_has_no_norm_of_zero(tmp_path: Path) -> None:
    run = _fit(
        Plain(optimizer=_still()),
        tmp_path / "overflow",
        scale=2.0**28,
        callbacks=[norm_logger(), total_clip(9.0)],
        max_steps=14,
    )
    spoiled = Plain(loss=lambda module, batch, number: loss_of(module.model, batch) * (torch.nan if number == 1 else 1))
    with our_warnings() as messages:
        other = _fit(spoiled, tmp_path / "skip", callbacks=[norm_logger(), total_clip(9.0)])
    assert len(messages) == 1
    assert other["skip/count"] == {0: 0, 1: 1, 2: 1}
    assert other["grad_norm/nonfinite"] == {0: 0, 1: 7, 2: 0}, "seven layers"
    overflows = {
        step for step, count in run["skip/overflows"].items() if count > run["skip/overflows"].get(step - 1, 0)
    }
    assert {0, 1, 2} <= overflows < set(range(14))
    for scalars, left_out in ((run, overflows), (other, {1})):
        for tag in ("grad_norm/total", "grad_norm/total_after", "grad_norm/layer/model.lm_head"):
            for step, value in scalars[tag].items():
                assert math.isfinite(value) == (step not in left_out), (tag, step)
                assert value != 0


def test_B036_what_is_not_finite_is_counted_apart_and_spoils_no_mean() -> None:
    losses = LossMeanVarCallback(windows=(2, 8), every_n_steps=1, warmup_steps=0, strict=True)
    rule = {"name": "mean_multiple", "warmup_steps": 2}
    adaptive = AdaptiveClipThreshold(rule=rule, warmup_cap=None, strict=True)
    with our_warnings(), Loop("plain", losses, norm_logger(strict=True), adaptive) as loop:
        for value in (math.inf, math.nan, 1.0, 1.1, 1.2, 1.1):
            loop.step(value)
        limit = adaptive.thresholds()["total"]
    points = points_of(loop.rows)
    assert series(points, "loss/nonfinite") == {0: 1, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2}
    means = {step: value for step, value in series(points, "loss/mean_8").items() if math.isfinite(value)}
    assert means == pytest.approx({2: 1.0, 3: 1.05, 4: 1.1, 5: 1.1})
    assert math.isfinite(series(points, "loss/std_8")[5])
    assert series(points, "grad_norm/nonfinite") == {0: 1, 1: 1, 2: 0, 3: 0, 4: 0, 5: 0}
    assert series(points, "skip/count")[5] == 2
    assert 5 * 1.0 < limit < 5 * 1.2


@pytest.mark.parametrize("touch", ["", "unscale", "measure"])
def test_B053_the_scale_is_taken_out_once_whoever_asks(touch: str) -> None:
    runs = []
    for scale in (None, 2.0**8):
        model = make_transformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=touch == "")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        rows: list[Any] = []
        callbacks: list[Any] = [norm_logger(strict=True), layer_clip(0.85), total_clip(1.5)]
        options: dict[str, Any] = {"callbacks": callbacks, "log": lambda *row, rows=rows: rows.append(row)}
        with attach(None, model=model, optimizer=optimizer, **options) as handle:
            for step in range(3):
                for micro_batch in range(3):
                    loss = loss_of(model, token_batch(step=step, micro_batch=micro_batch)) / 3
                    scaler.scale(loss).backward()
                if touch:
                    scaler.unscale_(optimizer)
                if touch == "measure":
                    handle.measure()
                    nn.utils.clip_grad_norm_(model.parameters(), 1e3)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        runs.append((points_of(rows), [p.detach().clone() for p in model.parameters()]))
    (plain, weights), (amp, again) = runs
    # A fused optimizer is told of the scale, and so are we: overflows are counted then.
    assert {key for key in amp if key not in plain} == {("skip/overflows", step) for step in range(3) if not touch}
    assert {key: amp[key] for key in plain} == pytest.approx(plain, rel=1e-4)
    assert series(amp, "clip/total_coefficient")[0] < 1
    for old, new in zip(weights, again, strict=True):
        torch.testing.assert_close(old, new, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("touch", ["", "clip", "unscale"])
def test_B053_accelerate_unscales_once_beside_our_callbacks(touch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    original = torch.amp.GradScaler.unscale_
    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", lambda self, o: (calls.append(o), original(self, o))[1])
    with our_warnings():
        found = scaled("accelerate", [1.0, 2.0, 3.0], [norm_logger(), total_clip(1.5)], name="adamw", touch=touch)
    assert found.row("grad_norm/total") == pytest.approx([1.0, 2.0, 3.0])
    assert found.row("clip/total_coefficient") == pytest.approx([1.0, 0.75, 0.5])
    assert len(calls) <= 3, "more than once a step"
    assert found.moved == [True] * 3


@covers("single")
def test_B105_a_fused_optimizer_takes_the_scale_out_itself(tmp_path: Path) -> None:
    runs, weights = {}, {}
    for fused in (False, True):
        module = Plain(optimizer=lambda parameters, fused=fused: torch.optim.AdamW(parameters, lr=1e-2, fused=fused))
        callbacks = [norm_logger(), layer_clip(0.85), total_clip(1.5)]
        runs[fused] = _fit(module, tmp_path / f"{fused}", scale=2.0**10, callbacks=callbacks, max_steps=5)
        weights[fused] = [p.detach() for p in module.parameters()]
    for old, new in zip(*weights.values(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-3, atol=1e-4)
    for tag, points in runs[False].items():
        if tag.startswith(("grad_norm/", "clip/")):
            assert runs[True][tag] == pytest.approx(points, rel=FP16), tag
    plain = _fit(Plain(), tmp_path / "plain", callbacks=[norm_logger()], max_steps=1)
    assert runs[True]["grad_norm/total"][0] == pytest.approx(plain["grad_norm/total"][0], rel=FP16)
    assert min(runs[True]["clip/total_coefficient"].values()) < 1
