"""Field reports, area clipping: what a clip does, says and refuses, in one process."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stabilizer.applying import apply_plan_
from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, load_callbacks
from stabilizer.plan import StepPlan
from tests import reference
from tests.clip_loops import HandLoop, fixed, norms_of
from tests.event_files import read_run
from tests.field_reports.clip_tools import clip_now, layer_clip, total_clip
from tests.field_reports.helpers import TOLERANCE, fit, norm_logger, our_warnings
from tests.lightning_models import expected_batches, make_module
from tests.lightning_variants import Plain
from tests.models import loss_of, make_mlp, mlp_batch, reference_gradients
from tests.tiny_loops import OneLayer, loss_at


@pytest.mark.parametrize("by", ["norm", "value"])
def test_B002_two_series_before_and_after_the_clip(by: str, tmp_path: Path) -> None:
    clip = total_clip(0.25) if by == "norm" else LayerClipCallback(clip_value={".*": 0.25}, every_n_steps=1)
    with our_warnings() as messages:
        fit(make_module("mlp", learning_rate=0.0), tmp_path, callbacks=[norm_logger(), clip])
    assert [("cuts single elements" in message) for message in messages] == [True] * (by == "value")
    scalars = read_run(tmp_path / "run").scalars
    for step in range(3):
        gradients = reference_gradients(make_mlp(), expected_batches("mlp", step))
        cut = {name: None if g is None else g.clamp(-0.25, 0.25) for name, g in gradients.items()}
        before, after = reference.total_norm(gradients), reference.total_norm(cut)
        assert scalars["grad_norm/total"][step] == pytest.approx(before, rel=TOLERANCE)
        expected = 0.25 if by == "norm" else after
        assert scalars["grad_norm/total_after"][step] == pytest.approx(expected, rel=TOLERANCE)
        assert expected < 0.8 * before, "nothing was clipped"


#: Near 1, in an order that is not that of their size.
HEALTHY = (1.0 + 0.1 * np.random.default_rng(0).uniform(-1, 1, size=100)).tolist()
SPIKE = 50.0


RULES: dict[str, dict[str, Any]] = {
    "percentile": {"name": "quantile", "q": 0.1, "warmup_steps": 20},
    "zscore": {"name": "zscore", "skip_spikes": True, "warmup_steps": 20},
    "zscore as published": {"name": "zscore", "warmup_steps": 20},
    "multiple of the mean": {"name": "mean_multiple", "warmup_steps": 20},
    "default": {"name": "robust_log", "warmup_steps": 20},
}


@pytest.mark.parametrize("kind", RULES)
def test_B027_a_limit_that_follows_past_norms(kind: str) -> None:
    callback = AdaptiveClipThreshold(rule=RULES[kind], warmup_cap=None, strict=True)
    limits = []
    with our_warnings() as messages, HandLoop(callback, a=3) as loop:
        for norm in HEALTHY:
            limits.append(callback.thresholds().get("total", math.inf))
            loop.step(a=norm)
        assert [math.isinf(limit) for limit in limits] == [True] * 20 + [False] * 80, "the warm-up is not the rule's"
        before = callback.thresholds()["total"]
        clipped = norms_of(loop.step(a=SPIKE))["a"]
        after = callback.thresholds()["total"]
    assert 0.9 < clipped <= before * (1 + 1e-6) < 6
    # The tenth percentile was what the report asked for: it clips nine healthy steps in ten, and that is said.
    assert ["more than 5 %" in message for message in messages] == [True] * (kind == "percentile")
    if kind == "percentile":
        # A spike is one more of the norms that the percentile is of.
        expected = [np.quantile([*HEALTHY, *more], 0.1) for more in ([], [SPIKE])]
        assert [clipped, before, after] == pytest.approx([expected[0], *expected], rel=1e-6)
    elif kind == "zscore as published":
        assert before != after == pytest.approx(before, rel=0.02), "its clipped value enters, not the spike"
    else:
        assert after == before


def test_B066_zeros_stay_zeros_and_zero_weights_learn(tmp_path: Path) -> None:
    rules = ["robust_log", "mean_multiple", "zscore", "quantile", fixed(0.5)]
    for rule in rules:
        if isinstance(rule, str):
            rule = {"name": rule, "warmup_steps": 2}
        model = make_mlp()
        with torch.no_grad():
            # The output starts at zero, so that nothing reaches what lies before it at the first step.
            model.second.weight.zero_()
            model.second.bias.zero_()
        model.unreached = nn.Linear(2, 2)
        received: list[list[Tensor]] = []

        def make(parameters: list[Tensor], received: list[list[Tensor]] = received) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            optimizer.register_step_post_hook(lambda *_: received.append([p.grad.clone() for p in parameters]))
            return optimizer

        def loss(module: Plain, batch: Any, number: int) -> Tensor:
            unreached = sum(p.sum() for p in module.model.unreached.parameters())
            return loss_of(module.model, mlp_batch(step=number)) + 0 * unreached

        clips = [LayerClipCallback(rule=rule, granularity="parameter", strict=True), total_clip(0.5)]
        fit(Plain(model, optimizer=make, loss=loss), tmp_path / str(rule), callbacks=clips, max_steps=8)
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
        [first, *_, last] = received
        names = [name for name, _ in model.named_parameters()]
        zeros = [name for name, gradient in zip(names, first, strict=True) if not gradient.any()]
        assert zeros == ["first.weight", "first.bias", "unreached.weight", "unreached.bias"]
        assert [name for name, gradient in zip(names, last, strict=True) if not gradient.any()] == zeros[2:]
        assert bool(model.second.weight.any()), "a layer whose weights are zero has not learned"
        for tag, points in read_run(tmp_path / str(rule) / "run").scalars.items():
            assert all(map(math.isfinite, points.values())), tag


def test_B095_how_often_the_clip_acts(tmp_path: Path) -> None:
    # Two micro-batches a step: 0.5 + 0.5, then 1.5 + 1.5. No micro-batch alone is over the limit of 2.
    gradients = [value for value in (0.5, 1.5) for _ in range(2)]
    module = Plain(
        OneLayer(),
        loss=lambda module, batch, number: 2 * loss_at(module.model, gradients[number % 4]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": 10}
    fit(module, tmp_path, callbacks=[layer_clip(2.0), total_clip(2.0)], **options)
    scalars = read_run(tmp_path / "run").scalars
    assert list(scalars["grad_norm/total"].values()) == pytest.approx([1.0, 3.0] * 5)
    assert list(scalars["clip/layer_coefficient/model"].values()) == pytest.approx([1.0, 2 / 3] * 5)
    assert scalars["clip/layer_rate"] == scalars["clip/layer_rate/model"]
    assert list(scalars["clip/layer_rate"]) == list(range(10))
    assert scalars["clip/layer_rate"][9] == pytest.approx(0.5)
    assert scalars["clip/total_rate"][9] == 0, "the layers' clip has left nothing to do"
    fit(module, tmp_path / "total", callbacks=[total_clip(2.0)], **options)
    scalars = read_run(tmp_path / "total/run").scalars
    assert list(scalars["clip/total_coefficient"].values()) == pytest.approx([1.0, 2 / 3] * 5)
    assert scalars["clip/total_rate"][9] == pytest.approx(0.5)


def test_B097_one_limit_for_all_groups_or_one_for_each_named_group() -> None:
    def with_gradients() -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
        model = make_mlp()
        loss_of(model, mlp_batch()).backward()
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        groups = [{"params": weights}, {"params": biases, "lr": 0.5}]
        return model, reference_gradients(make_mlp(), [mlp_batch()]), torch.optim.SGD(groups, lr=0.0)

    model, raw, optimizer = with_gradients()
    left = clip_now(model, total_clip(1.0), optimizer=optimizer)
    assert reference.total_norm(raw) > 2
    assert reference.total_norm(left.gradients) == pytest.approx(1.0, rel=TOLERANCE)
    for name, gradient in raw.items():
        torch.testing.assert_close(left.gradients[name].double() * reference.total_norm(raw), gradient)

    model, raw, optimizer = with_gradients()
    by_kind = {r".*weight": "weights", r".*bias": "biases"}
    limits = {"weights": 1.0, "biases": 0.25}
    rules = {kind: fixed(limit) for kind, limit in limits.items()}
    left = clip_now(model, layer_clip(9.0, rules=rules, granularity=by_kind), optimizer=optimizer)
    kinds = reference.layer_norms(left.gradients, lambda name: "biases" if name.endswith("bias") else "weights")
    assert kinds == pytest.approx(limits, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_B124_under_the_limit_nothing_is_written(dtype: torch.dtype) -> None:
    with HandLoop(layer_clip(1.0), total_clip(1.0), dtype=dtype, a=3, b=5) as loop:
        given = {"a": torch.rand(1, 3).to(dtype) / 7, "b": torch.rand(1, 5).to(dtype) / 7}
        received = loop.step(**given)
    for name, gradient in given.items():
        assert received[name].dtype == dtype
        assert torch.equal(received[name].view(torch.uint8), gradient.view(torch.uint8))
    assert loop.changes == {"a": 0, "b": 0}, "a gradient was written, be it by a product with 1"
    assert 0.1 < loop.points["grad_norm/total", 0] == loop.points["grad_norm/total_after", 0] < 1
    assert loop.points["clip/total_coefficient", 0] == loop.points["clip/layer_coefficient/a", 0] == 1
    assert loop.points["clip/total_rate", 0] == loop.points["clip/layer_rate", 0] == 0


NO_LIMITS = {"-1.0": -1.0, "0": 0, ".nan": math.nan, "'1.0'": "1.0", "-.inf": -math.inf}


@pytest.mark.parametrize("text", NO_LIMITS)
def test_B126_a_limit_that_is_none_is_refused_where_it_is_set(text: str, tmp_path: Path) -> None:
    value: Any = NO_LIMITS[text]
    said = rf"={re.escape(repr(value))}: expected a number above 0"
    for options in ({"rule": fixed(value)}, {"warmup_cap": value}, {"max_threshold": value}):
        with pytest.raises(ValueError, match=said):
            AdaptiveClipThreshold(**options)
    for options in ({"rule": fixed(value)}, {"rules": {"a": fixed(value)}}, {"clip_value": {"a": value}}):
        with pytest.raises(ValueError, match=said):
            LayerClipCallback(**options)
    for key, argument in {
        "adaptive_clip": f"rule: {{name: fixed, threshold: {text}}}",
        "layer_clip": f"clip_value: {{a: {text}}}",
    }.items():
        path = tmp_path / "stabilizer.yaml"
        path.write_text(f"{key}: {{{argument}}}")
        with pytest.raises(ValueError, match=rf"{key}\b.*{re.escape(repr(value))}"):
            load_callbacks(path)


def test_B126_none_is_off_where_there_is_a_default_and_an_error_where_a_limit_is_needed() -> None:
    with pytest.raises(ValueError, match="threshold=None: expected a number above 0"):
        AdaptiveClipThreshold(rule=fixed(None))  # type: ignore[arg-type]
    off = AdaptiveClipThreshold(warmup_cap=None, max_threshold=None)
    with HandLoop(off, LayerClipCallback(clip_value=None, warmup_cap=None), a=3) as loop:
        assert norms_of(loop.step(a=1e6))["a"] == pytest.approx(1e6)


def test_B135_one_coefficient_is_sent_to_every_device() -> None:
    plan = StepPlan(torch.tensor([9.0, 16.0], dtype=torch.float64))
    plan.multiply_total(torch.tensor(0.2))
    # A device without values stands for the second one: nothing can be computed there, only asked for.
    elsewhere = [torch.empty(3, device="meta"), torch.empty(2, device="meta")]
    here = [torch.tensor([3.0]), torch.tensor([4.0])]
    apply_plan_(plan, [here[0], elsewhere[0], here[1], elsewhere[1]], [0, 0, 1, 1])
    assert torch.cat(here).tolist() == pytest.approx([0.6, 0.8])
    assert [gradient._version for gradient in elsewhere] == [1, 1]
