"""How far the scores of a healthy run reach: a record of them, and the limit that few of the next will exceed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["TailRecord"]

# Bins of the logarithm of the score: from 0.5 on, 2 % each, up to 11,000.
_LOWEST = 0.5
_WIDTH = 0.02
_NUM_BINS = 500
# The record forgets half of itself when it is this long, so that it follows the run.
_MAX_TOTAL = 20_000
# The tail: this share of the scores, but no more than so many of them, at least so few.
_SHARE = 0.05
_MAX_IN_TAIL = 200
_MIN_IN_TAIL = 5
# What the tail's mean is compared with.
_BODY_SHARE = 0.2
# Scores beyond a quantile from which on it is counted, not extrapolated.
_MIN_COUNTED = 10


class TailRecord:
    """A histogram of scores in bins of equal ratio, and quantiles far beyond what it has seen.

    The quantile is that of Dekkers, Einmahl and de Haan, "A moment estimator for the index of an extreme-value
    distribution" (1989): with u the score that m of n exceed, M1 and M2 the means of the excess' logarithm and of its
    square, index g = M1 + 1 - 1 / (2 (1 - M1^2 / M2)),

        quantile(q) = u + u M1 (1 - min(g, 0)) ((m / (n q))^g - 1) / g.

    The index of so few scores scatters, and a limit that is too low costs more false alarms than one that is too high
    saves. It is therefore drawn towards what the scores' body says, as strongly as 150 scores in the tail would: by the
    logarithm L of the mean of the largest 5 % over that of the largest 20 % (after Hogg, "Adaptive robust procedures",
    1974), which is 0.39 for normal noise and 0.5 to 0.6 for heavy tails, 2.6 (L - 0.375) within 0 and 0.45 (our own;
    measured in benchmarks/detectors.py).

    Example:
        >>> record = TailRecord()
        >>> for number in range(1, 2000):
        ...     record.add(-math.log(number / 2000))  # exponential
        >>> record.quantile(0.01), 4.4 < record.quantile(0.01) < 4.8, 10 < record.quantile(2.5e-5) < 20
        (4.6..., True, True)
    """

    def __init__(self) -> None:
        self.counts = [0.0] * _NUM_BINS
        self.total = 0.0

    def add(self, score: float) -> None:
        """Take a score.

        Args:
            score: In sigmas; one below 0.5 is no more than counted.
        """
        if score >= _LOWEST:
            self.counts[min(int(math.log(score / _LOWEST) / _WIDTH), _NUM_BINS - 1)] += 1.0
        self.total += 1.0
        if self.total >= _MAX_TOTAL:
            # Halves of whole numbers stay exact.
            self.counts = [count / 2 for count in self.counts]
            self.total /= 2

    def restart(self, scores: Iterable[float]) -> None:
        """Forget everything but some scores.

        Args:
            scores: In sigmas.
        """
        self.counts = [0.0] * _NUM_BINS
        self.total = 0.0
        for score in scores:
            self.add(score)

    def quantile(self, share: float) -> float:
        """The score that a share of all exceed.

        Args:
            share: Over 0, at most 5 %.

        Returns:
            In sigmas, at least 0.5; infinity while there are fewer than five scores of that or more.
        """
        num_large = sum(self.counts)
        if share * self.total >= max(_MIN_COUNTED, num_large):
            return _LOWEST
        if share * self.total >= _MIN_COUNTED:
            return _LOWEST * math.exp(_WIDTH * self._tail(share * self.total)[0])
        if num_large < _MIN_IN_TAIL:
            return math.inf
        num = min(max(_SHARE * self.total, _MIN_IN_TAIL), num_large)
        ratio = self._mean(num) / self._mean(min(max(_BODY_SHARE * self.total, num), num_large))
        prior = min(max(2.6 * (math.log(ratio) - 0.375), 0.0), 0.45)
        first, num, mean, square = self._tail(min(num, _MAX_IN_TAIL))
        index = mean + 1 - 0.5 / max(1 - mean * mean / square, 1e-3)
        index = (num * max(index, -0.5) + 150 * prior) / (num + 150)
        reach = math.log(num / (self.total * share))
        growth = reach if abs(index) < 1e-9 else math.expm1(index * reach) / index
        return _LOWEST * math.exp(_WIDTH * first) * (1 + mean * (1 - min(index, 0.0)) * growth)

    def state(self) -> dict[str, Any]:
        """What `load` takes: plain numbers."""
        return {"counts": {str(slot): count for slot, count in enumerate(self.counts) if count}, "total": self.total}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a state back.

        Args:
            state: Of `state`.
        """
        self.counts = [float(state["counts"].get(str(slot), 0.0)) for slot in range(_NUM_BINS)]
        self.total = float(state["total"])

    def _largest(self, num: float) -> list[tuple[int, float]]:
        """The bins, from the highest on, that hold `num` scores or more, and how many each holds."""
        found, slot = 0.0, _NUM_BINS
        filled = []
        while found < num and slot > 0:
            slot -= 1
            count = self.counts[slot]
            if count:
                found += count
                filled.append((slot, count))
        return filled

    def _tail(self, num: float) -> tuple[int, float, float, float]:
        """The bin from which on there are `num` scores or more, how many, M1 and M2 of them."""
        filled = self._largest(num)
        first = filled[-1][0]
        found = sum(count for _, count in filled)
        excess = [(_WIDTH * (slot + 0.5 - first), count) for slot, count in filled]
        mean = sum(count * logarithm for logarithm, count in excess) / found
        square = sum(count * logarithm * logarithm for logarithm, count in excess) / found
        return first, found, mean, square

    def _mean(self, num: float) -> float:
        """Mean of the `num` largest scores or a few more."""
        filled = self._largest(num)
        total = sum(count * _LOWEST * math.exp(_WIDTH * (slot + 0.5)) for slot, count in filled)
        return total / sum(count for _, count in filled)
