"""What a clip returns, and what all of them check."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["Bounds", "Clipped", "check_bounds", "check_limit", "limited", "log_bounds", "summarize", "truncated"]

#: Smallest and largest ratio; None for no lower one.
Bounds = tuple[float | None, float]


@dataclasses.dataclass(frozen=True, eq=False)
class Clipped:
    """What a clip makes of the tokens of a micro-batch. Nothing in it carries a gradient.

    Several clips go together: multiply their weights, and combine their masks with `&`.

    Attributes:
        weights: What to multiply each token's loss with, shape (B, T); 0 where `mask` is False.
        mask: Tokens that still count, bool, shape (B, T).
        num_tokens: Tokens that counted before, shape ().
        num_sequences: Sequences with such a token, shape ().
        share_changed: Share of tokens whose weight is not what it would have been without the clip, shape (); as all
            shares 0 where there are no tokens.
        share_below: Share of tokens under the lower bound.
        share_above: Share of tokens over the upper bound.
        share_sequences: Share of sequences with a changed token.
    """

    weights: Tensor
    mask: Tensor
    num_tokens: Tensor
    num_sequences: Tensor
    share_changed: Tensor
    share_below: Tensor
    share_above: Tensor
    share_sequences: Tensor


def summarize(weights: Tensor, *, kept: Tensor, mask: Tensor, below: Tensor, above: Tensor) -> Clipped:
    """Put together what a clip returns.

    Args:
        weights: Of tokens, finite, shape (B, T).
        kept: Tokens that the clip leaves in, bool, shape (B, T) or (B, 1).
        mask: Tokens that counted before, bool, shape (B, T).
        below: Tokens under the lower bound, bool, shape (B, T) or (B, 1).
        above: Tokens over the upper bound, bool, shape (B, T) or (B, 1).

    Returns:
        The weights where tokens still count, and the shares.
    """
    remaining = kept & mask
    changed = (below | above | ~kept) & mask
    counts = torch.stack([part.sum() for part in (mask, changed, below & mask, above & mask)]).to(weights.dtype)
    rows = torch.stack([part.any(-1).sum() for part in (mask, changed)]).to(weights.dtype)
    shares = counts / counts[0].clamp(min=1)
    weights = torch.where(remaining, weights, 0.0)
    return Clipped(
        weights,
        remaining,
        num_tokens=counts[0],
        num_sequences=rows[0],
        share_changed=shares[1],
        share_below=shares[2],
        share_above=shares[3],
        share_sequences=rows[1] / rows[0].clamp(min=1),
    )


def limited(log_ratios: Tensor, limit: float | None) -> Tensor:
    """Log-ratios between plus and minus a limit.

    Args:
        log_ratios: Any shape.
        limit: Positive, or none.

    Returns:
        Same shape.
    """
    return log_ratios if limit is None else log_ratios.clamp(-limit, limit)


def truncated(weights: Tensor, *, bounds: Bounds, below: Tensor, above: Tensor) -> Tensor:
    """Weights with those outside set to the bound that they cross.

    Args:
        weights: Possibly infinite, but only over the upper bound.
        bounds: Of ratios.
        below: Which are under the lower bound, of the weights' shape.
        above: Which are over the upper bound.

    Returns:
        Same shape, finite.
    """
    lower, upper = bounds
    return torch.where(above, upper, weights if lower is None else torch.where(below, lower, weights))


def log_bounds(bounds: Bounds) -> tuple[float, float]:
    """Logarithms of bounds.

    Args:
        bounds: Of ratios.

    Returns:
        Both; minus infinity for no lower one.

    Example:
        >>> log_bounds((None, 1.0))
        (-inf, 0.0)
    """
    low, high = bounds
    return -math.inf if low is None else math.log(low), math.log(high)


def check_bounds(bounds: Bounds) -> Bounds:
    """Refuse bounds that are none.

    Args:
        bounds: Of ratios.

    Returns:
        The same.

    Raises:
        ValueError: If they are no two, not in order, not positive or not finite.

    Example:
        >>> check_bounds((5.0, 0.5))
        Traceback (most recent call last):
        ValueError: bounds=(5.0, 0.5): expected (lower, upper) with 0 < lower < upper, such as ...
    """
    given: Any = bounds
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    numbers = [bound for bound in given if bound is not None] if is_pair else []
    is_fine = is_pair and given[1] is not None and all(_is_positive(number) for number in numbers)
    if not is_fine or numbers != sorted(set(numbers)):
        raise ValueError(
            f"bounds={given!r}: expected (lower, upper) with 0 < lower < upper, such as (0.5, 5.0), or (None, 2.0)"
        )
    return given[0], given[1]


def check_limit(name: str, value: float | None) -> None:
    """Refuse a number that is not positive.

    Args:
        name: Of the argument.
        value: A number, or none.

    Raises:
        ValueError: If it is a number, but not a positive and finite one.

    Example:
        >>> check_limit("veto", 0.0)
        Traceback (most recent call last):
        ValueError: veto=0.0: expected a positive number, or None to do without
    """
    if value is not None and not _is_positive(value):
        raise ValueError(f"{name}={value!r}: expected a positive number, or None to do without")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
