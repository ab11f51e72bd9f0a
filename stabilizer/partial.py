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
        self._index = index
        planned = [
            (position, axis)
            for position, gradient in enumerate(index.gradients())
            for axis in _partial_axes(index.placements(position, gradient))
        ]
        if not index.is_replicated and reducer.world_size > 1:
            found = torch.zeros(num_parameters, _MAX_AXES)
            for position, axis in planned:
                found[positions[position], axis] = 1
            found = reducer.maximum(found.view(-1).to(reducer.device)).view(num_parameters, _MAX_AXES).cpu()
            local = {overall: position for position, overall in enumerate(positions)}
            planned = [(local[overall], axis) for overall, axis in found.nonzero().tolist() if overall in local]
        self._planned = frozenset(planned)
        self._groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for position, axis in sorted(planned, key=lambda item: (item[1], item[0])):
            self._groups.setdefault(tuple(index.mesh_ranks(position, axis)), []).append((position, axis))

    def missing(self, placements: Sequence[tuple[Any, ...]]) -> list[int]:
        """Positions whose gradients have become Partial since the ranks agreed.

        Args:
            placements: Of every gradient, empty for plain tensors.
        """
        return [
            position
            for position, placement in enumerate(placements)
            if any((position, axis) not in self._planned for axis in _partial_axes(placement))
        ]

    def add_up(self, tensors: Sequence[Tensor | None], placements: Sequence[tuple[Any, ...]]) -> list[Tensor | None]:
        """The local tensors with whole gradients in the place of Partial ones.

        Args:
            tensors: Local elements of every gradient, `None` where there is none; not changed.
            placements: Of every gradient.

        Returns:
            A list as long as `tensors`; summed gradients are flat and float32.
        """
        result = list(tensors)
        for ranks, members in self._groups.items():
            pieces = [self._summand(position, axis, result[position], placements) for position, axis in members]
            total = sum_over_(torch.cat(pieces), ranks)
            for (position, _), piece in zip(members, total.split([piece.numel() for piece in pieces]), strict=True):
                result[position] = piece
        return result

    def _summand(
        self, position: int, axis: int, tensor: Tensor | None, placements: Sequence[tuple[Any, ...]]
    ) -> Tensor:
        if tensor is None:
            parameter = self._index.local(self._index.parameters[position].detach())
            return parameter.new_zeros(parameter.numel(), dtype=torch.float32)
        placement, num_ranks = placements[position][axis], len(self._index.mesh_ranks(position, axis))
        summand = tensor.reshape(-1).to(torch.float32)
        if not placement.is_partial():
            return summand / num_ranks  # whole on every rank now, after it was Partial when the ranks agreed
        if placement.reduce_op == "avg":
            return summand / num_ranks
        if placement.reduce_op != "sum":
            raise ValueError(
                f"the gradient of {self._index.names[position]!r} is Partial({placement.reduce_op!r}): only sums and "
                "averages have a norm. Redistribute it before the optimizer step."
            )
        return summand


def _partial_axes(placements: tuple[Any, ...]) -> list[int]:
    return [axis for axis, placement in enumerate(placements) if placement.is_partial()]
