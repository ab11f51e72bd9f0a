"""Elements that are not finite, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PIECE", "Nonfinite", "count_nonfinite", "is_finite"]

#: Elements looked at in one go.
PIECE = 1 << 22

_COMPARABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Nonfinite(NamedTuple):
    """How many elements of a tensor are not finite.

    Attributes:
        nan: NaN.
        inf: Infinite.
        is_mask: Whether all others are 0 and no infinity is positive, as in an attention mask.
    """

    nan: int
    inf: int
    is_mask: bool


def is_finite(values: Tensor) -> bool:
    """Whether all elements are finite; those of types that cannot be otherwise are.

    Args:
        values: On the CPU, any shape and stride.

    Example:
        >>> is_finite(torch.tensor([1.0, float("inf")])), is_finite(torch.tensor([1, 2]))
        (False, True)
    """
    return all(bool(torch.isfinite(torch.stack(torch.aminmax(piece))).all()) for piece in _pieces(values))


def count_nonfinite(values: Tensor) -> Nonfinite:
    """Count what is not finite.

    Args:
        values: On the CPU, any shape and stride.

    Example:
        >>> count_nonfinite(torch.tensor([0.0, float("-inf"), 0.0]))
        Nonfinite(nan=0, inf=1, is_mask=True)
    """
    nan = inf = 0
    is_mask = True
    for piece in _pieces(values):
        nans, infs = piece.isnan(), piece.isinf()
        nan += int(nans.sum())
        inf += int(infs.sum())
        is_mask = is_mask and not nan and not (piece > 0).any() and bool((piece[~infs] == 0).all())
    return Nonfinite(nan, inf, is_mask)


def _pieces(values: Tensor) -> Iterator[Tensor]:
    """Flat, in a type that the CPU can compare; nothing of integers."""
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.is_floating_point() and values.numel():
        for piece in _rows(values):
            yield piece if piece.dtype in _COMPARABLE else piece.float()


def _rows(values: Tensor) -> Iterator[Tensor]:
    if values.is_contiguous() or values.dim() < 2 or values.numel() <= PIECE:
        yield from values.reshape(-1).split(PIECE)
    else:
        for row in values:
            yield from _rows(row)
