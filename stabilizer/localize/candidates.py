"""Which units of a gate stand out: their scores ranked, and where the ranking breaks."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

__all__ = ["Ranking", "cluster_end", "rank_units"]

#: Largest share of the units that can be a cause rather than the batch as a whole.
_MAX_SHARE = 1 / 3
#: A prefix as small as this is worth a pass even if nothing in it is an outlier: of many units, of few.
_SMALL_SHARE, _SMALL_NUM = 1 / 8, 8
#: By how much the norm that scores predict may be wrong: the Jacobian below the gate differs from unit to unit.
_SLACK = 3.0
#: Smallest scale of healthy log-scores, so that equal ones do not make an outlier of the next.
_MIN_SCALE = 0.25
#: Above the bulk: so much of the way from the median to where the largest of all healthy ones would be.
_HIGH = 0.6
#: Range of the log-scores of n equally bad units: 2.5 deviations of a difference for two, slowly more for many.
_RANGE, _RANGE_GROWTH = 1.6, 0.4
#: Two kinds of unit: scores that fall by this factor at one place, 3 deviations of the difference of equally bad ones.
_KIND_GAP = math.log(8)
#: Scores that fall by the first factor behind a set leave no healthy unit in it, unless they fall by the second within.
_CLEAR_GAP, _DOUBT_GAP = math.log(2.5), math.log(2)
#: Equally bad units that are left open are taken to show by a norm of so many limits.
_SHOWS = 1.15
#: A smaller set is worth a pass if the norm that is expected then is no more limits than the first; or than the second,
#: if the ranking breaks there nearly as clearly as behind the whole set.
_SHRINK_SURE, _SHRINK_SLACK, _SHRINK_MERIT = 0.75, 1.2, 0.4


@dataclasses.dataclass(frozen=True, eq=False)
class Ranking:
    """Units by falling score; those with a score of 0 are left out, since no gradient comes through them.

    Attributes:
        units: Flat number of each, shape (ranked,), on the CPU. What is not finite comes first.
        logs: Logarithm of each score, shape (ranked,), float64, falling; of what is not finite the largest finite one.
        num_nonfinite: How many scores are NaN or infinite.
    """

    units: Tensor
    logs: Tensor
    num_nonfinite: int

    def __len__(self) -> int:
        return self.units.numel()

    def energies(self) -> Tensor:
        """Square of each score against that of the largest, shape (ranked,), float64."""
        return (2 * (self.logs - self.logs[:1])).exp()

    def first(self, *, norm: float, limit: float) -> int:
        """How many units from the top are the first candidates.

        Args:
            norm: Of the gradient of all units.
            limit: The largest norm that is normal.

        Returns:
            Those whose score is not finite, if there are any and not too many; else the end of the first cluster.
        """
        if self.num_nonfinite:
            return self.num_nonfinite if 2 * self.num_nonfinite <= len(self) or len(self) == 1 else 0
        return cluster_end(self.logs, norm=norm, limit=limit)

    def next(self, start: int, *, norm: float, limit: float) -> int:
        """The end of the next cluster.

        Args:
            start: How many units from the top are closed already.
            norm: Of the gradient of the others.
            limit: The largest norm that is normal.

        Returns:
            A rank; `start` if no further unit stands out.
        """
        return start + cluster_end(self.logs[start:], norm=norm, limit=limit)

    def smaller(self, end: int, *, norm: float, closed: float, limit: float) -> int:
        """A prefix of a set of candidates that could do as well.

        Args:
            end: How many units from the top are the set.
            norm: Of the gradient of all units.
            closed: Of the gradient without the set.
            limit: The largest norm that is normal.

        Returns:
            A prefix without which the norm would be normal as far as scores can tell, and that is of another kind than
            what is left: equally bad units in that would show by a norm that is not normal, or scores fall by a factor
            of 8 there. Of several, where scores fall most; 0 if there is none.
        """
        if end < 2 or self.num_nonfinite or not math.isfinite(norm):
            return 0
        energies = self.energies()[:end]
        sizes = torch.arange(1, end, dtype=torch.float64)
        share_left = energies.flip(0).cumsum(0).flip(0)[1:] / energies.sum()
        expected = (closed**2 + max(norm**2 - closed**2, 0.0) * share_left).sqrt()
        gaps = self.logs[: end - 1] - self.logs[1:end]
        would_show = norm * (1 - sizes / end).sqrt() > _SHOWS * limit
        merit = sizes.sqrt() * gaps
        gap = float(self.logs[end - 1] - self.logs[end]) if end < len(self) else math.inf
        is_clear = merit > _SHRINK_MERIT * math.sqrt(end) * gap
        can_do = (expected <= _SHRINK_SLACK * limit) & is_clear
        can_do |= (expected <= _SHRINK_SURE * limit) & ((gaps >= _DOUBT_GAP) | (gap < _CLEAR_GAP))
        merit = merit.masked_fill(~(can_do & (would_show | (gaps >= _KIND_GAP))), -1)
        best = int(merit.argmax())
        return best + 1 if merit[best] > 0 else 0


def rank_units(scores: Tensor) -> Ranking:
    """Rank units by the gradient that arrives at them.

    Args:
        scores: Norm of the gradient that arrives at each unit, shape (units,); may hold NaN or infinity.

    Returns:
        The ranking; equal scores in the order of the units.

    Example:
        >>> ranking = rank_units(torch.tensor([1.0, 0.0, 4.0, float("nan"), 2.0]))
        >>> ranking.units.tolist(), ranking.num_nonfinite
        ([3, 2, 4, 0], 1)
    """
    # One copy to the host: all that follows is decided there.
    values = scores.detach().to("cpu").to(torch.float64).flatten()
    is_bad = ~values.isfinite()
    largest = values.masked_fill(is_bad, 0).max() if len(values) else values.sum()
    level = torch.where(largest > 0, largest, torch.ones_like(largest))
    keys = values.masked_fill(is_bad, torch.inf)
    kept, units = keys.sort(descending=True, stable=True)
    num_kept = int((kept > 0).sum())
    logs = kept[:num_kept].clamp(max=level).log()
    return Ranking(units[:num_kept], logs, int(is_bad.sum()))


def cluster_end(logs: Tensor, *, norm: float, limit: float) -> int:
    """Where the cluster of units that stand out at the top of a ranking ends.

    Healthy scores are anything from nearly equal to spread over decades, with tails of any weight, so that no fixed
    number of deviations separates them from bad ones. What separates them is what a spike needs: the gradient of the
    others must be normal. If scores were gradients, a prefix of the ranking would leave between sum(rest) / sum(all)
    of the norm (all in one direction) and sqrt(sum(rest^2) / sum(all^2)) (all orthogonal); the smallest prefix that
    could leave three times the limit at best (more where scores fall by far: then they may be wrong by more) is where
    a cluster may end first. It may go on as far as scores of equally bad units spread: their Jacobians below the gate
    differ, by a log-deviation of about 0.5. Among these ends the one with the largest sqrt(rank) x gap to the next
    log-score is taken. Gaps between the top n of a smooth tail shrink as 1/n (Renyi, "On the theory of order
    statistics", 1953), gaps between equally bad units and healthy ones do not. The plain gap would cut 50 equally bad
    units in two; rank x gap, of equal size all along an exponential tail, would prefer some gap deep in the bulk to
    that behind a single bad unit.

    Args:
        logs: Logarithms of scores, shape (ranked,), float64, falling.
        norm: Of the gradient of all of them.
        limit: The largest norm that is normal.

    Returns:
        A number of units; 0 if nothing at the top is an outlier and no small prefix could be the cause.

    Example:
        >>> logs = torch.tensor([500.0, 400.0, 1.5, 1.2, 1.0, 0.9, 0.7], dtype=torch.float64).log()
        >>> cluster_end(logs, norm=640.0, limit=5.0), cluster_end(logs[2:], norm=640.0, limit=5.0)
        (2, 0)
    """
    num = len(logs)
    if num < 2:
        return num
    largest = max(1, int(num * _MAX_SHARE))
    median, scale = _centre_and_scale(logs)
    left = _left_over(logs)[:largest]
    # About what the largest of so many normal numbers is.
    extreme = math.sqrt(2 * math.log(num)) * scale
    is_outlier = float(logs[0]) - median >= extreme
    small = left[: max(_SMALL_NUM, int(num * _SMALL_SHARE))]
    if not is_outlier and not (norm * small <= limit).any():
        return 0
    top = logs[:largest]
    gaps = top - logs[1 : largest + 1]
    slack = (gaps / 2).exp().clamp(min=_SLACK)
    # A norm that is not finite says nothing of how much has to go.
    can_do = torch.nonzero(norm * left <= slack * limit) if math.isfinite(norm) else torch.zeros(1, 1)
    start = int(can_do[0]) if len(can_do) else 0
    if float(top[start]) - median < _HIGH * extreme:
        start = 0
    # The last unit of every cluster that may be: equally bad as the one where it may end first, and above the bulk.
    sizes = torch.arange(1, largest - start + 1, dtype=torch.float64)
    is_equal = top[start] - top[start:] <= _RANGE + _RANGE_GROWTH * sizes.log()
    is_high = top[start:] - median >= _HIGH * extreme
    merit = (sizes + start).sqrt() * gaps[start:]
    merit = merit.masked_fill(~(is_equal & is_high), -1)
    return start + int(merit.argmax()) + 1


def _centre_and_scale(logs: Tensor) -> tuple[float, float]:
    """Median and scale of log-scores; the scale from the side that bad units have not made wider."""
    upper, median, lower = (float(_quantile(logs, q)) for q in (0.16, 0.5, 0.84))
    return median, max(min(upper - median, median - lower), _MIN_SCALE)


def _quantile(falling: Tensor, share: float) -> Tensor:
    position = share * (len(falling) - 1)
    low = int(position)
    high = min(low + 1, len(falling) - 1)
    return falling[low] + (position - low) * (falling[high] - falling[low])


def _left_over(logs: Tensor) -> Tensor:
    """By what factor the norm falls, at best, if the first 1, 2, ... are closed."""
    relative = (logs - logs[0]).exp()
    # Summed from the small end: the total minus a prefix would lose what a large one leaves.
    aligned, squares = (_sums_after(values) for values in (relative, relative.square()))
    return torch.minimum(aligned, squares.sqrt())


def _sums_after(values: Tensor) -> Tensor:
    """Share of the sum that comes after each."""
    sums = values.flip(0).cumsum(0).flip(0)
    return torch.cat([sums[1:], sums.new_zeros(1)]) / sums[0]
