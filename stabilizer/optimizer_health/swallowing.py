"""Sums that change nothing: in bfloat16 p + u is p where |u| is under 1/512 to 1/256 of |p|, and half of that counts.

A parameter of 8 significant bits that is updated in place does not move until an update reaches half of its last bit,
and a gradient that is added up in it drops the parts that are too small for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_low_precision", "swallowed_parts", "swallowed_updates"]


def is_low_precision(tensor: Tensor) -> bool:
    """Whether a tensor has so few digits that sums with it are worth a look.

    Args:
        tensor: Any.
    """
    return tensor.dtype in (torch.bfloat16, torch.float16)


@torch.no_grad()
def swallowed_updates(before: Tensor, after: Tensor, moved_by: Tensor) -> Tensor:
    """Elements that a step has left where they were though there was something to move them by.

    Args:
        before: Of a parameter, before the step.
        after: The same after it.
        moved_by: What the step is made of, its first moment or gradient, of the same shape: not 0 where it moves.

    Returns:
        How many did not move, and how many were to, shape (2,), float32.

    Example:
        >>> before = torch.tensor([1.0, 1.0, 1.0], dtype=torch.bfloat16)
        >>> after = before + torch.tensor([1e-3, 1e-1, 0.0]).bfloat16()
        >>> swallowed_updates(before, after, torch.tensor([1.0, 1.0, 0.0]))
        tensor([1., 2.])
    """
    is_to_move = moved_by != 0
    return torch.stack([(is_to_move & (before == after)).sum(), is_to_move.sum()]).to(torch.float32)


@torch.no_grad()
def swallowed_parts(total: Tensor, part: Tensor) -> Tensor:
    """Elements of a sum that adding a part does not change though the part is not 0.

    Args:
        total: The sum so far; not changed.
        part: What is to be added, of the same shape.

    Returns:
        How many are not changed, and how many parts are not 0, shape (2,), float32.

    Example:
        >>> swallowed_parts(torch.tensor([256.0, 1.0], dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16))
        tensor([1., 2.])
    """
    is_part = part != 0
    return torch.stack([(is_part & (total + part == total)).sum(), is_part.sum()]).to(torch.float32)
