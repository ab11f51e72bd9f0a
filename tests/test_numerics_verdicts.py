"""What replays say, the history of a loss scale, what half precision loses, weights and times: by numbers alone."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from stabilizer.localize.runs import RankRuns, Reruns
from stabilizer.localize.suspects import Suspect
from stabilizer.numerics.judging import judgement
from stabilizer.numerics.scale import ScaleHistory
from stabilizer.numerics.timing import CollectiveClock, Slowness
from stabilizer.numerics.underflow import HALF_TYPES, lost_elements, lost_shares
from stabilizer.numerics.verdicts import is_alike, judge
from stabilizer.numerics.weights import any_nonfinite, bad_weights

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("step", "runs", "expected"),
    [
        ([4e6, 1.0], [[4e6, 1.0]] * 3, "repeats"),
        ([4e6, 1.0], [[4.04e6, 1.0]] * 3, "repeats"),  # half a percent of the norm
        ([4e6, 1.0], [[4.2e6, 1.0]] * 3, "nondeterministic"),  # 2.5 %, and far out still
        ([4e6, 1.0], [[4.0, 1.0]] * 3, "transient"),
        ([4e6, 1.0], [[4.0, 1.0], [4.0, 1.0], [5.0, 1.0]], "nondeterministic"),
        ([NAN, 1.0], [[NAN, 1.0]] * 3, "repeats"),
        ([NAN, 1.0], [[INF, 1.0]] * 3, "repeats"),
        ([NAN, 1.0], [[1.0, NAN]] * 3, "nondeterministic"),
        ([NAN, 1.0], [[1.0, 1.0]] * 3, "transient"),
        ([NAN, 1.0], [[NAN, 1.0], [1.0, 1.0]], "nondeterministic"),
        (None, [[4e6, 1.0]] * 3, "repeats"),
        (None, [[NAN, 1.0]] * 3, "repeats"),
        (None, [[4.0, 1.0]] * 3, "unknown"),
        ([4e6, 1.0], [], "unknown"),
    ],
)
def test_one_rank_s_verdict(step: Any, runs: Any, expected: str) -> None:
    assert judge(step, runs, limit=10.0, tolerance=0.01) == expected


def test_rounding_of_a_unit_that_is_nearly_nothing_is_no_difference() -> None:
    """The bias of a key projection has a gradient of rounding errors alone."""
    assert is_alike([1.0, 1e-18], [1.0, 9e-18], tolerance=0.01)
    assert not is_alike([1.0, 1e-4], [1.0, 9e-4], tolerance=0.01)
    assert not is_alike([1.0], [1.0, 0.0], tolerance=0.01)


def test_only_the_units_that_the_limit_is_for_count() -> None:
    """One layer was searched: that the others are large says nothing."""
    runs = [[4.0, 1e6]] * 2
    assert judge([9e6, 1e6], runs, limit=10.0, tolerance=0.01, chosen=[True, False]) == "transient"
    assert judge([9e6, 1e6], runs, limit=10.0, tolerance=0.01) == "nondeterministic"


def own(norm: float, step: Any, runs: Any, *, is_suspect: bool = True, **more: Any) -> RankRuns:
    return RankRuns(Suspect(0, 0, norm, 1.0, 3.0, is_suspect), step, runs, [1.0] * len(runs), **more)


def test_what_the_machine_does_wrong_counts_more_than_what_repeats() -> None:
    """Both ranks are suspicious: one of them has bad data, the other one's gradient never comes again."""
    ranks = [own(9.0, [81.0], [[81.0]] * 2), own(5.0, [25.0], [[1.0]] * 2)]
    judged = judgement(Reruns(ranks=ranks), tolerance=0.01, world_size=2)
    assert (judged.verdict, judged.rank, judged.verdicts) == ("transient", 1, {0: "repeats", 1: "transient"})


def test_a_rank_that_is_not_suspicious_has_no_say() -> None:
    ranks = [own(1.0, [1.0], [[4.0]] * 2, is_suspect=False), own(9.0, [81.0], [[81.0]] * 2)]
    judged = judgement(Reruns(ranks=ranks), tolerance=0.01, world_size=2)
    assert (judged.verdict, judged.rank) == ("repeats", 1)


@pytest.mark.parametrize(
    ("unscaled", "loss", "expected"),
    [([1.0], 1.0, "scaler_overflow"), ([NAN], 1.0, "repeats"), ([1.0], NAN, "repeats"), (None, 1.0, "repeats")],
)
def test_an_overflow_of_the_scale_is_told_from_a_real_nan(unscaled: Any, loss: float, expected: str) -> None:
    one = RankRuns(Suspect(0, 0, INF, 1.0, 3.0, True), [INF], [[INF]] * 2, [loss] * 2, unscaled)
    assert judgement(Reruns(ranks=[one]), tolerance=0.01, world_size=1).verdict == expected


@pytest.mark.parametrize(
    ("norms", "rank"),
    [([1.0, NAN], 1), ([NAN, NAN], None), ([1.0, 1.0], None), ([1.0, 50.0], 1), ([1.0, 1.0, 1e3, 1.0], 2)],
)
def test_the_one_rank_whose_reduced_gradient_is_another(norms: list[float], rank: int | None) -> None:
    judged = judgement(Reruns(norms=norms, largest=2.0), tolerance=0.01, world_size=len(norms))
    assert (judged.verdict, judged.rank) == ("transient", rank)


