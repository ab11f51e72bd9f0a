"""The last values of a series in the order of their size: medians, spreads and middle means without sorting anew."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

__all__ = ["SortedWindow", "median", "middle_mean", "spread"]

# Share of the deviations, and what it is of a normal distribution with a standard deviation of 1.
_QUANTILES = ((0.5, 0.674490), (0.75, 1.150349), (0.9, 1.644854))


class SortedWindow:
    """The last values, in the order of arrival and in that of their size.

    Args:
        size: How many it keeps.
        values: What it starts with, the oldest first; the last `size` of them stay.

    Example:
        >>> window = SortedWindow(3)
        >>> for value in (9.0, 1.0, 2.0, 0.0):
        ...     window.push(value)
        >>> window.ordered, list(window.arrived)
        ([0.0, 1.0, 2.0], [1.0, 2.0, 0.0])
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.arrived = deque(values, maxlen=size)
        self.ordered = sorted(self.arrived)

    def __len__(self) -> int:
        return len(self.ordered)

    def push(self, value: float) -> None:
        """Take a value; the oldest goes if there is no room.

        Args:
            value: A finite number.
        """
        arrived, ordered = self.arrived, self.ordered
        if len(arrived) == arrived.maxlen:
            del ordered[bisect_left(ordered, arrived[0])]
        arrived.append(value)
        insort(ordered, value)


def median(ordered: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle.

    Args:
        ordered: Values in the order of their size, at least one.

    Returns:
        In units of the values.

    Example:
        >>> median([1.0, 2.0, 4.0, 1e9])
        3.0
    """
    num = len(ordered)
    # Halved first: the sum of two huge values is infinite.
    return ordered[(num - 1) // 2] / 2 + ordered[num // 2] / 2


def spread(ordered: Sequence[float]) -> float:
    """What values scatter by: their median absolute deviation, as the standard deviation of a normal distribution.

    Hampel, "The influence curve and its role in robust estimation" (1974). If more than half of all values are the
    same (a loss that was rounded), the deviation that 75 % or 90 % of them stay under takes the median's place.

    Args:
        ordered: Values in the order of their size, at least one.

    Returns:
        In units of the values; 0 if 90 % of them are the same.

    Example:
        >>> round(spread([1.0, 2.0, 3.0, 4.0, 1e6]), 4)
        1.4826
    """
    centre = median(ordered)
    for share, normal in _QUANTILES:
        deviation = _deviation(ordered, centre, int(len(ordered) * share))
        if deviation > 0:
            return deviation / normal
    return 0.0


def middle_mean(ordered: Sequence[float]) -> float:
    """Mean of the middle half.

    Args:
        ordered: Values in the order of their size, at least one.

    Returns:
        In units of the values.

    Example:
        >>> middle_mean([0.0, 1.0, 2.0, 1e6])
        1.5
    """
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


def _deviation(ordered: Sequence[float], centre: float, rank: int) -> float:
    """The absolute deviation that `rank` others do not exceed.

    The values within it are neighbours: of all runs of rank + 1 neighbours, the one whose farther end is nearest.
    """
    low, high = 0, len(ordered) - 1 - rank
    # From left to right the left end comes nearer and the right end goes away: look for where they change places.
    while low < high:
        first = (low + high) // 2
        if centre - ordered[first] > ordered[first + rank] - centre:
            low = first + 1
        else:
            high = first
    best = max(centre - ordered[low], ordered[low + rank] - centre)
    if low > 0:
        best = min(best, max(centre - ordered[low - 1], ordered[low - 1 + rank] - centre))
    return best
