"""Series of one number a step: whether it drifts over windows, and whether it still falls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stabilizer.health.statistics import median
from stabilizer.windows import Trend, WindowedStatistics, trend

__all__ = ["Drift", "drift", "last_trends", "window_masks"]


class Drift(NamedTuple):
    """Medians of windows that follow one another, oldest first, shape (windows,), and whether each is above the last.

    The medians are NaN for windows that are not full.
    """

    medians: Tensor
    is_rising: Tensor


def window_masks(series: WindowedStatistics, *, num_windows: int) -> Tensor:
    """Which values of a series are in which of its last windows.

    Args:
        series: Whose longest window is as long as all of these together.
        num_windows: How many there are, equally long.

    Returns:
        Bool, shape (num_windows, values), oldest window first; all False for a window that is not full.
    """
    size = series.windows[-1]
    length = size // num_windows
    slots = torch.arange(size, device=series.values.device)
    # 0 is the newest; a slot without a value yet is older than any.
    age = torch.where(slots < series.num_finite, (series.num_finite - 1 - slots) % size, size)
    last = torch.arange(num_windows, 0, -1, device=age.device).unsqueeze(1) * length
    masks = (age < last) & (age >= last - length)
    return masks & (masks.sum(1, keepdim=True) == length)


def drift(series: WindowedStatistics, *, num_windows: int) -> Drift:
    """Medians of the last windows of a series.

    Args:
        series: Whose longest window is as long as all of these together.
        num_windows: How many there are.

    Returns:
        Their medians, and whether they rise from each to the next.
    """
    masks = window_masks(series, num_windows=num_windows)
    medians = median(torch.where(masks, series.values[:-1], torch.nan).T)
    return Drift(medians, (medians.diff() > 0).all())


def last_trends(series: WindowedStatistics) -> Trend:
    """Slopes of a series over its last two windows, each half as long as its longest.

    Args:
        series: Of losses.

    Returns:
        Slope per step and standard error, oldest window first, shape (2,); NaN for a window that is not full.
    """
    return trend(series.values[:-1], steps=series.steps[:-1], mask=window_masks(series, num_windows=2))
