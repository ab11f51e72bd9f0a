"""Whose gradient a spike comes from: local norms of the micro-batches of a step against those of the steps before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LocalNorms", "Suspect", "find_suspects", "largest_sum"]

_ROWS = 256
_MIN_ROWS = 8
_MANY = 64


@dataclasses.dataclass(frozen=True)
class Suspect:
    """One rank's gradient of one micro-batch.

    Attributes:
        rank: Whose.
        micro_batch: Its number in the step.
        norm: Local norm: of this gradient before any reduction.
        baseline: A usual local norm of this rank; NaN if it is not known.
        limit: The largest norm that is normal.
        is_suspect: Whether the norm is over it.
    """

    rank: int
    micro_batch: int
    norm: float
    baseline: float
    limit: float
    is_suspect: bool


class LocalNorms:
    """Local square sums of the micro-batches of this step and of the last ones, on the device.

    Args:
        num_units: How many numbers a micro-batch has.
        device: Where they are.

    Attributes:
        current: Of this step's micro-batches, in their order; `None` for one that no sensor saw.
    """

    def __init__(self, num_units: int, *, device: torch.device) -> None:
        self.current: list[Tensor | None] = []
        self._ring = torch.zeros(_ROWS, num_units, dtype=torch.float32, device=device)
        self._num_rows = 0

    def add(self, squares: Tensor | None) -> None:
        """Take a micro-batch of the step at hand.

        Args:
            squares: By unit of the store, shape (units,), without the loss scale.
        """
        self.current.append(squares)

    def drop(self, num: int) -> None:
        """Forget the first micro-batches of the step: their gradients were thrown away.

        Args:
            num: How many.
        """
        self.current = self.current[num:]

    def end_step(self, *, is_kept: bool = True) -> None:
        """The step is over.

        Args:
            is_kept: Whether its micro-batches tell what is usual.
        """
        for squares in self.current if is_kept else ():
            if squares is not None:
                self._ring[self._num_rows % _ROWS].copy_(squares)
                self._num_rows += 1
        self.current = []

    def norms(self, chosen: Tensor) -> list[float | None]:
        """Norms of this step's micro-batches; waits for the device.

        Args:
            chosen: Which units count, shape (units,), bool.

        Returns:
            One a micro-batch; `None` where no sensor saw it.
        """
        return [None if row is None else float(_norms(row, chosen)) for row in self.current]

    def baseline(self, chosen: Tensor) -> float:
        """The median of the last micro-batches; NaN before there are enough. Waits for the device.

        Args:
            chosen: Which units count, shape (units,), bool.
        """
        if self._num_rows < _MIN_ROWS:
            return math.nan
        norms = _norms(self._ring[: self._num_rows], chosen)
        usable = norms[torch.isfinite(norms) & (norms > 0)]
        return float(usable.median()) if usable.numel() else math.nan


def find_suspects(
    norms: Sequence[Sequence[float]], baselines: Sequence[float], *, factor: float, fallback: float
) -> list[Suspect]:
    """Decide which gradients are searched.

    Args:
        norms: Local norms by rank and micro-batch.
        baselines: Of each rank; NaN where it is not known.
        factor: How many times a usual norm is still normal.
        fallback: A usual norm where neither the rank's past nor the step itself tells one.

    Returns:
        All of them, rank by rank. At least one is a suspect: if no norm is over its limit, the one that is nearest.

    Example:
        >>> found = find_suspects([[1.0, 9.0], [1.1, 0.9]], [1.0, 1.0], factor=3.0, fallback=1.0)
        >>> [(one.rank, one.micro_batch) for one in found if one.is_suspect]
        [(0, 1)]
    """
    here = sorted(norm for row in norms for norm in row if math.isfinite(norm) and norm > 0)
    usual = here[(len(here) - 1) // 2] if len(here) >= 3 else fallback
    known = [baseline for baseline in baselines if math.isfinite(baseline)]
    usual = sorted(known)[len(known) // 2] if known else usual
    if not usual > 0:  # nothing is known at all: of norms that are finite none is out of the ordinary
        usual = math.inf
    own_limits = [factor * (own if math.isfinite(own) else usual) for own in baselines]
    spread = _spread([norm / limit for row, limit in zip(norms, own_limits, strict=True) for norm in row])
    found = []
    for rank, (row, own) in enumerate(zip(norms, baselines, strict=True)):
        baseline = own if math.isfinite(own) else usual
        limit = factor * baseline * spread
        for number, norm in enumerate(row):
            is_over = not math.isfinite(norm) or norm > limit
            found.append(Suspect(rank, number, norm, baseline, limit, is_over))
    if found and not any(one.is_suspect for one in found):
        nearest = max(found, key=lambda one: one.norm / one.limit if one.limit > 0 else one.norm)
        found = [dataclasses.replace(one, is_suspect=one is nearest) for one in found]
    return found


def largest_sum(found: Sequence[Suspect], *, is_averaged: bool) -> float:
    """The largest norm that a step's gradient can have, of these local gradients: no sum is longer than its parts.

    Args:
        found: Of all ranks and micro-batches.
        is_averaged: Whether the step's gradient is the mean of the ranks', not their sum.

    Returns:
        Infinite or NaN if one of them is; infinite if there is none.

    Example:
        >>> largest_sum(find_suspects([[3.0, 1.0], [4.0, 2.0]], [1.0, 1.0], factor=9.0, fallback=1.0), is_averaged=True)
        5.0
    """
    if not found:
        return math.inf
    parts = sum(one.norm for one in found)
    return parts / len({one.rank for one in found}) if is_averaged else parts


def _spread(excesses: Sequence[float]) -> float:
    """How far beyond its limit the largest of very many healthy norms would be, 1 for few.

    Of n log-normal numbers the largest is sqrt(2 ln n) deviations over the median: what is innocent must not be run
    again on every rank. Where most are over their limits, nothing can be said of the healthy ones.
    """
    logs = sorted(math.log(one) for one in excesses if math.isfinite(one) and one > 0)
    if len(logs) < _MANY:
        return 1.0
    middle = logs[len(logs) // 2]
    deviation = 1.4826 * sorted(abs(one - middle) for one in logs)[len(logs) // 2]
    return max(1.0, math.exp(middle + (math.sqrt(2 * math.log(len(logs))) + 1) * deviation)) if middle < 0 else 1.0


def _norms(squares: Tensor, chosen: Tensor) -> Tensor:
    # A choice by `where`: a unit that does not count may be infinite.
    counted = torch.where(chosen, squares.to(torch.float64), 0.0)
    return counted.sum(-1).sqrt()
