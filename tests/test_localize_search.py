"""The search for the units behind a gradient, played against made-up micro-batches whose bad units are known."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stabilizer.localize.search import Answer, search
from tests.search_oracle import Case, Played, fault, healthy, play

Make = Callable[[np.random.Generator], Case]


def play_search(case: Case, *, max_passes: int = 16, norm: float | None = None, has_rest: bool = False) -> Played:
    scores = torch.tensor(case.scores, dtype=torch.float32)
    norm = case.norm() if norm is None else norm
    hunt = search(scores, norm=norm, limit=case.limit, max_passes=max_passes)
    played = play(hunt, case, Answer, has_rest=has_rest)
    _check(case, played, max_passes)
    return played


def _check(case: Case, played: Played, max_passes: int) -> None:
    """What holds of every finding."""
    finding = played.finding
    assert finding.num_passes == len(played.purposes) <= max_passes
    scores = case.scores[list(finding.units)]
    assert (np.diff(np.where(np.isfinite(scores), scores, math.inf)[np.isfinite(scores)]) <= 0).all()
    if finding.verdict == "tokens":
        assert finding.units
        assert finding.counterfactual == pytest.approx(case.without(finding.units), rel=1e-9)
        assert finding.counterfactual <= case.limit
    assert not finding.groups or finding.verdict == "unfinished"


def _rates(make: Make, *, num_seeds: int, has_rest: bool = False, max_passes: int = 16) -> Counter[str]:
    """How often all planted units and no other were found, how often some of them, how often others too."""
    count: Counter[str] = Counter()
    for seed in range(num_seeds):
        case = make(np.random.default_rng(seed))
        finding = play_search(case, has_rest=has_rest, max_passes=max_passes).finding
        units = set(finding.units)
        if finding.verdict != "tokens":
            count[finding.verdict] += 1
        elif units == case.bad:
            count["exact"] += 1
        else:
            count["part" if units < case.bad else "false"] += 1
        count["passes"] = max(count["passes"], finding.num_passes)
    return count


def simple_case(gradients: list[float], *, limit: float, scores: list[float] | None = None, rest: float = 0.0) -> Case:
    column = np.array(gradients)[:, None]
    return Case(column, np.abs(gradients) if scores is None else np.array(scores), np.array([rest]), limit)


# Planted units that stand out.


@pytest.mark.parametrize("ratio", [3, 30, 1e6])
@pytest.mark.parametrize("num_bad", [1, 2, 5])
@pytest.mark.parametrize("std", [0.3, 1.0])
def test_equally_bad_units_are_found_whole_and_no_other(std: float, num_bad: int, ratio: float) -> None:
    found = _rates(lambda rng: fault(rng, healthy(rng, std=std), num_bad, ratio=ratio), num_seeds=15)
    assert found["exact"] == 15
    assert found["passes"] <= 2


@pytest.mark.parametrize(("std", "ratio"), [(0.3, 3), (0.3, 30), (0.3, 1e6), (1.0, 100), (1.0, 1e6), (2.0, 1e6)])
def test_fifty_bad_units_are_found_whole_and_no_other(std: float, ratio: float) -> None:
    found = _rates(lambda rng: fault(rng, healthy(rng, std=std), 50, ratio=ratio), num_seeds=12)
    assert found["exact"] == 12
    assert found["passes"] <= 2


@pytest.mark.parametrize("num_bad", [1, 2, 5])
@pytest.mark.parametrize("ratio", [30, 1e6])
def test_healthy_scores_over_decades_do_not_hide_them(num_bad: int, ratio: float) -> None:
    found = _rates(lambda rng: fault(rng, healthy(rng, std=2), num_bad, ratio=ratio), num_seeds=15)
    assert found["exact"] == 15
    assert found["passes"] <= 2


def test_barely_over_the_limit() -> None:
    found = _rates(lambda rng: fault(rng, healthy(rng, std=0.3), 1, ratio=1.2), num_seeds=15)
    assert found["exact"] == 15


def test_bad_units_of_one_direction() -> None:
    found = _rates(lambda rng: fault(rng, healthy(rng), 5, ratio=30, is_aligned=True), num_seeds=15)
    assert found["exact"] == 15


def test_jacobians_that_differ_more() -> None:
    found = _rates(lambda rng: fault(rng, healthy(rng), 1, ratio=1000, jacobian=1.5), num_seeds=15)
    assert found["exact"] == 15
    assert found["passes"] <= 2


@pytest.mark.parametrize("ratio", [3, 30, 1e6])
@pytest.mark.parametrize("num_bad", [2, 5, 50])
def test_bad_units_of_strengths_over_two_decades(num_bad: int, ratio: float) -> None:
    # The weak ones may well be harmless: then they need not be named, but nothing healthy may be.
    found = _rates(lambda rng: fault(rng, healthy(rng, std=0.3), num_bad, ratio=ratio, decades=2), num_seeds=12)
    assert found["exact"] + found["part"] == 12
    assert found["passes"] <= 3


@pytest.mark.parametrize("num_units", [4, 8, 16])
def test_few_units_as_of_whole_samples(num_units: int) -> None:
    found = _rates(lambda rng: fault(rng, healthy(rng, num_units, std=0.3), 1, ratio=10), num_seeds=25)
    assert found["exact"] == 25


@pytest.mark.parametrize("num_bad", [1, 2, 5])
def test_heavy_tails_and_units_without_gradient(num_bad: int) -> None:
    def make(rng: np.random.Generator) -> Case:
        return fault(rng, healthy(rng, std=0.3, tail=3, zeros=0.6), num_bad, ratio=1000)

    assert _rates(make, num_seeds=15)["exact"] == 15


def test_what_can_be_left_out_is_of_the_same_kind() -> None:
    # One of twice ten thousand, the others of a hundredth of it: closing the first is enough.
    case = simple_case([2e4, 150.0, 150.0] + [1.0] * 97, limit=500.0)
    assert play_search(case).finding.units == (0,)
    # Nine equal ones, of which eight would be enough.
    case = simple_case([100.0] * 9 + [1.0] * 91, limit=200.0)
    assert play_search(case).finding.units == tuple(range(9))


def test_a_smaller_set_is_tried_where_scores_say_that_it_could_do() -> None:
    # The first candidates end at the widest gap, behind the healthy but large ones.
    scores = [1800.0] + [300.0, 290.0, 280.0, 270.0] + [20.0] * 195
    gradients = [3000.0] + [25.0] * 4 + [1.0] * 195
    played = play_search(simple_case(gradients, scores=scores, limit=1500.0))
    assert played.finding.units == (0,)
    assert played.purposes == ("verify", "shrink")


# Faults that no unit explains.


@pytest.mark.parametrize("std", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("ratio", [3, 1e6])
def test_what_comes_through_no_unit(std: float, ratio: float) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        case = healthy(rng, std=std)
        direction = rng.normal(size=case.rest.size)
        case = dataclasses.replace(case, rest=ratio * case.limit * direction / np.linalg.norm(direction))
        finding = play_search(case).finding
        assert finding.verdict == "no_token"
        assert finding.units == ()
        assert finding.counterfactual == pytest.approx(ratio * case.limit)
        assert finding.num_passes <= 2


@pytest.mark.parametrize("has_rest", [False, True])
@pytest.mark.parametrize("common", [0.0, 0.5])
@pytest.mark.parametrize("ratio", [3, 10, 1e6])
def test_a_factor_of_all_units_is_no_fault_of_any(ratio: float, common: float, has_rest: bool) -> None:
    def make(rng: np.random.Generator) -> Case:
        case = healthy(rng, std=0.3, common=common, dim=256)
        return dataclasses.replace(case, gradients=case.gradients * 2 * ratio)

    found = _rates(make, num_seeds=12, has_rest=has_rest, max_passes=64)
    assert found["unexplained"] == 12
    assert found["passes"] <= 8


# A ranking that lies.


@pytest.mark.parametrize("has_rest", [False, True])
@pytest.mark.parametrize("ratio", [3, 30, 1e6])
@pytest.mark.parametrize("std", [0.3, 1.0, 2.0])
def test_a_bad_unit_with_an_average_score(std: float, ratio: float, has_rest: bool) -> None:
    found = _rates(
        lambda rng: fault(rng, healthy(rng, std=std), 1, ratio=ratio, is_hidden=True), num_seeds=12, has_rest=has_rest
    )
    assert found["exact"] == 12
    assert found["passes"] <= 16 < 2 * math.log2(2048)


@pytest.mark.parametrize("has_rest", [False, True])
@pytest.mark.parametrize("ratio", [3, 30, 1e6])
def test_two_bad_units_with_average_scores(ratio: float, has_rest: bool) -> None:
    found = _rates(
        lambda rng: fault(rng, healthy(rng), 2, ratio=ratio, is_hidden=True),
        num_seeds=12,
        has_rest=has_rest,
        max_passes=64,
    )
    assert found["exact"] == 12
    assert found["passes"] <= 4 * math.log2(2048)


def test_one_that_shows_and_one_that_does_not() -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        seen = fault(rng, healthy(rng, std=0.3), 1, ratio=20)
        case = fault(rng, seen, 1, ratio=40, is_hidden=True)
        finding = play_search(case, max_passes=32).finding
        assert finding.verdict == "tokens"
        assert set(finding.units) == seen.bad | case.bad


def test_the_worst_ranking_costs_two_passes_more_than_halves_by_number() -> None:
    num = 1024
    gradients = [1.0] * (num - 1) + [1e5]
    case = simple_case(gradients, scores=[2.0 ** -(rank / 8) for rank in range(num)], limit=3000.0)
    finding = play_search(case, max_passes=64).finding
    assert finding.units == (num - 1,)
    # At most: candidates and all closed, halves, proof.
    assert finding.num_passes <= 2 + (math.log2(num) + 2) + 1


def test_a_ranking_that_is_nearly_right_costs_less() -> None:
    num = 1 << 14
    # The tenth largest of scores over decades; the bad unit's own is no outlier.
    scores = np.exp(np.linspace(6, -6, num))
    gradients = [1e6 if unit == 9 else 1.0 for unit in range(num)]
    finding = play_search(simple_case(gradients, scores=scores.tolist(), limit=1e5), max_passes=64).finding
    assert finding.units == (9,)
    # Halves by number would take as many for themselves alone.
    assert finding.num_passes <= math.log2(num)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("std", "num_bad", "ratio", "least"),
    [
        *((0.3, num_bad, ratio, 1.0) for num_bad in (1, 2, 5, 50) for ratio in (30, 1e6)),
        *((1.0, num_bad, ratio, 1.0) for num_bad in (1, 2, 5) for ratio in (30, 1e6)),
        *((2.0, num_bad, ratio, 0.98) for num_bad in (1, 2, 5) for ratio in (30, 1e6)),
        *((std, num_bad, 3, 0.97) for std in (0.3, 1.0) for num_bad in (1, 2, 5)),
        (2.0, 1, 3, 0.97),
        (0.3, 50, 3, 0.97),
    ],
)
def test_rates_over_many_micro_batches(std: float, num_bad: int, ratio: float, least: float) -> None:
    found: Any = _rates(lambda rng: fault(rng, healthy(rng, std=std), num_bad, ratio=ratio), num_seeds=200)
    assert found["exact"] / 200 >= least, found
    assert found["passes"] <= 2
