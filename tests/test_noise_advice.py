"""Advice on the batch: what is said of a ratio, and how rarely it changes where a ratio hovers at a boundary."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from stabilizer.noise import Advice, Advised

NAN, INF = math.nan, math.inf


def _verdicts(ratios: Any, *, stderr: float, advice: Advice | None = None) -> list[str]:
    advice = advice or Advice()
    return [advice.take(float(ratio), stderr=stderr, reliable=True).verdict for ratio in ratios]


def _num_changes(verdicts: list[str]) -> int:
    return sum(one != other for one, other in itertools.pairwise(verdicts))


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(0.0, "wasted"), (0.49, "wasted"), (0.51, "matched"), (1.0, "matched"), (1.99, "matched"), (2.01, "larger")],
)
def test_the_first_ratio_is_taken_as_it_is(ratio: float, verdict: str) -> None:
    assert Advice().take(ratio, stderr=0.3, reliable=True).verdict == verdict


@pytest.mark.parametrize(
    ("start", "stderr", "stays", "goes", "verdict"),
    [
        # (ratio - 2 stderr) / 1.1 > 2, and so on.
        (1.0, 0.1, 2.39, 2.41, "larger"),
        (1.0, 0.5, 3.19, 3.21, "larger"),
        (3.0, 0.1, 1.63, 1.61, "matched"),
        (1.0, 0.02, 0.42, 0.41, "wasted"),
        (0.3, 0.02, 0.58, 0.60, "matched"),
        (0.3, 0.1, 2.0, 2.41, "larger"),
        (3.0, 0.1, 0.28, 0.2, "wasted"),
    ],
)
def test_a_boundary_is_crossed_only_when_clear(
    start: float, stderr: float, stays: float, goes: float, verdict: str
) -> None:
    advice = Advice()
    advice.take(start, stderr=0.0, reliable=True)
    before = advice.take(stays, stderr=stderr, reliable=True).verdict
    assert before != verdict
    assert advice.take(goes, stderr=stderr, reliable=True).verdict == verdict


@pytest.mark.parametrize(
    ("start", "ratio", "verdict"), [(1.0, 2.5, "matched"), (3.0, 1.5, "larger"), (0.7, 0.4, "matched")]
)
def test_a_large_error_never_moves_it_the_other_way(start: float, ratio: float, verdict: str) -> None:
    advice = Advice()
    advice.take(start, stderr=0.0, reliable=True)
    assert advice.take(ratio, stderr=1.0, reliable=True).verdict == verdict


@pytest.mark.parametrize("boundary", [0.5, 2.0])
@pytest.mark.parametrize(("error", "most"), [(0.02, 0), (0.1, 3), (0.25, 8)])
def test_a_ratio_that_hovers_at_a_boundary_does_not_flicker(boundary: float, error: float, most: int) -> None:
    # As a running mean at 0.99 moves: correlated over 100 steps, with the error that is told.
    counts, plain_counts = [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        deviation, ratios = rng.standard_normal(), np.empty(10_000)
        for step, draw in enumerate(rng.standard_normal(10_000)):
            deviation = 0.99 * deviation + math.sqrt(1 - 0.99**2) * draw
            ratios[step] = boundary * (1 + error * deviation)
        counts.append(_num_changes(_verdicts(ratios, stderr=boundary * error)))
        plain_counts.append(_num_changes([str(ratio > boundary) for ratio in ratios]))
    assert max(counts) <= most
    assert min(plain_counts) > 200


def test_a_ratio_that_moves_on_is_followed() -> None:
    ratios = np.concatenate([np.geomspace(0.1, 10, 200), np.geomspace(10, 0.1, 200)])
    verdicts = _verdicts(ratios, stderr=0.02)
    changes = [verdict for verdict, before in zip(verdicts, ["", *verdicts], strict=False) if verdict != before]
    assert changes == ["wasted", "matched", "larger", "matched", "wasted"]
    assert verdicts[199] == "larger"
    assert _num_changes(verdicts) == 4


def test_unreliable_says_so_at_once_and_remembers_the_zone() -> None:
    advice = Advice()
    assert advice.take(3.0, stderr=0.1, reliable=False).verdict == "unreliable"
    assert advice.take(3.0, stderr=0.1, reliable=True).verdict == "larger"
    for ratio, stderr in ((NAN, 0.1), (3.0, NAN), (INF, 0.1)):
        assert advice.take(ratio, stderr=stderr, reliable=True).verdict == "unreliable"
    assert advice.take(0.1, stderr=0.0, reliable=False) == Advised(
        "unreliable", "The noise scale is not known: the gradient does not stand clear of its noise."
    )
    assert advice.take(1.95, stderr=0.1, reliable=True).verdict == "larger"


def test_sentences() -> None:
    advice = Advice()
    said = [
        advice.take(ratio, stderr=stderr, reliable=True).sentence
        for ratio, stderr in ((12.34, 0.5), (1.9, 0.2), (1.0, 0.05), (2.1, 0.3), (0.123, 0.012), (0.51, 0.05))
    ]
    larger, matched = "a larger batch would pay", "the batch is well matched"
    wasted = "samples are wasted, a smaller batch would learn nearly as much a step"
    assert said == [
        f"The noise scale is 12 +- 0.5 times the batch: {larger}.",
        f"The noise scale is 1.9 +- 0.2 times the batch: {larger}, as before; it is not clearly under 2.",
        f"The noise scale is 1 +- 0.05 times the batch: {matched}.",
        f"The noise scale is 2.1 +- 0.3 times the batch: {matched}, as before; it is not clearly over 2.",
        f"The noise scale is 0.12 +- 0.012 times the batch: {wasted}.",
        f"The noise scale is 0.51 +- 0.05 times the batch: {wasted}, as before; it is not clearly over 0.5.",
    ]


def test_resumed_it_says_the_same() -> None:
    ratios = 2 + 0.3 * np.random.default_rng(0).standard_normal(200)
    whole = _verdicts(ratios, stderr=0.1)
    first, second = Advice(), Advice()
    start = _verdicts(ratios[:77], stderr=0.1, advice=first)
    second.load_state_dict(first.state_dict())
    assert start + _verdicts(ratios[77:], stderr=0.1, advice=second) == whole
    assert _num_changes(whole) > 0
    assert Advice().state_dict() == {"zone": None}


@pytest.mark.parametrize("state", [{}, {"zone": 3}, {"zone": "larger"}, {"zone": 1, "other": 2}], ids=repr)
def test_a_state_that_does_not_fit_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="advice: the saved state is"):
        Advice().load_state_dict(state)
