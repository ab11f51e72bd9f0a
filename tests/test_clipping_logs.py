"""What clips log: the numbers of the reference, under their names, at their steps, and nothing that says nothing."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, LayerClipCallback, StabilizerCallback
from tests.clip_loops import HandLoop, fixed, gradient_of
from tests.clip_reference import Clipped, clip, clipped_run
from tests.contract_hosts import HOSTS, make_host
from tests.lightning_models import expected_batches

SIZES = {"a": 3, "b": 5}
LIMITS = {"a": 1.0, "b": 2.0}
TOTAL_LIMIT = 1.8
STEPS = [{"a": 0.5, "b": 0.4}, {"a": 3.0, "b": 0.4}, {"a": 0.5, "b": 4.0}, {"a": 9.0, "b": 9.0}, {"a": 0.0, "b": 1.0}]

LAYER_TAGS = {
    f"{tag}/{layer}" for tag in ("clip/layer_threshold", "clip/layer_coefficient", "clip/layer_rate") for layer in SIZES
} | {"clip/layer_rate"}
TOTAL_TAGS = {"clip/total_threshold", "clip/total_coefficient", "clip/total_rate"}
SKIP_TAGS = {"skip/count", "skip/consecutive"}
NORM_TAGS = {f"grad_norm/{tag}/{layer}" for tag in ("layer", "layer_after") for layer in SIZES}


def layer_clip(**options: Any) -> LayerClipCallback:
    """One with LIMITS, that logs every step."""
    return LayerClipCallback(
        **{"rule": fixed(1.0), "rules": {"b": fixed(2.0)}, "every_n_steps": 1, "strict": True, **options}
    )


def total_clip(**options: Any) -> AdaptiveClipThreshold:
    """One with TOTAL_LIMIT."""
    return AdaptiveClipThreshold(**{"rule": fixed(TOTAL_LIMIT), "strict": True, **options})


def norms(**options: Any) -> GradNormCallback:
    """One that logs everything every step."""
    return GradNormCallback(layer_every_n_steps=1, heatmap_every_n_steps=None, strict=True, **options)


def reference(number: int) -> Clipped:
    """The oracle's step."""
    gradients = {name: gradient_of(norm, SIZES[name]) for name, norm in STEPS[number].items()}
    return clip(gradients, str, layer_limits=LIMITS, total_limit=TOTAL_LIMIT)


def expected_points(tags: set[str]) -> dict[tuple[str, int], float]:
    """Everything that these steps log, from the oracle alone."""
    points: dict[tuple[str, int], float] = {}
    over: dict[str, int] = dict.fromkeys([*SIZES, "total"], 0)
    for step in range(len(STEPS)):
        found = reference(step)
        values = {"grad_norm/total": found.total, "grad_norm/total_after": found.total_after}
        values |= {"clip/total_threshold": TOTAL_LIMIT, "clip/total_coefficient": found.total_coefficient}
        over["total"] += found.total_coefficient < 1
        for layer in SIZES:
            over[layer] += found.coefficients[layer] < 1
            values[f"clip/layer_threshold/{layer}"] = LIMITS[layer]
            values[f"clip/layer_coefficient/{layer}"] = found.coefficients[layer]
            values[f"clip/layer_rate/{layer}"] = over[layer] / (step + 1)
            values[f"grad_norm/layer/{layer}"] = found.norms[layer]
            values[f"grad_norm/layer_after/{layer}"] = found.norms_after[layer]
        values["clip/total_rate"] = over["total"] / (step + 1)
        values["clip/layer_rate"] = sum(over[layer] for layer in SIZES) / len(SIZES) / (step + 1)
        values |= {"skip/count": 0.0, "skip/consecutive": 0.0, "grad_norm/nonfinite": 0.0}
        points |= {(tag, step): value for tag, value in values.items() if tag in tags}
    return points


