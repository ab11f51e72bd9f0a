"""The maths of layer health: logarithms of norms over steps and layers, on any device, without a wait of the host.

A norm that is zero or not finite has no logarithm here but NaN, and every statistic leaves NaN out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stabilizer.reduction import accumulation_dtype

__all__ = ["Baseline", "DepthFit", "baseline", "count", "deep_to_shallow", "depth_fit", "log_norms", "median"]

#: Standard deviation over median absolute deviation of a normal distribution.
_MAD_SIGMA = 1.4826
#: No layer is quieter than that: constant norms would make anything a spike. That of `RobustLog`.
_MIN_SIGMA = 0.05


class DepthFit(NamedTuple):
    """A straight line through ln norm over block index.

    Attributes:
        slope: Of ln norm, per block, shape ().
        r_squared: Share of the variance that the line explains, shape ().
        half_depth: Blocks over which the norm falls (or rises) by a factor of two, shape ().
    """

    slope: Tensor
    r_squared: Tensor
    half_depth: Tensor


class Baseline(NamedTuple):
    """What is usual: median of ln norm, and its robust standard deviation, each of shape (layers,)."""

    median: Tensor
    sigma: Tensor


def log_norms(norms: Tensor) -> Tensor:
    """Natural logarithms.

    Args:
        norms: Any shape.

    Returns:
        The same shape, float64 where the device has it; NaN for norms that are zero or not finite.

    Example:
        >>> log_norms(torch.tensor([1.0, 0.0, torch.inf]))
        tensor([0., nan, nan], dtype=torch.float64)
    """
    norms = norms.to(accumulation_dtype(norms.device))
    return torch.where((norms > 0) & norms.isfinite(), norms, torch.nan).log()


def count(values: Tensor) -> Tensor:
    """How many entries of each column are numbers.

    Args:
        values: Shape (n, columns).
    """
    return (~values.isnan()).sum(0)


def median(values: Tensor) -> Tensor:
    """Median of every column without its NaNs.

    Args:
        values: Shape (n, ...).

    Returns:
        Shape (...), the mean of the two middle ones of an even number; NaN for a column of NaNs.

    Example:
        >>> median(torch.tensor([[1.0, torch.nan], [5.0, torch.nan], [torch.nan, torch.nan]]))
        tensor([3., nan])
    """
    if not len(values):
        return values.new_full(values.shape[1:], torch.nan)
    # Not torch.nanmedian: it takes the lower one of two, and is not deterministic on CUDA. Sorting puts NaN last.
    ordered = values.sort(0).values
    num = (~values.isnan()).sum(0, keepdim=True)
    lower = ordered.gather(0, ((num - 1) // 2).clamp(min=0))
    upper = ordered.gather(0, (num // 2).clamp(max=len(values) - 1))
    return torch.where(num > 0, (lower + upper) / 2, torch.nan)[0]


def baseline(logs: Tensor, *, min_count: int) -> Baseline:
    """What is usual of every layer: median and median absolute deviation, which three bad steps in ten do not move.

    Hampel, "The influence curve and its role in robust estimation" (1974).

    Args:
        logs: ln norm by step and layer, shape (steps, layers), NaN where there is none.
        min_count: Fewer numbers than that make no baseline.

    Returns:
        NaN for layers without one; sigma is at least 0.05.
    """
    usual = median(logs)
    sigma = (_MAD_SIGMA * median((logs - usual).abs())).clamp(min=_MIN_SIGMA)
    is_known = count(logs) >= min_count
    return Baseline(torch.where(is_known, usual, torch.nan), torch.where(is_known, sigma, torch.nan))


def depth_fit(logs: Tensor) -> DepthFit:
    """Least squares of ln norm against the block's index.

    With x and y the deviations from the means: slope = sum(x y) / sum(x^2), R^2 = sum(x y)^2 / (sum(x^2) sum(y^2)).

    Args:
        logs: ln norm of every block, shape (blocks,), NaN where there is none.

    Returns:
        NaN for fewer than four blocks with a norm: a line through three says little.

    Example:
        >>> depth_fit(torch.tensor([0.0, -1.0, -2.0, -3.0]).double() * math.log(2))
        DepthFit(slope=tensor(-0.6931, ...), r_squared=tensor(1., ...), half_depth=tensor(1., ...))
    """
    is_known = ~logs.isnan()
    num = is_known.sum()
    index = torch.arange(len(logs), device=logs.device, dtype=logs.dtype)
    x = torch.where(is_known, index - torch.where(is_known, index, 0).sum() / num, 0)
    y = torch.where(is_known, logs - torch.where(is_known, logs, 0).sum() / num, 0)
    products, x_squares, y_squares = (x * y).sum(), (x * x).sum(), (y * y).sum()
    slope = torch.where(num >= 4, products / x_squares, torch.nan)
    # Norms that are all alike are explained by no slope.
    r_squared = torch.where(y_squares > 0, products.square() / (x_squares * y_squares), 0)
    return DepthFit(slope, torch.where(num >= 4, r_squared, torch.nan), math.log(2) / slope.abs())


def deep_to_shallow(logs: Tensor) -> Tensor:
    """How much larger or smaller the norms of the deep blocks are than those of the shallow ones, at every step.

    Args:
        logs: ln norm by step and block, shape (steps, blocks); NaN where there is none.

    Returns:
        ln of the geometric mean over the last quarter of the blocks (rounded up) over that of the first two, shape
        (steps,); NaN where either has no norm, and for fewer than four blocks.

    Example:
        >>> deep_to_shallow(torch.tensor([[1.0, 1.0, 0.0, -2.0]]))
        tensor([-3.])
    """
    num_blocks = logs.shape[1]
    if num_blocks < 4:
        return logs.new_full((len(logs),), torch.nan)
    num_deep = (num_blocks + 3) // 4
    return logs[:, -num_deep:].nanmean(1) - logs[:, :2].nanmean(1)
