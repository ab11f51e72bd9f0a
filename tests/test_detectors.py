"""The loss detectors: against an oracle, and with losses that must neither fire nor blind nor poison."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from stabilizer.detectors import Detection, LossDetector
from tests import reference_detectors as reference

Array = npt.NDArray[np.float64]
NAN, INF = math.nan, math.inf


def noise(num: int, seed: int = 0, *, kind: str = "normal") -> Array:
    """In sigmas: all kinds have about the same median absolute deviation."""
    rng = np.random.default_rng(seed)
    if kind == "normal":
        return rng.standard_normal(num)
    return rng.laplace(size=num) if kind == "Laplace" else rng.standard_t(3, num) / 1.134


def feed(detector: LossDetector, values: Iterable[float], start: int = 0) -> list[Detection]:
    """Everything that is found."""
    return [found for step, value in enumerate(values, start) for found in detector.update(step, float(value))]


def warm(num: int = 1500, seed: int = 0, **options: Any) -> LossDetector:
    """One that has seen a healthy run: level 2, sigma 0.1."""
    detector = LossDetector(**options)
    feed(detector, 2 + 0.1 * noise(num, seed))
    return detector


def _cases() -> dict[str, tuple[Array | Sequence[float], dict[str, Any], set[str]]]:
    steps = np.arange(1600)
    normal = noise(1600)
    spiky = normal.copy()
    spiky[[600, 601, 900, 1204]] = [8.0, 3.1, 25.0, 60.0]
    storm = normal + np.where((steps >= 700) & (noise(1600, 3) > 0.5) & (steps < 1400), 15.0, 0.0)
    gaps = 2 + 0.1 * (normal + np.where(steps > 1000, 5, 0))
    gaps[[0, 20, 41, 99, 100, 101, 500, 1001, 1004]] = [NAN, INF, -INF, NAN, INF, NAN, NAN, INF, NAN]
    rounded = np.round((2.5 + 0.005 * normal) * 64) / 64
    rounded[[800, 801, 1200]] += 0.1
    return {
        "spikes": (2 + 0.1 * spiky, {}, {"jump"}),
        "t3": (2 + 0.1 * noise(1600, 4, kind="t3"), {"limits": (3.0, 6.0)}, {"jump"}),
        "lasting jump": (2 + 0.1 * (normal + np.where(steps > 700, 5, 0)), {}, {"jump"}),
        "ramp": (2 + 0.1 * (normal + np.clip((steps - 700) / 20, 0, 5)), {}, {"drift"}),
        "slow ramp": (2 + 0.1 * (normal + np.clip((steps - 400) / 100, 0, 9)), {"slack": 0.5}, {"drift"}),
        "variance": (2 + 0.1 * normal * np.where(steps > 800, 3, 1), {}, {"variance", "jump"}),
        "storm": (2 + 0.1 * storm, {}, {"jump"}),
        "not finite": (gaps, {}, {"jump"}),
        "falling": (2 + 8 * np.exp(-steps / 150) + 0.02 * normal + np.where(steps == 300, 1.0, 0), {}, {"jump"}),
        "rounded": (rounded, {}, {"jump"}),
        "constant": (np.where(steps == 500, 2.1, 2.0), {}, {"jump"}),
        "huge first": ([1e6, *(2 + 0.1 * normal[:100]), 8.0], {}, {"jump"}),
        "small windows": (
            0.1
            * (normal * np.where(steps > 1400, 4, 1) + np.where(steps > 700, 4, 0) + np.clip(steps / 10 - 110, 0, 9)),
            {"window": 90, "short": 40, "warmup": 60, "accept": 12, "drift_limit": 8.0, "variance_limit": 2.0},
            {"jump", "drift", "variance"},
        ),
    }


CASES = _cases()
_NAMES = {
    "short": "short_window",
    "warmup": "warmup_steps",
    "target": "jump_target",
    "limits": "jump_limits",
    "slack": "drift_slack",
    "accept": "accept_after",
}


@pytest.mark.parametrize("label", CASES)
def test_every_detection_is_that_of_the_oracle(label: str) -> None:
    losses, options, kinds = CASES[label]
    expected = reference.detections([float(loss) for loss in losses], **options)
    found = feed(LossDetector(**{_NAMES.get(key, key): value for key, value in options.items()}), losses)
    assert {one.kind for one in found} >= kinds, "the case shows what it is for"
    assert [(one.kind, one.step, one.first_step) for one in found] == [
        (one.kind, one.step, one.first_step) for one in expected
    ]
    for mine, theirs in zip(found, expected, strict=True):
        for field in ("value", "median", "sigma", "score", "limit"):
            assert getattr(mine, field) == pytest.approx(getattr(theirs, field), rel=1e-9, abs=1e-12), (mine, field)


def test_a_detection_says_what_was_seen_against_what_and_since_when() -> None:
    detector = warm()
    assert feed(detector, [2.0, 2.1], start=1500) == []
    (found,) = feed(detector, [2.8], start=1502)
    assert (found.kind, found.step, found.first_step, found.value, found.count) == ("jump", 1502, 1502, 2.8, 1)
    assert found.median == pytest.approx(2, abs=0.05)
    assert found.sigma == pytest.approx(0.1, rel=0.1)
    assert found.score == (found.value - found.median) / found.sigma
    assert 4 <= found.limit <= 5.5
    assert detector.last[-3:] == [(1500, 2.0), (1501, 2.1), (1502, 2.8)]
    assert len(detector.last) == 32


def test_two_in_a_row_begin_at_the_first_of_them() -> None:
    (found,) = feed(warm(), [2.0, 2.35, 2.35], start=1500)
    assert (found.kind, found.step, found.first_step) == ("jump", 1502, 1501)
    assert 2.75 <= found.limit < found.score < 4


def test_four_of_five_begin_at_the_first_of_them() -> None:
    # Never two in a row above the limit of two.
    found = feed(warm(), [2.0, 2.268, 2.268, 2.0, 2.268, 2.268], start=1500)
    assert [(one.step, one.first_step) for one in found] == [(1505, 1501)]
    assert 2.5 <= found[0].limit < found[0].score < 2.75


# What must not fire.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "trend",
    [
        lambda s: 10 - s / 500,
        lambda s: 2 + 9 * np.exp(-s / 100),
        lambda s: 2 + 9 * np.exp(-s / 1000),
        lambda s: 10 * (s + 10.0) ** -0.3,
        lambda s: 4 - 0.5 * (s // 1000),
        lambda s: np.maximum(6 - s / 200, 3),
        lambda s: -s / 10,
    ],
    ids=["line", "fast", "slow", "power", "steps", "flattens", "steep and negative"],
)
def test_a_falling_loss_never_fires(trend: Any, seed: int) -> None:
    steps = np.arange(4000)
    losses = trend(steps) + 0.05 * np.clip(noise(4000, seed), -3, 3)
    assert feed(LossDetector(), losses) == []


def test_one_healthy_run_of_each_noise_is_quiet() -> None:
    for kind, seed in (("normal", 0), ("Laplace", 1), ("t3", 2)):
        assert feed(LossDetector(), 2 + 0.1 * noise(8000, seed, kind=kind)) == [], kind


def test_nothing_is_found_in_the_warm_up_and_everything_from_there_on() -> None:
    losses = 2 + 0.1 * noise(100)
    for warmup_steps in (60, 100):
        for step in (warmup_steps - 1, warmup_steps):
            found = feed(LossDetector(warmup_steps=warmup_steps), [*losses[:step], 9.0])
            assert [one.step for one in found] == ([step] if step == warmup_steps else []), (warmup_steps, step)


def test_losses_that_are_not_finite_leave_no_trace() -> None:
    losses = 2 + 0.1 * noise(1200)
    losses[900:] += 0.6
    clean, dirty = LossDetector(), LossDetector()
    expected = feed(clean, losses)
    found = []
    for step, loss in enumerate(losses):
        for bad in (NAN, INF, -INF)[: step % 4]:
            assert dirty.update(step, bad) == []
        found += dirty.update(step, float(loss))
    assert found == expected != []
    assert dirty.state_dict() == clean.state_dict()


@pytest.mark.parametrize("value", [1e300, -1e300, 3.4e38, 1.7e308])
def test_the_largest_numbers_neither_fail_nor_stay(value: float) -> None:
    detector = LossDetector()
    for step in range(1200):
        detector.update(step, value * (-1) ** step if 200 <= step < 260 else 2 + 0.1 * math.sin(step))
        if step in (220, 300, 1000):
            json.dumps(detector.state_dict(), allow_nan=False)
    feed(detector, 2 + 0.1 * noise(1200), start=1200)
    assert [one.step for one in feed(detector, [3.5], start=2400)] == [2400]


@pytest.mark.parametrize("level", [0.0, 5e-324, 1e-200, -3.0, 1e-3, 1e30])
def test_a_constant_loss_has_a_limit_too(level: float) -> None:
    detector = LossDetector()
    assert feed(detector, [level] * 500) == []
    above = level + max(abs(level), 1e-6)
    assert [one.kind for one in feed(detector, [above], start=500)] == ["jump"]


# What must not blind.


@pytest.mark.parametrize("is_scattered", [True, False])
def test_a_burst_of_30_steps_in_100_is_seen_whole_and_the_next_spike_too(is_scattered: bool) -> None:
    for seed in range(5):
        detector = warm(seed=seed)
        rng = np.random.default_rng(seed)
        is_bad = rng.permutation(100) < 30 if is_scattered else np.arange(100) < 30
        found = feed(detector, 2 + 0.1 * (rng.standard_normal(100) + np.where(is_bad, 9.0, 0.0)), start=1500)
        assert {one.step for one in found if one.kind == "jump"} >= {
            1500 + int(step) for step in np.flatnonzero(is_bad)
        }
        # The jump's limit has hardly moved.
        (after,) = feed(detector, [2.7], start=1600)
        assert after.kind == "jump"


def test_a_huge_first_loss_neither_fires_nor_masks() -> None:
    for seed in range(20):
        found = feed(LossDetector(), [1e6, *(2 + 0.2 * noise(100, seed)), 8.0])
        assert [(one.kind, one.step) for one in found] == [("jump", 101)]


@pytest.mark.parametrize("size", [5.0, 8.0, 100.0])
def test_a_lasting_shift_is_accepted_and_there_is_always_a_limit(size: float) -> None:
    for seed in range(3):
        detector = warm(seed=seed)
        rng = np.random.default_rng(seed)
        for delay in range(300):
            loss = 2 + 0.1 * (size + min(max(float(rng.standard_normal()), -2.5), 2.5))
            if delay % 8 == 0 and delay < 160:
                spiked = copy.deepcopy(detector)
                assert feed(spiked, [2 + 0.1 * (size + 12)], start=1500 + delay), "a spike on top of the shift"
            found = detector.update(1500 + delay, loss)
            assert found == [] or delay < 64, (size, seed, delay)
            assert "drift" not in {one.kind for one in found}, "it has been told as a jump"


def test_more_scatter_is_found_and_accepted_and_back_again_is_no_alarm() -> None:
    detector = warm()
    found = feed(detector, 2 + 0.3 * np.clip(noise(600, 1), -3, 3), start=1500)
    first = next(one for one in found if one.kind == "variance")
    assert first.step < 1600
    assert found[-1].step < 1500 + 250, "accepted"
    assert feed(detector, [2 + 0.1 * 30], start=2100), "there is a limit"
    assert feed(detector, 2 + 0.1 * noise(600, 2), start=2101) == []


@pytest.mark.parametrize(("period", "size"), [(110, 15.0), (300, 10.0), (500, 15.0)])
def test_spikes_however_many_do_not_hide_the_next_one(period: int, size: float) -> None:
    losses = 2 + 0.1 * noise(9000)
    spikes = range(2200, 9000, period)
    losses[list(spikes)] += 0.1 * size
    steps = {one.step for one in feed(LossDetector(), losses)}
    assert steps >= set(spikes)
    assert len(steps) <= len(spikes) + 1


def test_outliers_that_have_become_the_rule_are_no_outliers() -> None:
    detector = warm(2000)
    rng = np.random.default_rng(0)
    # A second kind of batch: every fifth, eight sigmas higher.
    losses = 2 + 0.1 * (rng.standard_normal(4000) + np.where(rng.random(4000) < 0.2, 8.0, 0.0))
    steps = [one.step - 2000 for one in feed(detector, losses, start=2000) if one.kind == "jump"]
    assert sum(step < 300 for step in steps) > 30
    assert sum(step >= 1000 for step in steps) <= 3


def test_a_spike_before_a_drift_is_no_part_of_it() -> None:
    detector = warm()
    losses = np.full(100, 2.0)
    losses[::2] = 9.0
    assert {one.kind for one in feed(detector, losses, start=1500)} == {"jump"}


# Rates; those of the benchmark in small.


def _seen(event: Array, *, num: int, within: int, kinds: set[str]) -> float:
    seen = 0
    for seed in range(num // 20):
        detector = warm(2000, seed)
        rng = np.random.default_rng(100 + seed)
        for point in range(20):
            values = event + rng.standard_normal(len(event))
            found = feed(copy.deepcopy(detector), 2 + 0.1 * values[:within], start=5000)
            seen += bool({one.kind for one in found} & kinds)
            feed(detector, 2 + 0.1 * rng.standard_normal(20), start=2000 + 20 * point)
    return seen / num


@pytest.mark.parametrize(
    ("event", "within", "kinds"),
    [
        (np.full(2, 5.0), 2, {"jump"}),
        (np.array([7.0]), 1, {"jump"}),
        (np.arange(1, 61) * 0.05, 60, {"drift"}),
    ],
    ids=["lasting jump of 5 sigma", "spike of 7 sigma", "ramp of 5 sigma in 100 steps"],
)
def test_nearly_all_are_seen_in_time(event: Array, within: int, kinds: set[str]) -> None:
    assert _seen(event, num=300, within=within, kinds=kinds) >= 0.98
