"""Gradients that are still Partial: each rank of a mesh axis holds a summand of the whole gradient.

Plain tensor parallelism leaves them for parameters that work on a part of the sequence (SequenceParallel norms). The
norm of a sum is not the sum of norms, so they are added up first, all of one mesh axis in one packed all-reduce. Which
ones take part is agreed on by all ranks and does not depend on which gradients exist at a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.parameters import ParameterIndex
from stabilizer.reduction import Reducer, sum_over_

__all__ = ["PartialSums"]

_MAX_AXES = 8
# What the ranks tell each other of a gradient and an axis: Partial sums or averages, or what has no norm.
_SUM, _OTHER = 1, 2


class PartialSums:
    """Adds up Partial gradients over their mesh axes, in copies.

    Making one is a collective: every rank does it at the same step, with gradients in place.

    Args:
        index: The parameters.
        reducer: Reaches the other ranks.
        positions: Of this rank's parameters among those of all ranks.
        num_parameters: How many parameters all ranks have together.
    """

    def __init__(
        self, index: ParameterIndex, reducer: Reducer, *, positions: Sequence[int], num_parameters: int
    ) -> None:
        self.failure: Exception | None = None
        self._index = index
        found: dict[tuple[int, int], float] = {}
        for position, gradient in enumerate(index.gradients()):
            placements = index.placements(position, gradient)
            for axis in _partial_axes(placements) if index.is_held(position) else ():
                found[positions[position], axis] = _SUM if _has_norm(placements[axis]) else _OTHER
        if not index.is_replicated and reducer.world_size > 1:
            found = _agreed(found, reducer, num_parameters)
        #: Among the parameters of all ranks: those whose gradients no rank can add up.
        self.unsupported = tuple(sorted({overall for (overall, _), kind in found.items() if kind == _OTHER}))
        local = {overall: position for position, overall in enumerate(positions) if index.is_held(position)}
        self._left_out = frozenset(local[overall] for overall in self.unsupported if overall in local)
        planned = [
            (local[overall], axis) for overall, axis in found if overall in local and overall not in self.unsupported
        ]
        self._planned = frozenset(planned)
        self._groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for position, axis in sorted(planned, key=lambda item: (item[1], positions[item[0]])):
            self._groups.setdefault(tuple(index.mesh_ranks(position, axis)), []).append((position, axis))
        # Known beforehand, so that a rank whose gradients cannot be read still takes part.
        self._shapes: dict[int, tuple[int, torch.device]] = {}
        for position, _ in planned:
            parameter = index.local(index.parameters[position].detach())
            numel = parameter.numel() * (2 if parameter.is_complex() else 1)
            self._shapes[position] = (numel, parameter.device)

    def missing(self, placements: Sequence[tuple[Any, ...]]) -> list[int]:
        """Positions whose gradients have become Partial since the ranks agreed.

        Args:
            placements: Of every gradient, empty for plain tensors.
        """
        return [
            position
            for position, placement in enumerate(placements)
            if position not in self._left_out
            and any(
                (position, axis) not in self._planned or not _has_norm(placement[axis])
                for axis in _partial_axes(placement)
            )
        ]

    @property
    def left_out(self) -> frozenset[int]:
        """Positions whose gradients are Partial in a way that has no norm (a maximum)."""
        return self._left_out

    def add_up(self, tensors: Sequence[Tensor | None], placements: Sequence[tuple[Any, ...]]) -> list[Tensor | None]:
        """The local tensors with whole gradients in the place of Partial ones.

        Args:
            tensors: Local elements of every gradient, `None` where there is none; not changed.
            placements: Of every gradient.

        Returns:
            A list as long as `tensors`; summed gradients are flat and float32.
        """
        self.failure = None
        result = list(tensors)
        for ranks, members in self._groups.items():
            pieces = [self._guarded(position, axis, result[position], placements) for position, axis in members]
            total = sum_over_(torch.cat(pieces), ranks)
            for (position, _), piece in zip(members, total.split([piece.numel() for piece in pieces]), strict=True):
                result[position] = piece
        return result

    def _guarded(
        self, position: int, axis: int, tensor: Tensor | None, placements: Sequence[tuple[Any, ...]]
    ) -> Tensor:
        try:
            return self._summand(position, axis, tensor, placements)
        except Exception as error:
            # The other ranks wait for as many elements.
            self.failure = error
            return self._neutral(position).fill_(torch.nan)

    def _neutral(self, position: int) -> Tensor:
        numel, device = self._shapes[position]
        return torch.zeros(numel, dtype=torch.float32, device=device)

    def _summand(
        self, position: int, axis: int, tensor: Tensor | None, placements: Sequence[tuple[Any, ...]]
    ) -> Tensor:
        if tensor is None:
            return self._neutral(position)
        placement, num_ranks = placements[position][axis], len(self._index.mesh_ranks(position, axis))
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        summand = real.reshape(-1).to(torch.float32)
        # An average; or whole on every rank now, after it was Partial when the ranks agreed.
        is_sum = placement.is_partial() and placement.reduce_op == "sum"
        return summand if is_sum else summand / num_ranks


def _agreed(found: dict[tuple[int, int], float], reducer: Reducer, num_parameters: int) -> dict[tuple[int, int], float]:
    """The largest of what the ranks found, by parameter and axis."""
    kinds = torch.zeros(num_parameters, _MAX_AXES)
    for place, kind in found.items():
        kinds[place] = kind
    rows = reducer.maximum(kinds.view(-1).to(reducer.device)).view(num_parameters, _MAX_AXES).tolist()
    return {(overall, axis): kind for overall, row in enumerate(rows) for axis, kind in enumerate(row) if kind}


def _has_norm(placement: Any) -> bool:
    return placement.reduce_op in ("sum", "avg")


def _partial_axes(placements: tuple[Any, ...]) -> list[int]:
    return [axis for axis, placement in enumerate(placements) if placement.is_partial()]
