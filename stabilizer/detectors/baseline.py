"""What is usual for a loss: where it is, where it was a while ago, and what it scatters by."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stabilizer.detectors.sliding import SortedWindow, median, spread

__all__ = ["Baseline"]

# Values before the first centre, and the newest that a fast fall is followed by.
_NUM_NEWEST = 20
# Below this share of the loss nothing counts as a change: float32 has seven digits, and a mean over ranks fewer.
_SMALLEST_SIGMA = 1e-4


class Baseline:
    """Medians of the last losses, and the spread of what lies between them and each next loss.

    The centre is the median of the last `short_window` losses; where the loss falls so fast that the median of the last
    20 is more than one sigma below it, it is the latter. It is never below a falling loss: what falls cannot be taken
    for a jump, nor what stops falling. The reference is the median of the losses from `short_window` to three times
    that ago, or that of the whole window, whichever is lower. Sigma is the median absolute deviation of the last
    `window` residuals (a loss less the centre before it), outliers and all: a burst of 30 moves it by 5 %. The lag is
    how far losses usually are below the centre, because they fall: minus the median of the residuals.

    Args:
        window: Losses, and residuals, that are kept.
        short_window: Losses that the centre is the median of.
    """

    def __init__(self, *, window: int, short_window: int) -> None:
        self.window, self.short_window = window, short_window
        self._set_levels(())
        self._residuals = SortedWindow(window)

    @property
    def is_ready(self) -> bool:
        """Whether there is a centre and a sigma."""
        return len(self._residuals.ordered) >= _NUM_NEWEST

    def measure(self) -> tuple[float, float, float, float]:
        """What the next loss is judged by; only when it is ready.

        Returns:
            Centre, reference, sigma and lag, in units of the loss.
        """
        usual = centre = median(self._short.ordered)
        sigma = max(spread(self._residuals.ordered), _SMALLEST_SIGMA * abs(usual), 1e-30)
        newest = median(self._newest.ordered)
        if newest < usual - sigma:
            centre = newest
        reference = median(self._long.ordered)
        lagged = self._lagged.ordered
        if len(lagged) >= self.short_window:
            reference = min(reference, median(lagged))
        return centre, reference, sigma, max(-median(self._residuals.ordered), 0.0)

    def push(self, value: float, *, residual: float | None, is_outlier: bool) -> None:
        """Take a loss.

        Args:
            value: The loss; an outlier moves no centre.
            residual: The loss less the centre before it; None while there is none.
            is_outlier: Whether the loss is over its limit.
        """
        if residual is not None:
            self._residuals.push(residual)
        if is_outlier:
            return
        for levels in (self._newest, self._short, self._long):
            levels.push(value)
        if len(self._long.ordered) > self.short_window:
            self._lagged.push(self._long.arrived[-1 - self.short_window])

    def first_residual(self, value: float) -> float | None:
        """The residual of a loss before there is a sigma.

        Args:
            value: The loss.

        Returns:
            None while there are too few losses for a centre.
        """
        return value - median(self._short.ordered) if len(self._short) >= _NUM_NEWEST else None

    def restart(self, values: Sequence[float]) -> None:
        """Be where the last losses are; sigma stays what it was.

        Args:
            values: The last losses, all of which have been pushed.
        """
        self._set_levels(values)
        centre = median(sorted(values))
        # What these were against the old centre says how far the level has moved, not how much the loss scatters.
        kept = list(self._residuals.arrived)[: -len(values)]
        self._residuals = SortedWindow(self.window, kept + [value - centre for value in values])

    def forget_scatter(self) -> None:
        """Let sigma be that of the last `short_window` residuals."""
        self._residuals = SortedWindow(self.window, list(self._residuals.arrived)[-self.short_window :])

    def state(self) -> dict[str, list[float]]:
        """What `load` takes: plain numbers."""
        return {"levels": list(self._long.arrived), "residuals": list(self._residuals.arrived)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a state back, as much of it as the windows hold.

        Args:
            state: Of `state`.
        """
        self._set_levels(state["levels"])
        self._residuals = SortedWindow(self.window, state["residuals"])

    def _set_levels(self, values: Iterable[float]) -> None:
        levels = deque(values, maxlen=self.window)
        self._long = SortedWindow(self.window, levels)
        self._short = SortedWindow(self.short_window, levels)
        self._newest = SortedWindow(min(_NUM_NEWEST, self.short_window), levels)
        size = min(2 * self.short_window, self.window - self.short_window)
        self._lagged = SortedWindow(size, list(levels)[: -self.short_window])
