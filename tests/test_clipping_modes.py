"""Clips in the ways in which people train: by hand, with two optimizers, over micro-batches, with a loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, StabilizerCallback, attach
from tests.accelerate_loops import make_accelerator, prepared, train
from tests.clip_loops import HandLoop, fixed
from tests.launcher import run_distributed
from tests.lightning_models import expected_batches, make_trainer
from tests.lightning_variants import Manual, Plain, TwoOptimizers
from tests.loggers import Points, points_of, row_logger
from tests.models import loss_of, make_transformer, token_batch
from tests.reference_run import reference_run
from tests.spread import backward, spread
from tests.test_clipping_strategies import Seen
from tests.tiny_loops import no_log

LAYER_LIMIT, TOTAL_LIMIT = 0.85, 1.8


def clips(**options: Any) -> list[StabilizerCallback]:
    """Both of them, with fixed thresholds, that log all."""
    return [
        LayerClipCallback(rule=fixed(LAYER_LIMIT), every_n_steps=1, strict=True, **options),
        AdaptiveClipThreshold(rule=fixed(TOTAL_LIMIT), strict=True, **options),
    ]


def fit(module: Any, *, callbacks: list[Any] | None = None, max_steps: int = 4, **options: Any) -> Points:
    """What a fit logs."""
    logger = row_logger()
    callbacks = clips() if callbacks is None else callbacks
    make_trainer(max_steps=max_steps, callbacks=callbacks, logger=logger, **options).fit(module)
    return points_of(logger.rows)


def by_step(points: Points, tag: str) -> dict[int, float]:
    """One tag's values."""
    return {step: value for (name, step), value in points.items() if name == tag}


def ours(points: Points) -> Points:
    """Without what the host logs."""
    return {
        key: value for key, value in points.items() if key[0].split("/")[0] in ("clip", "grad_norm", "opt1", "skip")
    }


def test_manual_optimization_is_clipped_as_automatic_is() -> None:
    automatic, manual = fit(Plain()), fit(Manual())
    assert ours(manual) == pytest.approx(ours(automatic), rel=1e-6)
    assert list(by_step(manual, "clip/total_coefficient")) == [0, 1, 2, 3]


def test_several_steps_in_one_batch() -> None:
    points = fit(Manual(steps_per_batch=3), max_steps=6)
    assert list(by_step(points, "clip/total_coefficient")) == list(range(6))
    assert all(value <= TOTAL_LIMIT * (1 + 1e-6) for value in by_step(points, "grad_norm/total_after").values())


@pytest.mark.parametrize("every", [1, 2])
def test_two_optimizers_have_their_own_thresholds(every: int) -> None:
    """Each total is that of its own parameters, each history that of its own steps."""
    module = TwoOptimizers(every=every)
    rule = {"name": "mean_multiple", "k": 3.0, "warmup_steps": 2}
    rules = {r"model\.lm_head": fixed(0.5)}  # of the second one alone
    callbacks: list[Any] = [
        LayerClipCallback(rule=rule, rules=rules, every_n_steps=1, strict=True),
        AdaptiveClipThreshold(rule=rule, warmup_cap=None, strict=True),
    ]
    points = fit(module, callbacks=callbacks, max_steps=12 if every == 1 else 9)
    for number, prefix in enumerate(("", "opt1/")):
        totals = by_step(points, f"{prefix}grad_norm/total")
        assert list(totals) == list(range(len(module.expected[number])))
        thresholds = by_step(points, f"{prefix}clip/total_threshold")
        assert list(thresholds) == list(totals)[2:]
    heads = by_step(points, "opt1/clip/layer_threshold/model.lm_head")
    assert set(heads.values()) == {0.5}
    assert max(by_step(points, "opt1/grad_norm/layer_after/model.lm_head").values()) <= 0.5 * (1 + 1e-6)
    # The first optimizer's totals are untouched by the second one's: their threshold is 3 times the mean of two.
    mean = sum(module.expected[0][:2]) / 2
    assert by_step(points, "clip/total_threshold")[2] == pytest.approx(3 * mean, rel=0.05)
    assert not any("opt1" not in tag and "lm_head" in tag for tag, _ in points)


class History(StabilizerCallback):
    """How many norms the clips have let in, after every step."""

    def __init__(self, *watched: Any) -> None:
        super().__init__(strict=True)
        self.watched = watched
        self.counts: list[int] = []

    def on_gradients(self, context: Any) -> None:
        counts = set()
        for callback in self.watched:
            for saved in callback.state_dict()["extra"]["clips"].values():
                for rule in saved["thresholds"]["rules"]:
                    counts |= set(rule["state"]["num_accepted"].tolist())
        [count] = counts or {0}
        self.counts.append(count)


def accumulated(rank: int, world_size: int, host: str) -> tuple[list[int], list[Any], list[float]]:
    """Three steps of two micro-batches; how histories grow, what was planned, and the totals of the full sums."""
    seen, both = Seen(), clips()
    history = History(*both)
    callbacks = [*both, seen, history]
    if host == "lightning":
        make_trainer("ddp", devices=world_size, callbacks=callbacks, accumulate_grad_batches=2).fit(Plain())
    elif host == "accelerate":
        accelerator = make_accelerator("ddp", gradient_accumulation_steps=2)
        model, optimizer = prepared(accelerator)
        batches = [token_batch(rank, step=step, micro_batch=micro) for step in range(3) for micro in range(2)]
        with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=no_log):
            train(accelerator, model, optimizer, batches)
    else:
        model, data_rank = spread("ddp", rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=no_log):
            for step in range(3):
                optimizer.zero_grad()
                backward(model, "ddp", data_rank, step=step, num_micro_batches=2)
                optimizer.step()
    raw = [row["raw"] for row in seen.rows]
    return history.counts, [(row["norms"], row["total"]) for row in seen.rows], raw


