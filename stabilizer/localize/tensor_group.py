"""The ranks of a tensor-parallel group: they hold the same data, and must decide alike, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.fsdp import dtensor_class
from stabilizer.parameters import ParameterIndex
from stabilizer.reduction import rank, sum_over_, world_size
from stabilizer.sensors import Sensors, _Seen

__all__ = ["SummingSensors", "TensorGroup", "joined", "tensor_group"]

#: Replicas of one number differ by less, pieces of it by more.
_SAME = 1e-3


class TensorGroup:
    """Adds up what the ranks of a group have seen of the same micro-batches.

    Args:
        ranks: This rank's group; nothing without tensor parallelism.

    Example:
        >>> group = TensorGroup(())
        >>> bool(group), group.is_first, group.sum_(torch.tensor([2.0]))
        (False, True, tensor([2.]))
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks) if len(ranks) > 1 else ()

    def __bool__(self) -> bool:
        return bool(self.ranks)

    def connect(self, device: torch.device) -> TensorGroup:
        """Make the group's means of talking where all its ranks are known to be: a collective.

        Args:
            device: Where its numbers will be.
        """
        self.sum_(torch.zeros(1, device=device))
        return self

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the group."""
        return not self.ranks or rank() == self.ranks[0]

    def sum_(self, squares: Tensor) -> Tensor:
        """Square sums of the whole group, of which each rank has its share: a collective.

        Args:
            squares: Shape (n,); changed in place.
        """
        return sum_over_(squares, self.ranks) if self.ranks else squares

    def scores(self, arrived: Tensor | None) -> Tensor | None:
        """Norms of what arrived at the gate's units, the same bits on every rank: a collective.

        Args:
            arrived: This rank's, shape (units,): of whole logits, the same but for rounding, or of its own part of the
                vocabulary.

        Returns:
            Of the whole logits, shape (units,).
        """
        if arrived is None or not self.ranks:
            return arrived
        rows = torch.zeros(len(self.ranks), arrived.numel(), device=arrived.device)
        rows[self.ranks.index(rank())] = arrived
        sum_over_(rows.view(-1), self.ranks)
        first = rows[0]
        # What is not finite on one rank only says so of the whole.
        is_same = torch.isclose(rows, first, rtol=_SAME, atol=0.0, equal_nan=True).all()
        return torch.where(is_same, first, torch.linalg.vector_norm(rows, dim=0))


def tensor_group(sensors: Sensors) -> TensorGroup:
    """The ranks that have this rank's data and other pieces of its parameters.

    Args:
        sensors: Of the model, which has run a forward pass.

    Returns:
        Nobody's where there is no tensor parallelism, nor where only experts are spread over ranks, whose data differ.
    """
    dtensor: Any = dtensor_class()
    if dtensor is None or world_size() == 1:
        return TensorGroup(())
    group: list[int] = []
    spread = 1
    for leaf in sensors._leaves:
        tensor: Any = leaf.find()
        if not isinstance(tensor, dtensor):
            spread = max(spread, leaf.num_ranks)
        elif tensor.device_mesh.size() > len(group):
            group = tensor.device_mesh.mesh.flatten().tolist()
    return TensorGroup(group if len(group) <= world_size() // spread else ())


def joined(norms: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    """Norms of groups, of which each rank has its share.

    Args:
        norms: By rank.
        groups: The ranks of each rank's group; none for a group of its own.

    Example:
        >>> joined([3.0, 4.0, 1.0], [(0, 1), (0, 1), ()])
        [5.0, 5.0, 1.0]
    """
    members = [group or (number,) for number, group in enumerate(groups)]
    return [math.hypot(*(norms[number] for number in group)) for group in members]


class SummingSensors(Sensors):
    """Sensors that add up what tensor-parallel ranks hold as summands: a collective for each such gradient.

    Too dear for every step, and right for the few passes of a search: the norm of a sum is not known from those of its
    summands (`SequenceParallel` leaves the gradients of norms so).

    Args:
        model: As of `Sensors`.
        index: As of `Sensors`.
    """

    def __init__(self, model: nn.Module, index: ParameterIndex) -> None:
        super().__init__(model, index)
        reason = self._seen.reason
        self._seen = _SummingSeen(index)
        self._seen.reason = reason


class _SummingSeen(_Seen):
    def _local(self, gradient: Any, position: int) -> tuple[Tensor, float]:
        from torch.distributed.tensor import Replicate

        placements = [Replicate() if one.is_partial() else one for one in gradient.placements]
        if placements != list(gradient.placements):
            gradient = gradient.redistribute(placements=placements)
        return super()._local(gradient, position)
