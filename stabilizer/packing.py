"""One step's statistics and numbers over all ranks, in at most one collective."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabilizer.parameters import ParameterIndex
from stabilizer.reduction import Reducer

__all__ = ["Packer", "Statistics"]


class Statistics(NamedTuple):
    """By unit: sums of squares, largest absolute values and non-finite elements, each of shape (units,)."""

    squares: Tensor
    maxima: Tensor
    counts: Tensor


class Packer:
    """Packs what a rank has measured, and reads what all have.

    Args:
        reducer: Reaches the other ranks.
        index: The parameters.
        num_units: How many units there are.
        norm_types: 2, "inf" or both.
    """

    def __init__(
        self,
        reducer: Reducer,
        *,
        index: ParameterIndex,
        num_units: int,
        norm_types: frozenset[Any],
    ) -> None:
        self._reducer, self._index, self._num_units = reducer, index, num_units
        self._norm_types = norm_types

    def reduce(
        self, local: Statistics, numbers: tuple[Tensor, Tensor], *, is_exact: bool, compared: Tensor | None
    ) -> tuple[Statistics, Tensor, Tensor | None]:
        """Statistics, numbers and a comparison over all ranks.

        Args:
            local: Of this rank, weighted.
            numbers: Flags, and further sums; each of a shape that is the same on every rank.
            is_exact: Whether maxima and counts were measured, the same on every rank where these are reduced.
            compared: What must be equal on all ranks, if that is asked.

        Returns:
            Statistics; flags and sums in one vector; the largest relative difference of what was compared.
        """
        reducer, units, (flags, sums) = self._reducer, self._num_units, numbers
        packed = torch.cat(numbers)
        if reducer.world_size == 1:
            return local, packed, None
        if self._index.is_replicated and compared is None:
            # Norms need no collective here, and flags can wait for a step that has one; sums cannot.
            return local, packed if not sums.numel() else torch.cat([flags, reducer.sum(sums)]), None
        if not is_exact and compared is None and self._norm_types == {2}:
            summed = reducer.sum(torch.cat([local.squares, packed]))
            return local._replace(squares=summed[:units]), summed[units:], None
        if not is_exact and compared is None and self._norm_types == {"inf"} and not sums.numel():
            highest = reducer.maximum(torch.cat([local.maxima, packed]))
            return local._replace(maxima=highest[:units]), highest[units:], None
        # Sums and maxima at one step, or a comparison: gather the few numbers of every rank and finish here.
        gathered = reducer.gather(torch.cat([*local, packed, packed[:0] if compared is None else compared]))
        summed, highest, end = gathered.sum(0), gathered.amax(0), 3 * units + packed.numel()
        difference = None
        if compared is not None:
            spread = highest[end:] - gathered.amin(0)[end:]
            difference = (spread / highest[end:].clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num(0.0, 0.0).amax()
        if self._index.is_replicated:
            # Own norms, as on steps without a collective, so that both kinds of steps give the same bits.
            return local, summed[3 * units : end], difference
        total = Statistics(summed[:units], highest[units : 2 * units], summed[2 * units : 3 * units])
        return total, summed[3 * units : end], difference
