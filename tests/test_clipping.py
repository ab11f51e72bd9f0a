"""What a clip does to gradients, and what it leaves alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, StabilizerCallback, StepContext
from stabilizer.errors import StabilizerWarning
from tests.clip_loops import HandLoop, fixed, gradient_of, norms_of
from tests.clip_reference import clip, worst_error
from tests.contract_hosts import make_host

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LIMITS = {"a": 1.0, "b": 2.0, "c": 1.0}


def layer_clip(**options: Any) -> LayerClipCallback:
    """One with LIMITS, unless told otherwise."""
    rules = {"b": fixed(LIMITS["b"])}
    return LayerClipCallback(**{"rule": fixed(LIMITS["a"]), "rules": rules, "strict": True, **options})


def total_clip(threshold: float = 1.5, **options: Any) -> AdaptiveClipThreshold:
    """One with a fixed threshold, unless told otherwise."""
    return AdaptiveClipThreshold(**{"rule": fixed(threshold), "strict": True, **options})


def expected(norms: dict[str, float], sizes: dict[str, int], total_limit: float = math.inf) -> Any:
    """The oracle's clip of the gradients of a HandLoop."""
    gradients = {name: gradient_of(norm, sizes[name]) for name, norm in norms.items()}
    return clip(gradients, str, layer_limits=LIMITS, total_limit=total_limit)


class Third(StabilizerCallback):
    """One more, which looks before and which looks after."""

    def on_gradients(self, context: StepContext) -> None:
        self.total = context.plan.total_norm().item()


SIZES = {"a": 3, "b": 5, "c": 2}
NORMS = {"a": 4.0, "b": 1.5, "c": 0.9}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_layers_first_then_the_total_whatever_the_list_says(order: tuple[int, ...]) -> None:
    callbacks = [layer_clip(every_n_steps=1), total_clip(), Third(strict=True)]
    with HandLoop(*(callbacks[number] for number in order), **SIZES) as loop:
        received = loop.step(**NORMS)
    reference = expected(NORMS, SIZES, total_limit=1.5)
    assert reference.total_between == pytest.approx(math.sqrt(1 + 2.25 + 0.81))
    assert worst_error(received, reference.gradients) < 1e-6
    assert loop.values("clip/total_coefficient")[0] == pytest.approx(reference.total_coefficient, rel=1e-6)
    assert loop.values("clip/layer_coefficient/a")[0] == pytest.approx(0.25, rel=1e-6)
    assert callbacks[2].total == pytest.approx(1.5, rel=1e-6)  # type: ignore[attr-defined]


