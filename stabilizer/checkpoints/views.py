"""Counting what a tensor sees of its storage, while the storage passes by in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stabilizer.checkpoints.finiteness import Nonfinite, count_nonfinite
from stabilizer.checkpoints.inert import SavedTensor

__all__ = ["ViewCount"]

#: Elements whose places in a storage are looked at in one go: each takes some tens of bytes.
_PLACES = 1 << 20


class ViewCount:
    """Counts the elements of one view that are not finite; memory is bounded by a piece.

    Args:
        view: Of a storage.

    Example:
        >>> storage = torch.tensor([1.0, float("nan"), float("inf"), 1.0])
        >>> count = ViewCount(SavedTensor("0", torch.float32, 16, 0, (2,), (2,)))
        >>> count.see(storage.view(torch.uint8), 0)
        >>> count.result
        Nonfinite(nan=0, inf=1, is_mask=False)
    """

    def __init__(self, view: SavedTensor) -> None:
        self.result = Nonfinite(0, 0, True)
        self._dtype, self._offset = view.dtype, view.offset
        pairs = [(size, step) for size, step in zip(view.shape, view.stride, strict=True) if size > 1]
        # What is expanded shows the same elements many times.
        self._times = math.prod(size for size, step in pairs if not step)
        self._pairs = sorted((pair for pair in pairs if pair[1]), key=lambda pair: pair[1], reverse=True)
        is_empty = 0 in view.shape
        self._span = 0 if is_empty else 1 + sum((size - 1) * step for size, step in self._pairs)
        # Without gaps in any order of dimensions, or with elements that lie over each other: all of the span counts.
        is_dense = math.prod(size for size, _ in self._pairs) >= self._span
        self._has_gaps = not is_dense and self._is_nested()

    def see(self, piece: Tensor, start: int) -> None:
        """Count in a piece of the storage.

        Args:
            piece: Bytes; their number is one of whole elements, but for the last piece.
            start: First byte.
        """
        size = self._dtype.itemsize
        values = piece[: len(piece) // size * size].view(self._dtype)
        first = start // size - self._offset
        low, high = max(0, -first), min(len(values), self._span - first)
        if low < high:
            for seen in self._seen(values[low:high], first + low):
                self._add(count_nonfinite(seen))

    def _seen(self, values: Tensor, first: int) -> Iterator[Tensor]:
        if not self._has_gaps:
            yield values
            return
        for begin in range(0, len(values), _PLACES):
            some = values[begin : begin + _PLACES]
            yield some[self._is_place(torch.arange(first + begin, first + begin + len(some)))]

    def _is_place(self, places: Tensor) -> Tensor:
        """Whether a place is one of the view's: a number with its strides as digits."""
        found = torch.ones(len(places), dtype=torch.bool)
        for size, step in self._pairs:
            found &= places < size * step
            places = places.remainder(step)
        return found & (places == 0)

    def _is_nested(self) -> bool:
        within = 0
        for size, step in reversed(self._pairs):
            if step <= within:
                return False
            within += (size - 1) * step
        return True

    def _add(self, found: Nonfinite) -> None:
        nan, inf, is_mask = self.result
        self.result = Nonfinite(nan + found.nan * self._times, inf + found.inf * self._times, is_mask and found.is_mask)
