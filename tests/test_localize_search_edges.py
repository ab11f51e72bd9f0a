"""The search for the units behind a gradient: when its passes end, and odd scores, norms and sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stabilizer.localize.candidates import cluster_end, rank_units
from stabilizer.localize.search import search
from tests.search_oracle import fault, healthy
from tests.test_localize_search import play_search, simple_case

NAN, INF = math.nan, math.inf

# Budgets.


@pytest.mark.parametrize("max_passes", [0, 1, 2, 3, 16])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_passes_end(max_passes: int, is_hidden: bool) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        case = fault(rng, healthy(rng), 3, ratio=100, is_hidden=is_hidden)
        finding = play_search(case, max_passes=max_passes).finding
        if max_passes and not is_hidden:
            assert set(finding.units) == case.bad
        else:
            assert finding.verdict == "unfinished"


def test_what_is_left_undecided_holds_the_bad_unit() -> None:
    case = simple_case([1.0] * 300 + [1e5] + [1.0] * 211, scores=[1.0] * 512, limit=2000.0)
    finding = play_search(case, max_passes=6).finding
    assert finding.verdict == "unfinished"
    assert [300 in group for group in finding.groups] == [True]
    assert len(finding.groups[0]) <= 512 / 2**5


def test_large_undecided_sets_are_not_listed() -> None:
    case = simple_case([1.0] * 4095 + [1e6], scores=[1.0] * 4096, limit=9000.0)
    assert play_search(case, max_passes=1).finding.groups == ()


def test_the_last_pass_is_for_the_proof() -> None:
    # Two that do not show; the budget ends just as the first is found, which alone explains nothing.
    case = simple_case([1e5] + [1.0] * 510 + [2e3], scores=[1.0] * 512, limit=2600.0)
    needed = play_search(case, max_passes=64).finding
    assert needed.verdict == "tokens"
    assert needed.units == (0,)
    enough = play_search(case, max_passes=needed.num_passes).finding
    assert (enough.verdict, enough.units) == ("tokens", (0,))
    less = play_search(case, max_passes=needed.num_passes - 1).finding
    assert (less.verdict, less.units, less.counterfactual) == ("unfinished", (0,), None)


def test_passes_are_kept_for_a_proof_of_what_is_found() -> None:
    # Both are needed, and each is known to be too large: the second is still sought when the budget ends.
    case = simple_case([1e5] + [1.0] * 510 + [1e5], scores=[1.0] * 512, limit=2600.0)
    needed = play_search(case, max_passes=64).finding
    assert (needed.verdict, needed.units) == ("tokens", (0, 511))
    less = play_search(case, max_passes=needed.num_passes - 3)
    assert less.finding.verdict == "unfinished"
    assert less.purposes[-1] == "verify"
    assert less.finding.counterfactual == pytest.approx(case.without(less.finding.units))


# Edges.


def test_a_normal_norm_needs_no_pass() -> None:
    finding = play_search(simple_case([1.0, 50.0], limit=60.0)).finding
    assert (finding.verdict, finding.num_passes) == ("unexplained", 0)


def test_one_unit() -> None:
    assert play_search(simple_case([50.0], limit=10.0)).finding.units == (0,)
    finding = play_search(simple_case([50.0], limit=10.0, rest=20.0)).finding
    # Closing the only one was closing all: no second pass.
    assert (finding.verdict, finding.num_passes, finding.counterfactual) == ("no_token", 1, 20.0)


@pytest.mark.parametrize("bad", [0, 1])
def test_two_units(bad: int) -> None:
    assert play_search(simple_case([100.0, 1.0][:: 1 - 2 * bad], limit=10.0)).finding.units == (bad,)


def test_no_scores_at_all() -> None:
    finding = play_search(simple_case([0.0] * 5, limit=10.0, rest=20.0)).finding
    assert (finding.verdict, finding.num_passes) == ("no_token", 1)
    assert play_search(simple_case([50.0, 50.0], scores=[0.0, 0.0], limit=10.0)).finding.verdict == "unexplained"
    hunt = search(torch.zeros(0), norm=20.0, limit=10.0, max_passes=4)
    assert next(hunt).open.shape == (0,)


def test_equal_scores() -> None:
    case = simple_case([1.0] * 77 + [1e4] + [1.0] * 22, scores=[1.0] * 100, limit=200.0)
    played = play_search(case)
    assert played.finding.units == (77,)
    assert played.purposes[0] == "none"


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("norm", [NAN, INF, 1e6])
def test_scores_that_are_not_finite_come_first(value: float, norm: float) -> None:
    case = simple_case([1.0] * 50 + [1e6] + [1.0] * 49, limit=200.0)
    case.scores[50] = value
    case.scores[3] = 900.0
    finding = play_search(case, norm=norm).finding
    assert (finding.verdict, finding.units, finding.num_passes) == ("tokens", (50,), 1)


def test_a_gradient_that_is_not_finite_is_searched_for() -> None:
    case = simple_case([1.0] * 50 + [NAN] + [1.0] * 49, scores=[1.0] * 100, limit=200.0)
    played = play_search(case)
    assert (played.finding.verdict, played.finding.units) == ("tokens", (50,))
    case.gradients[20] = INF
    assert set(play_search(case, max_passes=32).finding.units) == {20, 50}


def test_nothing_but_nan() -> None:
    case = simple_case([NAN] * 64, limit=2.0)
    finding = play_search(case).finding
    assert (finding.verdict, finding.units) == ("unexplained", ())
    assert finding.num_passes <= 8


def test_scores_of_any_float_type() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        hunt = search(torch.tensor([1.0, 2.0, 600.0, 1.0]).to(dtype), norm=600.0, limit=10.0, max_passes=4)
        assert next(hunt).open.tolist() == [True, True, False, True]


def test_scores_must_be_a_vector() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        next(search(torch.ones(2, 3), norm=2.0, limit=1.0, max_passes=4))


def test_the_ranking_leaves_zeros_out_and_keeps_ties_in_order() -> None:
    ranking = rank_units(torch.tensor([2.0, 0.0, 5.0, 2.0, INF]))
    assert ranking.units.tolist() == [4, 2, 0, 3]
    assert ranking.logs.exp().tolist() == pytest.approx([5.0, 5.0, 2.0, 2.0])


def test_a_cluster_ends_at_no_third_of_the_units_or_later() -> None:
    logs = torch.tensor([9.0] * 5 + [0.0] * 5, dtype=torch.float64)
    assert cluster_end(logs, norm=10.0, limit=1.0) <= 3


def test_a_gap_within_equally_bad_units_does_not_cut_them_in_two() -> None:
    bad = [2.9, *(1.9 - 0.005 * rank for rank in range(19))]
    logs = torch.tensor([*bad, *torch.linspace(1, 0, 200).tolist()], dtype=torch.float64)
    assert cluster_end(logs, norm=3.0, limit=1.0) == 20