def test_history_of_the_total_is_of_what_the_layers_leave() -> None:
    total = total_clip(rule={"name": "mean_multiple", "k": 3.0, "warmup_steps": 2}, warmup_cap=None)
    with HandLoop(layer_clip(), total, a=3, b=5) as loop:
        loop.steps(2, a=100.0, b=0.0)
        assert total.thresholds()["total"] == pytest.approx(3.0 * LIMITS["a"], rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_total_clipped", [False, True])
def test_each_gradient_is_written_once_or_not_at_all(dtype: torch.dtype, is_total_clipped: bool) -> None:
    callbacks = [layer_clip(), total_clip(1.0 if is_total_clipped else 100.0)]
    with HandLoop(*callbacks, dtype=dtype, **SIZES) as loop:
        received = loop.step(**NORMS)
    assert loop.changes == {"a": 1, "b": int(is_total_clipped), "c": int(is_total_clipped)}
    rounded = {name: gradient_of(norm, SIZES[name], dtype=dtype).float() for name, norm in NORMS.items()}
    reference = clip(rounded, str, layer_limits=LIMITS, total_limit=1.0 if is_total_clipped else math.inf)
    assert worst_error(received, reference.gradients) < DTYPES[dtype]
    for name in () if is_total_clipped else ("b", "c"):
        assert same_bits(received[name], gradient_of(NORMS[name], SIZES[name], dtype=dtype)), name


def test_a_quiet_step_touches_nothing() -> None:
    with HandLoop(layer_clip(), total_clip(100.0), **SIZES) as loop:
        received = loop.step(a=1.0, b=2.0, c=1e-30)
    assert loop.changes == {"a": 0, "b": 0, "c": 0}
    assert same_bits(received["c"], gradient_of(1e-30, 2))


def same_bits(found: Tensor | None, given: Tensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    assert found is not None
    return found.dtype == given.dtype and torch.equal(found.view(torch.uint8), given.view(torch.uint8))


def test_a_tower_that_explodes_takes_no_other_with_it() -> None:
    """The norms of two towers differ by 30, as those of vision and language do."""
    usual, spike = {"big": 30.0, "small": 1.0}, {"big": 3000.0, "small": 1.0}
    found = {}
    for callback in (AdaptiveClipThreshold(strict=True), LayerClipCallback(strict=True)):
        with HandLoop(callback, big=64, small=16) as loop:
            loop.steps(60, **usual)
            found[type(callback)] = loop.step(**spike)
            assert loop.changes["big"] == 1
    alone, together = found[LayerClipCallback], found[AdaptiveClipThreshold]
    assert same_bits(alone["small"], gradient_of(1.0, 16))
    assert norms_of(alone)["big"] == pytest.approx(60.0, rel=1e-3)
    assert norms_of(together)["small"] < 0.1


TOWERS = [(1.0, 2.0), (1.1, 2.1), (0.9, 1.9), (1.0, 2.0), (40.0, 2.0), (1.0, 90.0), (1.1, 2.0)]
FIRST_CLIP = 4


def _observed(*, mode: Any) -> tuple[dict[str, Tensor], dict[tuple[str, int], float]]:
    rule = {"name": "mean_multiple", "k": 3.0, "warmup_steps": 2}
    options: dict[str, Any] = {"rule": rule, "mode": mode, "every_n_steps": 1, "strict": True}
    callbacks = [] if mode is None else [LayerClipCallback(**options), AdaptiveClipThreshold(**options)]
    if not callbacks:
        callbacks = [StabilizerCallback()]
    with HandLoop(*callbacks, learning_rate=0.1, a=3, b=5) as loop:
        for a, b in TOWERS:
            loop.step(a=a, b=b)
    return loop.weights, loop.points


def test_observing_changes_nothing_and_says_what_acting_would() -> None:
    untouched, nothing = _observed(mode=None)
    observed, says = _observed(mode="observe")
    clipped, does = _observed(mode="act")
    assert not nothing
    assert all(torch.equal(untouched[name], observed[name]) for name in untouched)
    assert not torch.equal(untouched["a"], clipped["a"])
    # Up to the first clip, and what is said of the layers in it; the total is then what the layers left of it.
    kinds = ("clip/layer_threshold/", "clip/layer_coefficient/", "clip/layer_rate")
    for (tag, step), value in does.items():
        if tag.startswith("clip/") and (step < FIRST_CLIP or (step == FIRST_CLIP and tag.startswith(kinds))):
            assert says[tag, step] == value, (tag, step)
    assert says["clip/layer_coefficient/a", FIRST_CLIP] == pytest.approx(3.0 / 40, rel=0.05)
    # The total has a cap until its rule has a threshold; a layer has none.
    assert says["clip/total_threshold", 0] == 1.0
    assert ("clip/layer_threshold/a", 0) not in says
    assert {tag for tag, _ in does if tag.startswith("clip/")} == {tag for tag, _ in says if tag.startswith("clip/")}
    assert not any(tag.startswith("skip/") or "after" in tag for tag, _ in says)


@pytest.mark.parametrize("host_name", ["lightning.pytorch", "accelerate", "plain"])
def test_observing_in_a_host_changes_no_weight(host_name: str) -> None:
    host = make_host(host_name)
    options: dict[str, Any] = {"rule": fixed(0.1), "every_n_steps": 1}
    runs = []
    for mode in (None, "observe", "act"):
        callbacks = [] if mode is None else [LayerClipCallback(**options, mode=mode), total_clip(0.1, mode=mode)]  # type: ignore[arg-type]
        runs.append(host.train(callbacks))
        if mode is not None:
            assert any(
                tag.startswith("clip/layer_coefficient/") and value < 1 for (tag, _), value in host.points.items()
            )
    untouched, observed, clipped = runs
    assert all(torch.equal(untouched[name], observed[name]) for name in untouched)
    assert not all(torch.equal(untouched[name], clipped[name]) for name in untouched)


@pytest.mark.parametrize("rule", ["robust_log", "mean_multiple", "quantile", "zscore"])
def test_a_layer_of_zeros_stays_one(rule: str) -> None:
    """A norm of 0 divides nothing and teaches nothing."""
    callbacks = [
        LayerClipCallback(rule={"name": rule, "warmup_steps": 5}, strict=True),
        AdaptiveClipThreshold(strict=True),
    ]
    with HandLoop(*callbacks, a=3, b=5) as loop:
        loop.steps(60, a=0.0, b=1.0)
        received = loop.step(a=0.0, b=1000.0)
        assert callbacks[0].thresholds()["a"] == math.inf
    assert norms_of(received)["a"] == 0.0
    assert 0.0 < norms_of(received)["b"] < 1000.0
    assert not any(math.isnan(value) for value in loop.points.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_left_and_goes_nowhere(bad: float) -> None:
    """With `ignore` the gradients stay as they are; other layers are clipped as if nothing were."""
    callbacks = [layer_clip(on_nonfinite="ignore"), total_clip(on_nonfinite="ignore")]
    with HandLoop(*callbacks, **SIZES) as loop:
        with pytest.warns(StabilizerWarning, match=r"not finite in a.weight"):
            received = loop.step(a=bad, b=8.0, c=0.5)
        assert loop.changes == {"a": 0, "b": 1, "c": 0}
        after = loop.step(a=1.0, b=1.0, c=0.0)
    assert loop.changes == {"a": 0, "b": 0, "c": 0}
    assert not received["a"].isfinite().any()  # type: ignore[union-attr]
    # The total has no norm, and so no say.
    assert norms_of(received)["b"] == pytest.approx(2.0, rel=1e-6)
    assert norms_of(received)["c"] == pytest.approx(0.5, rel=1e-6)
    assert norms_of(after) == pytest.approx({"a": 1.0, "b": 1.0, "c": 0.0})


class Proposes(StabilizerCallback):
    """A monitor of a user's own that proposes whatever it likes."""

    acts = True

    def __init__(self, value: float, *, to: str) -> None:
        super().__init__(strict=True)
        self.value, self.to = value, to

    def on_gradients(self, context: StepContext) -> None:
        if self.to == "layers":
            context.plan.clip_layers(torch.tensor([self.value, 0.5]))
        else:
            context.plan.clip_total(torch.tensor(self.value))


@pytest.mark.parametrize("to", ["layers", "total"])
@pytest.mark.parametrize("value", [math.nan, -0.5, -math.inf, math.inf, 0.0, 2.0])
def test_a_senseless_coefficient_counts_as_one(value: float, to: str) -> None:
    with HandLoop(Proposes(value, to=to), a=3, b=5) as loop:
        received = loop.step(a=1.0, b=1.0)
    assert loop.changes == {"a": 0, "b": int(to == "layers")}
    assert norms_of(received) == pytest.approx({"a": 1.0, "b": 0.5 if to == "layers" else 1.0}, rel=1e-6)
