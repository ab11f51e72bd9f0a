"""Sums and maxima over groups of positions: parameters into units, units into layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Segments"]


class Segments:
    """Which positions of a vector belong together.

    Every sum adds in a fixed order, on every device: ranks that compute from equal numbers get equal bits (an
    `index_add` adds in the order in which threads arrive), and a NaN stays in its own segment.

    Args:
        ids: Segment of every position.
        num_segments: How many segments there are; some may have no position.
        device: Where the vectors are.

    Example:
        >>> segments = Segments([0, 1, 0], num_segments=3, device=torch.device("cpu"))
        >>> segments.sum(torch.tensor([1.0, 2.0, 4.0]))
        tensor([5., 2., 0.])
    """

    def __init__(self, ids: Sequence[int], *, num_segments: int, device: torch.device) -> None:
        order = sorted(range(len(ids)), key=ids.__getitem__)
        lengths = [0] * num_segments
        for segment in ids:
            lengths[segment] += 1
        self._is_identity = list(ids) == list(range(num_segments))
        is_sorted = order == list(range(len(ids)))
        self._order = None if is_sorted else torch.tensor(order, device=device)
        self._lengths = torch.tensor(lengths, device=device)
        self._ids = torch.tensor(list(ids), dtype=torch.long, device=device)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of every segment.

        Args:
            values: Shape (positions,).

        Returns:
            Shape (segments,); 0 for a segment without positions.
        """
        return self._reduce(values, "sum")

    def max(self, values: Tensor) -> Tensor:
        """Largest value of every segment.

        Args:
            values: Shape (positions,), not negative.

        Returns:
            Shape (segments,); 0 for a segment without positions.
        """
        return self._reduce(values, "max")

    def spread(self, values: Tensor) -> Tensor:
        """The value of its segment at every position.

        Args:
            values: Shape (segments,).

        Returns:
            Shape (positions,).
        """
        return values if self._is_identity else values.index_select(0, self._ids)

    def _reduce(self, values: Tensor, operation: str) -> Tensor:
        if self._is_identity:
            return values
        if self._order is not None:
            values = values[self._order]
        # `unsafe` leaves out a check of the lengths that would make the host wait.
        return torch.segment_reduce(values, operation, lengths=self._lengths, unsafe=True, initial=0)