def scales(history: ScaleHistory, steps: list[tuple[float, bool]]) -> list[str]:
    return [history.see(scale, overflowed=overflowed) for scale, overflowed in steps]


def test_the_usual_way_to_a_scale_is_no_finding() -> None:
    """GradScaler begins at 2^16: eight overflows, two thousand steps, one more overflow."""
    start = [(2.0 ** (16 - number), True) for number in range(8)]
    assert not any(scales(ScaleHistory(), [*start, *[(256.0, False)] * 300, (512.0, True), *[(256.0, False)] * 300]))


def test_a_stuck_scale_is_told_once_of_each_kind_until_it_is_in_order() -> None:
    history = ScaleHistory()
    found = scales(history, [(2.0 ** (8 - number), True) for number in range(30)])
    assert [(at, one) for at, one in enumerate(found) if one] == [(15, "overflows")]
    assert history.evidence["num_overflows"] == 30
    assert not any(scales(history, [(64.0, False)] * 5))
    found = scales(history, [(0.25, False)] * 30)
    assert [(at, one) for at, one in enumerate(found) if one] == [(9, "floor")]
    assert [one for one in scales(ScaleHistory(), [(2.0**number, False) for number in range(60)]) if one] == ["ceiling"]


def test_trends_of_a_scale_and_its_state() -> None:
    history = ScaleHistory()
    assert history.trend == "steady"
    scales(history, [(2.0 ** (number // 10), False) for number in range(40)])
    assert history.trend == "growing"
    scales(history, [(2.0 ** (-number), True) for number in range(15)])
    again = ScaleHistory()
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    rest = [(2.0 ** (-number), True) for number in range(15, 40)]
    assert scales(again, rest) == scales(history, rest)
    assert again.trend == history.trend == "shrinking"


@pytest.mark.parametrize("scale", [None, 1.0, 1024.0, 2.0**-20])
def test_what_half_precision_loses(scale: float | None) -> None:
    """Against numpy's and torch's own conversions, element by element."""
    generator = torch.Generator().manual_seed(3)
    gradient = 10.0 ** (torch.rand(4000, generator=generator, dtype=torch.float64) * 12 - 10)
    gradient = (gradient * (torch.rand(4000, generator=generator) - 0.5).sign()).float()
    gradient[::7] = 0.0
    gradient[:3] = torch.tensor([NAN, INF, -INF])
    factor = None if scale is None else torch.tensor(scale)
    counts = lost_elements([gradient[:1500], None, gradient[1500:], torch.empty(0)], scale=factor, device=CPU)
    kept = gradient.double().numpy()
    kept = kept[np.isfinite(kept) & (kept != 0)]
    scaled = torch.tensor(kept * (scale or 1.0))
    expected = [len(kept)]
    for dtype in HALF_TYPES:
        values = scaled.to(dtype).double().abs()
        # A number just under the smallest normal one rounds up to it, and has lost its digits all the same.
        is_edge = (values == torch.finfo(dtype).tiny) & (scaled.abs() < torch.finfo(dtype).tiny)
        expected.append(int(((values < torch.finfo(dtype).tiny) | is_edge).sum()))
    assert counts.tolist() == expected
    assert lost_shares(counts).tolist() == pytest.approx([lost / expected[0] for lost in expected[1:]])
    assert expected[1] > 0
    assert lost_shares(lost_elements([None], scale=None, device=CPU)).tolist() == [0.0, 0.0]


def test_weights_that_cannot_be() -> None:
    generator = torch.Generator().manual_seed(0)
    fine = torch.randn(64, 64, generator=generator) * 0.02
    outlier = fine.clone()
    outlier[3, 4] = 20.0  # a thousand times its neighbours: seen in trained models
    large = fine * 1e5
    large[3, 4] = 5e5  # two hundred times theirs
    flipped = fine.clone()
    flipped[3, 4] *= 2.0**64
    broken = fine.clone()
    broken[0, :2] = torch.tensor([NAN, INF])
    named = [
        ("fine", fine),
        ("outlier", outlier),
        ("large", large),
        ("flipped", flipped),
        ("broken", broken),
        ("empty", fine[:0]),
    ]
    found = bad_weights(named)
    assert [(bad.name, bad.num_nan, bad.num_inf, bad.is_finite) for bad in found] == [
        ("broken", 1, 1, False),
        ("flipped", 0, 0, True),
    ]
    assert not any_nonfinite([fine, outlier, flipped], device=CPU)
    assert any_nonfinite([fine, broken], device=CPU)


def test_slow_is_ten_medians_and_a_second() -> None:
    fast = Slowness(10.0)
    assert not any(fast.see(0.001) for _ in range(30))
    assert not fast.see(0.9)  # a busy machine
    assert fast.see(1.5)
    assert fast.see(1.5)
    found = [fast.see(1.5) for _ in range(130)]
    assert all(found[:20])
    assert not any(found[64:]), "what is slow for good has become usual"
    slow = Slowness(10.0)
    assert not any(slow.see(0.5) for _ in range(30))
    assert not slow.see(4.9)
    assert slow.see(5.1)


def test_a_clock_adds_up_the_collectives_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("stabilizer.numerics.timing.time.monotonic", lambda: now[0])
    clock, tensor = CollectiveClock(), torch.zeros(1)
    for seconds in (0.25, 0.5):
        clock.begin(tensor)
        now[0] += seconds
        clock.end(tensor)
        now[0] += 7.0
    assert clock.close_step(3) == [(3, 0.75)]
    assert clock.close_step(4) == [(4, 0.0)]
