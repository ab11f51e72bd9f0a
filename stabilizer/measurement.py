"""One measurement of all gradients: local statistics, packed, reduced over ranks once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.errors import warn
from stabilizer.norms import count_nonfinite, largest, norms, square_sums
from stabilizer.packing import Packer, Statistics
from stabilizer.parameters import ParameterIndex
from stabilizer.partial import PartialSums
from stabilizer.reduction import Reducer, accumulation_dtype
from stabilizer.segments import Segments

__all__ = ["Measurement", "Measurer", "describe_difference"]

_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """Statistics by unit (what no grouping of parameters tells apart), over all ranks.

    Attributes:
        step: The optimizer step.
        squares: Sums of squares, shape (units,), float64; zeros if only norms of order infinity are measured.
        maxima: Largest absolute values with infinity for NaN, shape (units,), float32; zeros unless they are measured.
        counts: Non-finite elements, shape (units,), float64; zeros unless they are counted.
        is_exact: Whether maxima and counts were measured at this step.
        flags: Flags summed over ranks, shape (num_flags,); this rank's own on steps without a collective.
        sums: Further numbers of the step, summed over ranks, float64; their shape is that of what was handed in.
        is_bad: Whether a gradient is not finite, shape (), bool; of this rank's own where all ranks hold whole ones.
            What a rank could not measure is NaN and not bad.
        difference: Largest relative difference between ranks of a sum of squares, shape (), where they were compared.
    """

    step: int
    squares: Tensor
    maxima: Tensor
    counts: Tensor
    is_exact: bool
    flags: Tensor
    sums: Tensor
    is_bad: Tensor
    difference: Tensor | None


def describe_difference(difference: float, step: int | None = None) -> str | None:
    """What to say when gradients that should be equal on all ranks are not.

    Args:
        difference: `Measurement.difference`.
        step: The optimizer step, if there is one.

    Returns:
        A message; `None` if the difference means nothing (devices of different kinds may differ in the last bits).
    """
    if difference <= _TOLERANCE:
        return None
    return (
        f"cross-rank check: gradients differ between ranks{'' if step is None else f' at step {step}'} (norms by "
        f"{difference:.2g} of the largest) though every rank should hold them whole, so the ranks' models drift apart. "
        "Is the last micro-batch of an accumulation outside no_sync()? Do parameters that live on some ranks only need "
        "groups=?"
    )


class Measurer:
    """Computes measurements; `GradientStore` owns one and hands its arguments on.

    Args:
        index: The parameters.
        reducer: Reaches the other ranks.
        positions: Of this rank's parameters among those of all ranks.
        num_parameters: How many parameters all ranks have together.
        unit_ids: Unit of every one of this rank's parameters.
        num_units: How many units there are.
        norm_types: 2, "inf" or both.
        max_abs_intervals: Intervals of counts and largest values.
        num_flags: Length of the flags.
    """

    def __init__(
        self,
        index: ParameterIndex,
        reducer: Reducer,
        *,
        positions: Sequence[int],
        num_parameters: int,
        unit_ids: Sequence[int],
        num_units: int,
        norm_types: frozenset[Any],
        max_abs_intervals: frozenset[int],
        num_flags: int,
    ) -> None:
        self.norm_types = norm_types
        self.failure: Exception | None = None
        self.needs_replan = False
        # What was measured, for whoever changes it at once; not longer, or gradients would outlive their step.
        self.local_gradients: list[Tensor | None] | None = None
        self._index, self._reducer, self._device = index, reducer, reducer.device
        self._dtype = accumulation_dtype(self._device)
        self._max_abs_intervals = max_abs_intervals
        self._units = Segments(unit_ids, num_segments=num_units, device=self._device)
        self._zeros = torch.zeros(num_units, dtype=self._dtype, device=self._device)
        self._packer = Packer(reducer, index=index, num_units=num_units, norm_types=norm_types)
        self._no_flags = torch.zeros(num_flags, dtype=self._dtype, device=self._device)
        self._positions, self._num_parameters = positions, num_parameters
        #: In the order of all ranks' parameters: what is compared stands at the same place on every rank.
        self._whole_positions = sorted(index.whole_positions, key=positions.__getitem__)
        self._said_unsupported: set[int] = set()
        self._placements = [index.placements(position, None) for position in range(len(index))]
        self._weights = self._weight_vector()
        self.replan()

    def replan(self) -> None:
        """Agree anew which gradients are Partial; a collective, with gradients in place."""
        self._partial = PartialSums(
            self._index, self._reducer, positions=self._positions, num_parameters=self._num_parameters
        )
        self._unplanned: list[int] = []
        self.needs_replan = False
        new = [overall for overall in self._partial.unsupported if overall not in self._said_unsupported]
        if new:
            self._said_unsupported.update(new)
            names = [self._index.overall_names[overall] for overall in new]
            warn(
                f"the gradients of {names[:5]} ({len(names)} in all) are Partial over a mesh axis, neither as a sum "
                "nor as an average (such as Partial('max')): they have no norm and are left out. Redistribute them "
                "before the optimizer step."
            )

    def measure(
        self, step: int, *, grad_scale: Tensor | None, flags: Tensor | None, sums: Tensor | None, compare: bool
    ) -> Measurement:
        """See `GradientStore.measure`."""
        self.failure = None
        tensors = self._local_tensors()
        is_exact = any(step % interval == 0 for interval in self._max_abs_intervals)
        local = self._guarded(self._exact_statistics if is_exact else self._quiet_statistics, tensors)
        sees_nonfinite = self._host_sees_nonfinite(local) if self._index.is_replicated else None
        if sees_nonfinite:
            # Without a collective: every rank holds whole gradients, and only some may see this.
            is_exact, local = True, self._guarded(self._wide_statistics, tensors)
        flags = self._no_flags if flags is None else flags.to(self._dtype)
        sums = self._zeros[:0] if sums is None else sums.to(self._device, self._dtype)
        compared = self._compared(tensors, local) if compare else None
        failed = self._zeros.new_full((1,), float(self.failure is not None))
        own = torch.cat([flags, failed])
        total, summed, difference = self._packer.reduce(local, (own, sums), is_exact=is_exact, compared=compared)
        flags, failed, sums = summed.split([flags.numel(), 1, sums.numel()])
        if not self._index.is_replicated:
            sees_nonfinite = self._host_sees_nonfinite(total)
            if sees_nonfinite:
                is_exact = True
                local = self._guarded(self._wide_statistics, tensors)
                total, *_ = self._packer.reduce(local, (own, sums[:0]), is_exact=True, compared=None)
        if sees_nonfinite is False:
            is_bad = torch.zeros((), dtype=torch.bool, device=self._device)
        else:
            is_bad = ~torch.isfinite(total.squares + total.maxima).all() & (failed[0] == 0)
        squares, maxima = total.squares, total.maxima
        if grad_scale is not None:
            inverse = grad_scale.detach().to(self._device).to(self._dtype).reciprocal()
            squares, maxima = squares * inverse.square(), maxima * inverse
        return Measurement(
            step=step,
            squares=squares,
            maxima=maxima.to(torch.float32),
            counts=total.counts,
            is_exact=is_exact,
            flags=flags,
            sums=sums,
            is_bad=is_bad,
            difference=difference,
        )

    def _guarded(self, function: Callable[..., Statistics], tensors: Sequence[Tensor | None]) -> Statistics:
        try:
            if self.failure is None:
                return function(tensors)
        except Exception as error:
            self.failure = error
        # The other ranks wait in the collective: take part, with numbers that nobody takes for a measurement.
        missing = torch.full_like(self._zeros, torch.nan)
        return Statistics(missing, torch.full_like(missing, torch.inf), missing)

    def _quiet_statistics(self, tensors: Sequence[Tensor | None]) -> Statistics:
        squares, maxima = self._zeros, self._zeros
        if 2 in self.norm_types:
            local = norms(tensors, device=self._device).to(self._dtype).square()
            squares = self._units.sum(local * self._weights)
        if "inf" in self.norm_types:
            maxima = self._units.max(largest(tensors, device=self._device).to(self._dtype))
        return Statistics(squares, maxima, self._zeros)

    def _exact_statistics(self, tensors: Sequence[Tensor | None]) -> Statistics:
        maxima = self._units.max(largest(tensors, device=self._device).to(self._dtype))
        counts = count_nonfinite(tensors, device=self._device).to(self._dtype)
        return Statistics(self._quiet_statistics(tensors).squares, maxima, self._units.sum(counts * self._weights))

    def _wide_statistics(self, tensors: Sequence[Tensor | None]) -> Statistics:
        """Exact ones, and square sums that are finite for every finite gradient (in float64, slowly)."""
        exact = self._exact_statistics(tensors)
        return exact._replace(squares=self._units.sum(square_sums(tensors, device=self._device) * self._weights))

    def _compared(self, tensors: Sequence[Tensor | None], local: Statistics) -> Tensor | None:
        """What must be equal on all ranks: statistics of gradients that every rank holds whole."""
        if self._index.is_replicated:
            return local.squares + local.maxima
        if not self._whole_positions:
            return None
        try:
            if self.failure is None:
                return self._compared_norms(tensors)
        except Exception as error:
            self.failure = error
        return torch.full((len(self._whole_positions),), torch.nan, dtype=self._dtype, device=self._device)

    def _compared_norms(self, tensors: Sequence[Tensor | None]) -> Tensor:
        whole = [tensors[position] for position in self._whole_positions]
        return norms(whole, device=self._device).to(self._dtype)

    def _host_sees_nonfinite(self, total: Statistics) -> bool | None:
        """Whether a norm is not finite; `None` where the host would wait. Reduced numbers, so all ranks agree."""
        return None if self._device.type != "cpu" else not bool(torch.isfinite(total.squares + total.maxima).all())

    def _local_tensors(self) -> list[Tensor | None]:
        tensors: list[Tensor | None]
        try:
            tensors = self._own_tensors()
        except Exception as error:
            self.failure = error
            tensors = [None] * len(self._index)
        tensors = self._partial.add_up(tensors, self._placements)
        self.failure = self.failure or self._partial.failure
        return tensors

    def _own_tensors(self) -> list[Tensor | None]:
        index = self._index
        gradients = index.gradients()
        changed = False
        for position in index.dtensor_positions:
            gradient = gradients[position]
            if gradient is None:
                continue
            placements = index.placements(position, gradient)
            # FSDP hands out the same tuple at every step: this comparison is nearly always one of identity.
            if placements is not self._placements[position] and placements != self._placements[position]:
                self._placements[position] = placements
                changed = True
        if changed:
            self._weights = self._weight_vector()
            self._find_unplanned()
        tensors = [None if gradient is None else index.local(gradient) for gradient in gradients]
        self.local_gradients = list(tensors)
        for position in (*self._unplanned, *self._partial.left_out):
            tensors[position] = None
        return tensors

    def _find_unplanned(self) -> None:
        self._unplanned = self._partial.missing(self._placements)
        self.needs_replan = bool(self._unplanned)
        if self.needs_replan:
            names = [self._index.names[position] for position in self._unplanned]
            warn(
                f"the gradients of {names[:5]} ({len(names)} in all) have become Partial sums after the first step; "
                "they are left out of the norms until all ranks have agreed to add them up"
            )

    def _weight_vector(self) -> Tensor:
        index = self._index
        if index.is_replicated:
            return torch.ones((), dtype=self._dtype, device=self._device)
        weights = [index.weight(position, placements) for position, placements in enumerate(self._placements)]
        return torch.tensor(weights, dtype=self._dtype, device=self._device)
