"""Loss alarms as they are in use elsewhere, with their faults: what the detectors of the package are compared with.

Small versions, after their descriptions. Each takes one loss after the other and says whether it is an alarm.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["FirstMaximum", "MeanAndSigmas", "PageHinkley", "WindowMean"]


class MeanAndSigmas:
    """Over the mean of the last losses by so many of their standard deviations; every loss enters.

    Args:
        window: Losses.
        num_sigmas: Standard deviations.

    Example:
        >>> rule = MeanAndSigmas(window=4, num_sigmas=2.0)
        >>> [rule.update(step, loss) for step, loss in enumerate([1.0, 2.0, 1.0, 2.0, 9.0, 9.0])]
        [[], [], [], [], ['alarm'], []]
    """

    def __init__(self, *, window: int = 128, num_sigmas: float = 6.0) -> None:
        self.last: deque[float] = deque(maxlen=window)
        self.num_sigmas = num_sigmas
        # Sums of deviations from the first loss: it is close enough to the others for the squares to keep their digits.
        self.origin = self.total = self.squares = 0.0

    def update(self, step: int, value: float) -> list[str]:
        """Take the next loss.

        Args:
            step: Of the loss.
            value: The loss.
        """
        size, found = len(self.last), []
        if size == self.last.maxlen:
            mean = self.total / size
            std = math.sqrt(max(self.squares / size - mean * mean, 0.0) * size / (size - 1))
            found = ["alarm"] if value - self.origin > mean + self.num_sigmas * std else []
            self.total -= self.last[0]
            self.squares -= self.last[0] ** 2
        elif not size:
            self.origin = value
        self.last.append(value - self.origin)
        self.total += self.last[-1]
        self.squares += self.last[-1] ** 2
        return found


class WindowMean:
    """Over a multiple of the last losses' mean, several times in a row.

    Args:
        window: Losses.
        ratio: To their mean.
        patience: Times.

    Example:
        >>> rule = WindowMean(window=3, patience=2)
        >>> [rule.update(step, loss) for step, loss in enumerate([1.0, 1.0, 1.0, 9.0, 99.0])]
        [[], [], [], [], ['alarm']]
    """

    def __init__(self, *, window: int = 100, ratio: float = 2.0, patience: int = 5) -> None:
        self.last: deque[float] = deque(maxlen=window)
        self.ratio, self.patience, self.in_row, self.total = ratio, patience, 0, 0.0

    def update(self, step: int, value: float) -> list[str]:
        """Take the next loss.

        Args:
            step: Of the loss.
            value: The loss.
        """
        size = len(self.last)
        is_over = size == self.last.maxlen and value > self.ratio * self.total / size
        self.in_row = self.in_row + 1 if is_over else 0
        if size == self.last.maxlen:
            self.total -= self.last[0]
        self.last.append(value)
        self.total += value
        return ["alarm"] if self.in_row >= self.patience else []


class FirstMaximum:
    """Over a multiple of the largest of the first losses.

    Args:
        num_first: Losses.
        ratio: To the largest.

    Example:
        >>> rule = FirstMaximum(num_first=2)
        >>> [rule.update(step, loss) for step, loss in enumerate([1.0, 2.0, 20.0, 21.0])]
        [[], [], [], ['alarm']]
    """

    def __init__(self, *, num_first: int = 100, ratio: float = 10.0) -> None:
        self.num_left, self.ratio, self.largest = num_first, ratio, -math.inf

    def update(self, step: int, value: float) -> list[str]:
        """Take the next loss.

        Args:
            step: Of the loss.
            value: The loss.
        """
        if self.num_left:
            self.num_left -= 1
            self.largest = max(self.largest, value)
            return []
        return ["alarm"] if value > self.ratio * self.largest else []


class PageHinkley:
    """The cumulative sum of what losses are above their own mean, less a slack, over its smallest value so far.

    Page, "Continuous inspection schemes" (1954); Hinkley, "Inference about the change-point from cumulative sum tests"
    (1971). In standard deviations of the first 100 losses: it needs to be told a scale. Starts anew after an alarm.

    Args:
        slack: Standard deviations a step.
        threshold: Standard deviations.
        num_first: Losses that scale and mean start from.

    Example:
        >>> rule = PageHinkley(num_first=4, threshold=3.0)
        >>> [rule.update(step, loss) for step, loss in enumerate([1.0, 2.0, 1.0, 2.0, 5.0])]
        [[], [], [], [], ['alarm']]
    """

    def __init__(self, *, slack: float = 0.5, threshold: float = 12.0, num_first: int = 100) -> None:
        self.slack, self.threshold, self.num_first = slack, threshold, num_first
        self.first: list[float] = []
        self.num, self.mean, self.std, self.sum, self.smallest = 0, 0.0, math.nan, 0.0, 0.0

    def update(self, step: int, value: float) -> list[str]:
        """Take the next loss.

        Args:
            step: Of the loss.
            value: The loss.
        """
        if len(self.first) < self.num_first:
            self.first.append(value)
            if len(self.first) == self.num_first:
                self.num, self.mean = self.num_first, sum(self.first) / self.num_first
                squares = sum((loss - self.mean) ** 2 for loss in self.first)
                self.std = math.sqrt(squares / (self.num_first - 1))
            return []
        self.num += 1
        self.mean += (value - self.mean) / self.num
        self.sum += (value - self.mean) / self.std - self.slack
        self.smallest = min(self.smallest, self.sum)
        if self.sum - self.smallest > self.threshold:
            self.sum = self.smallest = 0.0
            self.num, self.mean = 1, value
            return ["alarm"]
        return []