@pytest.mark.parametrize("host", ["plain", "lightning", "accelerate"])
def test_over_micro_batches_once_a_step_on_the_whole_sum(host: str) -> None:
    if host == "lightning":
        first = expected_batches("transformer", 0, num_ranks=2, num_micro_batches=2)
    else:
        first = [token_batch(rank, micro_batch=micro) for micro in range(2) for rank in range(2)]
    expected = reference_run([first]).totals[0]
    results = run_distributed(accumulated, host)
    for counts, planned, raw in results:
        assert counts == [0, 1, 2]
        assert planned == results[0][1], "ranks disagree"
        assert len(planned) == 3
        assert all(total <= TOTAL_LIMIT * (1 + 1e-6) for _, total in planned)
        assert raw[0] == pytest.approx(expected, rel=1e-5)


def _sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.0, **options)


def _scaled_fit(*, fused: bool, init_scale: float, max_steps: int) -> tuple[Points, list[float]]:
    """A Trainer with a scaler of fp16; the norms are those of the gradients that the optimizer got, unscaled."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    received: list[float] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = _sgd(fused=fused)(parameters)

        def note(optimizer: Any, *_: Any) -> None:
            gradients: list[Tensor] = [p.grad for group in optimizer.param_groups for p in group["params"]]
            scale = getattr(optimizer, "grad_scale", None)
            total = float(torch.nn.utils.get_total_norm([gradient.double() for gradient in gradients]))
            received.append(total / (1.0 if scale is None else float(scale)))

        optimizer.register_step_pre_hook(note)
        return optimizer

    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    return fit(Plain(optimizer=make), max_steps=max_steps, plugins=plugin), received


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_changes_no_decision(fused: bool) -> None:
    """Norms and coefficients are those of float32, as far as fp16 goes; norms are divided, gradients are not."""
    plain = fit(Plain(optimizer=_sgd()))
    scaled, received = _scaled_fit(fused=fused, init_scale=256.0, max_steps=4)
    for tag in ("grad_norm/total", "grad_norm/total_after", "clip/total_coefficient"):
        assert by_step(scaled, tag) == pytest.approx(by_step(plain, tag), rel=0.02)
    layers = {key: value for key, value in plain.items() if key[0].startswith("clip/layer_coefficient/")}
    assert {key: scaled[key] for key in layers} == pytest.approx(layers, rel=0.02)
    assert min(layers.values()) < 1 == max(layers.values())
    assert list(by_step(scaled, "grad_norm/total_after").values()) == pytest.approx(received, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_the_scaler_s_business(fused: bool) -> None:
    """It enters no history, is counted apart, and the first step that is none is clipped as ever."""
    points, _ = _scaled_fit(fused=fused, init_scale=2.0**28, max_steps=16)
    overflows = by_step(points, "skip/overflows")
    num = int(overflows[15])
    assert 3 < num < 15
    assert by_step(points, "skip/count")[15] == 0
    healthy = [step for step, total in by_step(points, "grad_norm/total").items() if math.isfinite(total)]
    assert len(healthy) == 16 - num
    plain = fit(Plain(optimizer=_sgd()), max_steps=16)
    expected = {step: by_step(plain, "clip/total_coefficient")[step] for step in healthy}
    found = by_step(points, "clip/total_coefficient")
    assert {step: found[step] for step in healthy} == pytest.approx(expected, rel=0.02)
    assert all(found[step] == 1.0 for step in found if step not in healthy)
    assert by_step(points, "clip/total_rate")[15] == pytest.approx(sum(c < 1 for c in expected.values()) / 16)


def test_an_overflow_of_one_layer_is_no_step_of_the_others() -> None:
    callback = LayerClipCallback(rule={"name": "mean_multiple", "warmup_steps": 2}, strict=True)
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.0, fused=True)  # noqa: E731
    counts = []
    with HandLoop(callback, make=make, a=3, b=2) as loop:
        # What a scaler leaves with a fused optimizer for the time of its step.
        optimizer: Any = loop.optimizer
        for a in (1.0, math.inf, math.inf, 1.0):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(math.isinf(a)))
            loop.step(a=8 * a, b=8.0)
            [rule] = callback.state_dict()["extra"]["clips"]["0"]["thresholds"]["rules"]
            counts.append(rule["state"]["num_accepted"].tolist())
    assert counts == [[1, 1], [1, 1], [1, 1], [2, 2]]


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_in_a_plain_loop(fused: bool) -> None:
    afters = []
    for scale in (None, 128.0):
        model = make_transformer()
        optimizer = _sgd(fused=fused)(model.parameters())
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        seen = Seen()
        with attach(None, model=model, optimizer=optimizer, callbacks=[*clips(), seen], log=no_log):
            for step in range(3):
                optimizer.zero_grad()
                loss = loss_of(model, token_batch(step=step))
                (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
        afters.append([row["total_after"] for row in seen.rows])
    assert afters[1] == pytest.approx(afters[0], rel=1e-5)
    assert max(afters[0]) == pytest.approx(TOTAL_LIMIT, rel=1e-6)
