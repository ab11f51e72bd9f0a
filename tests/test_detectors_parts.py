"""What the loss detectors are made of: sorted windows, spreads, and the limit that follows the tail."""

from __future__ import annotations

import math
import statistics as exact
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from stabilizer.detectors.sliding import SortedWindow, median, middle_mean, spread
from stabilizer.detectors.tail import TailRecord
from tests.reference_detectors import mad_sigma, tail_quantile

Array = npt.NDArray[np.float64]


def test_a_window_holds_the_last_values_in_both_orders() -> None:
    rng = np.random.default_rng(0)
    window = SortedWindow(7, [3.0] * 9)
    values = [3.0] * 9
    for value in rng.integers(0, 5, 300).astype(float):
        window.push(value)
        values.append(value)
        assert list(window.arrived) == values[-7:]
        assert window.ordered == sorted(values[-7:])


@pytest.mark.parametrize("num", [1, 2, 3, 4, 10, 11, 100, 1001])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_median_spread_and_middle_mean_are_exact(num: int, is_rounded: bool) -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).standard_t(2, num)
        # Many ties: at some seeds more than half of all values are the same.
        ordered = np.sort(np.round(values / 2) if is_rounded else values).tolist()
        assert median(ordered) == exact.median(ordered)
        assert spread(ordered) == pytest.approx(mad_sigma(ordered), rel=1e-14, abs=0)
        assert middle_mean(ordered) == pytest.approx(
            exact.fmean(ordered[num // 4 : num - num // 4]), rel=1e-12, abs=1e-14
        )


def test_spread_is_the_standard_deviation_of_normal_values() -> None:
    normal = exact.NormalDist(5.0, 0.3)
    ordered = [normal.inv_cdf((rank + 0.5) / 4001) for rank in range(4001)]
    assert spread(ordered) == pytest.approx(0.3, rel=1e-3)
    # 60 % of them are the same: 75 % and 90 % of a normal distribution lie within 1.15 and 1.645.
    assert spread(sorted([0.0] * 60 + [1.0] * 20 + [-1.0] * 20)) == pytest.approx(1 / 1.150349)
    assert spread(sorted([0.0] * 80 + [1.0] * 10 + [-1.0] * 10)) == pytest.approx(1 / 1.644854)
    assert spread(sorted([0.0] * 95 + [1.0] * 5)) == 0


def test_quantiles_are_those_of_the_oracle() -> None:
    rng = np.random.default_rng(0)
    for num in (3, 10, 61, 300, 3000, 15_000):
        for scores in (rng.standard_normal(num), rng.standard_t(3, num), rng.laplace(size=num), -rng.random(num)):
            record = TailRecord()
            for score in scores.tolist():
                record.add(score)
            for share in (2e-5, 3e-3, 0.05):
                expected = tail_quantile(scores.tolist(), share)
                assert record.quantile(share) == pytest.approx(expected, rel=1e-9), (num, share)


def _t_survival(degrees: int, value: float) -> float:
    """Of Student's t: the closed forms for 3 and 5 degrees of freedom."""
    angle = math.atan(value / math.sqrt(degrees))
    body = angle + math.sin(angle) * math.cos(angle)
    if degrees == 5:
        body += 2 / 3 * math.sin(angle) * math.cos(angle) ** 3
    return 0.5 - body / math.pi


#: What makes scores, and how many of them are larger than a value.
TAILS: dict[str, tuple[Callable[[np.random.Generator], Array], Callable[[float], float]]] = {
    "normal": (lambda rng: rng.standard_normal(5000), lambda value: 0.5 * math.erfc(value / math.sqrt(2))),
    "Laplace": (lambda rng: rng.laplace(size=5000) / 1.0277, lambda value: 0.5 * math.exp(-1.0277 * value)),
    "t5": (lambda rng: rng.standard_t(5, 5000) / 1.0774, lambda value: _t_survival(5, 1.0774 * value)),
    "t3": (lambda rng: rng.standard_t(3, 5000) / 1.134, lambda value: _t_survival(3, 1.134 * value)),
}


@pytest.mark.parametrize("kind", TAILS)
def test_the_next_scores_exceed_a_limit_as_seldom_as_they_should(kind: str) -> None:
    make, survival = TAILS[kind]
    shares = []
    for seed in range(40):
        record = TailRecord()
        for score in make(np.random.default_rng(seed)).tolist():
            record.add(score)
        # A jump's limit is never below 4.
        shares.append(survival(max(record.quantile(2e-5), 4.0)))
    # Asked for 0.2 of 10,000; what scatters towards too many must not outweigh it.
    assert np.mean(shares) < 0.5e-4
    # Nor is it so careful that it is blind. The body of Laplace's noise looks like that of a heavier tail.
    assert np.median(shares) > (5e-8 if kind == "Laplace" else 2e-6)


def test_the_record_follows_the_run_and_does_not_grow() -> None:
    record = TailRecord()
    rng = np.random.default_rng(0)
    for score in (10 * rng.standard_normal(30_000)).tolist():
        record.add(score)
    assert record.quantile(0.003) == pytest.approx(27.5, rel=0.1)
    for score in rng.standard_normal(100_000).tolist():
        record.add(score)
    assert 10_000 <= record.total < 20_000
    assert record.quantile(0.003) == pytest.approx(2.75, rel=0.1)
    assert sum(record.counts) == pytest.approx(0.3085 * record.total, rel=0.05)