ALL_NORM_TAGS = NORM_TAGS | {"grad_norm/total", "grad_norm/total_after", "grad_norm/nonfinite"}
CASES: dict[str, tuple[list[Any], set[str]]] = {
    "layers": ([layer_clip], LAYER_TAGS | SKIP_TAGS | NORM_TAGS),
    "both": (
        [total_clip, layer_clip],
        LAYER_TAGS | TOTAL_TAGS | SKIP_TAGS | (ALL_NORM_TAGS - {"grad_norm/nonfinite"}),
    ),
    "both and norms": (
        [norms, total_clip, layer_clip],
        LAYER_TAGS | TOTAL_TAGS | SKIP_TAGS | ALL_NORM_TAGS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_point_is_the_reference_s(case: str) -> None:
    makers, tags = CASES[case]
    with HandLoop(*(make() for make in makers), **SIZES) as loop:
        for step in STEPS:
            loop.step(**step)
    expected = expected_points(tags)
    if case == "layers":  # nobody clips the total
        after = {(tag, step): reference(step).coefficients for tag, step in expected if "layer_after" in tag}
        expected |= {
            (tag, step): reference(step).norms[tag[-1]] * factors[tag[-1]] for (tag, step), factors in after.items()
        }
    assert loop.points == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("beside", [[], [norms]])
def test_no_norm_afterwards_is_over_its_threshold(beside: list[Any]) -> None:
    generator = random.Random(0)
    with HandLoop(*(make() for make in [*beside, layer_clip, total_clip]), **SIZES) as loop:
        for _ in range(50):
            loop.step(**{name: generator.lognormvariate(0, 2) for name in SIZES})
    points = loop.points
    for step in range(50):
        for name, limit in LIMITS.items():
            assert points[f"clip/layer_threshold/{name}", step] == limit
            assert points[f"grad_norm/layer_after/{name}", step] <= limit * (1 + 1e-6)
        assert points["grad_norm/total_after", step] <= TOTAL_LIMIT * (1 + 1e-6)


def test_a_share_of_one_half() -> None:
    callbacks = [layer_clip(), total_clip(rule=fixed(0.8))]
    with HandLoop(*callbacks, **SIZES) as loop:
        for step in range(40):
            loop.step(a=3.0 if step % 2 else 0.5, b=0.1)
    points = loop.points
    assert points["clip/layer_rate/a", 39] == points["clip/total_rate", 39] == 0.5
    assert points["clip/layer_rate/b", 39] == 0.0
    assert points["clip/layer_rate", 39] == 0.25


@pytest.mark.filterwarnings("ignore:LayerClipCallback, step")
def test_the_share_is_of_the_last_thousand_steps() -> None:
    callback = layer_clip(every_n_steps=1100, rules={})
    with HandLoop(callback, a=2) as loop:
        loop.step(a=0.5)
        for step in range(1100):
            loop.step(a=3.0 if step < 350 else 0.5)
    # Of the steps 101 to 1100, those up to 350 were over the threshold.
    assert loop.values("clip/layer_rate/a") == {0: 0.0, 1100: 0.25}


@pytest.mark.filterwarnings("ignore:step 1")
def test_at_the_threshold_and_beyond_all_numbers_nothing_is_clipped() -> None:
    with HandLoop(layer_clip(rules=None, on_nonfinite="ignore"), a=1) as loop:
        for norm in (1.0, math.inf, math.nan):
            loop.step(a=norm)
            assert loop.changes == {"a": 0}
    assert loop.values("clip/layer_rate/a") == {0: 0.0, 1: 0.0, 2: 0.0}
    assert loop.values("clip/layer_coefficient/a") == {0: 1.0, 1: 1.0, 2: 1.0}


def test_an_infinite_threshold_is_not_logged() -> None:
    rule = {"name": "mean_multiple", "k": 3.0, "warmup_steps": 3}
    callbacks = [layer_clip(rule=rule, rules=None), total_clip(rule=rule, warmup_cap=None)]
    with HandLoop(*callbacks, **SIZES) as loop:
        loop.steps(5, a=1.0, b=2.0)
    assert loop.values("clip/layer_threshold/a") == pytest.approx({3: 3.0, 4: 3.0})
    assert list(loop.values("clip/layer_coefficient/a")) == list(range(5))
    assert loop.values("clip/total_threshold") == pytest.approx({3: 3 * math.sqrt(5), 4: 3 * math.sqrt(5)})
    assert all(math.isfinite(value) for value in loop.points.values())


def test_intervals_and_prefixes() -> None:
    callbacks = [layer_clip(every_n_steps=2, name="mine"), total_clip(every_n_steps=3), norms(name="other")]
    with HandLoop(*callbacks, **SIZES) as loop:
        loop.steps(6, a=3.0, b=0.4)
    assert list(loop.values("mine/clip/layer_coefficient/a")) == [0, 2, 4]
    assert list(loop.values("clip/total_threshold")) == [0, 3]
    # Nobody of the same name logs norms: both do it themselves.
    assert list(loop.values("mine/grad_norm/layer_after/a")) == [0, 2, 4]
    assert list(loop.values("grad_norm/total_after")) == [0, 3]
    after = loop.values("other/grad_norm/layer_after/a")
    assert after[0] == pytest.approx(1.0, rel=1e-6)
    assert not any(tag.startswith("clip/layer") for tag, _ in loop.points)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("host_name", HOSTS)
def test_first_step_of_every_host(host_name: str, with_norms: bool) -> None:
    """The first step is that of SGD, whatever the optimizer."""
    host = make_host(host_name)
    callbacks: list[StabilizerCallback] = [
        LayerClipCallback(rule=fixed(0.85), every_n_steps=1, strict=True),
        AdaptiveClipThreshold(rule=fixed(2.0), strict=True),
    ]
    host.train([*callbacks, *([norms()] if with_norms else [])], num_steps=2)
    steps = [expected_batches("transformer", 0)]
    [found] = clipped_run(steps, layer_limits=lambda layer: 0.85, total_limits=[2.0], prefix="model.")
    points = {tag: value for (tag, step), value in host.points.items() if step == 0}
    expected = {"grad_norm/total": found.total, "grad_norm/total_after": found.total_after}
    expected |= {"clip/total_threshold": 2.0, "clip/total_coefficient": found.total_coefficient}
    for layer, norm in found.norms.items():
        expected |= {f"grad_norm/layer/{layer}": norm, f"grad_norm/layer_after/{layer}": found.norms_after[layer]}
        expected |= {f"clip/layer_coefficient/{layer}": found.coefficients[layer]}
    assert {tag: points[tag] for tag in expected} == pytest.approx(expected, rel=1e-5)
