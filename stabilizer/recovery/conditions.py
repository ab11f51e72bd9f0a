"""Conditions under which a run is in trouble: plain numbers in, the same answer on every rank and after a resume."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

__all__ = ["LossCondition", "NonfiniteCondition", "Trouble"]

# A normal variable's standard deviation over the distance of its quartiles. The median absolute deviation would do as
# well, but is zero for losses that alternate between two values.
_QUARTILES_TO_SIGMA = 0.7413011092528010
# Of the median: losses that do not scatter at all must not make a spike of rounding.
_SMALLEST_SIGMA = 0.01
# Losses before there is a limit.
_WARMUP = 20
# Losses under the limit, one after the other, that end a spike: one may be luck.
_NUM_BACK = 3


@dataclasses.dataclass(frozen=True)
class Trouble:
    """A condition that holds.

    Attributes:
        condition: Its name.
        step: At which it was seen.
        first_step: The first bad step: parameters before its update are not suspected.
        text: What has been seen.
    """

    condition: str
    step: int
    first_step: int
    text: str


class NonfiniteCondition:
    """Holds when `num` of the last `window` steps had a loss or a gradient that is not finite.

    Args:
        num: Of them.
        window: Steps.

    Example:
        >>> condition = NonfiniteCondition(num=2, window=10)
        >>> [found.first_step for step in range(9) if (found := condition.update(step, is_bad=step in (3, 5)))]
        [3]
    """

    def __init__(self, *, num: int, window: int) -> None:
        self.num, self.window = num, window
        self._bad: list[int] = []

    @property
    def first_bad(self) -> int | None:
        """The first bad step that counts at the moment."""
        return self._bad[0] if self._bad else None

    def update(self, step: int, *, is_bad: bool) -> Trouble | None:
        """Take a step.

        Args:
            step: Its number; later calls have larger ones.
            is_bad: Whether its loss or its gradient was not finite.

        Returns:
            What holds; the count begins anew then.
        """
        self._bad = [bad for bad in self._bad if bad > step - self.window]
        if not is_bad:
            return None
        self._bad.append(step)
        if len(self._bad) < self.num:
            return None
        bad, self._bad = self._bad, []
        text = f"{len(bad)} of the last {self.window} steps were not finite, the first of them step {bad[0]}"
        return Trouble("nonfinite", step, bad[0], text)

    def clear(self) -> None:
        """Forget what was counted."""
        self._bad = []

    def state_dict(self) -> dict[str, Any]:
        """What the next answers depend on."""
        return {"bad": list(self._bad)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`.
        """
        self._bad = [int(step) for step in state["bad"]]


class LossCondition:
    """Holds when the loss has stayed over its window for `num_steps` steps after a spike.

    The limit is median + k sigma of the last `window` losses before the spike, sigma from the distance of their
    quartiles, so that single losses do not widen it. From the first loss over the limit on the window stands still;
    three losses in a row under it end the spike. What is not finite counts as over it and enters no window.

    Args:
        k: Sigmas.
        num_steps: Losses over the limit.
        window: Losses that say what is usual.

    Example:
        >>> condition = LossCondition(k=4.0, num_steps=2, window=100)
        >>> losses = [2.0, 2.1] * 20 + [9.0, 9.0]
        >>> found = [condition.update(step, loss) for step, loss in enumerate(losses)]
        >>> found[-1].first_step, round(condition.limit, 3)
        (39, 2.347)
    """

    def __init__(self, *, k: float, num_steps: int, window: int) -> None:
        self.k, self.num_steps = k, num_steps
        self._usual: deque[float] = deque(maxlen=window)
        self._steps: deque[int] = deque(maxlen=window)
        self._limit: float | None = None  # of the window as it is
        self._num_over = 0
        self._over: deque[float] = deque(maxlen=max(num_steps, _WARMUP))  # those that are finite
        self._back: list[tuple[int, float]] = []
        self._first: int | None = None  # the first bad step of the spike at hand

    @property
    def limit(self) -> float:
        """What a loss is held against; infinity before there are enough of them."""
        if len(self._usual) < min(_WARMUP, self._usual.maxlen or _WARMUP):
            return math.inf
        if self._limit is None:
            median, sigma = self._scale()
            self._limit = median + self.k * sigma
        return self._limit

    @property
    def first_bad(self) -> int | None:
        """The first bad step of the spike at hand."""
        return self._first

    def update(self, step: int, loss: float) -> Trouble | None:
        """Take the loss of a step.

        Args:
            step: Its number; later calls have larger ones.
            loss: Mean over all ranks.

        Returns:
            What holds; the count begins anew then, the first bad step stays until the spike is over.
        """
        if not math.isfinite(loss) and math.isinf(self.limit):
            return None
        if not loss <= self.limit:
            return self._take_over(step, loss)
        if self._first is None:
            self._push(step, loss)
            return None
        self._back.append((step, loss))
        if len(self._back) >= _NUM_BACK:
            back = self._back
            self.clear()
            for one in back:
                self._push(*one)
        return None

    def accept(self) -> None:
        """Take the level of the spike at hand for what is usual from now on: nobody can do more about it."""
        if self._over:
            self._usual = deque(self._over, maxlen=self._usual.maxlen)
            self._steps = deque([-1] * len(self._usual), maxlen=self._usual.maxlen)
            self._limit = None
        self.clear()

    def clear(self) -> None:
        """Forget the spike at hand; what is usual stays."""
        self._over.clear()
        self._num_over, self._back, self._first = 0, [], None

    def state_dict(self) -> dict[str, Any]:
        """What the next answers depend on: plain numbers."""
        return {
            "usual": list(self._usual),
            "steps": list(self._steps),
            "num_over": self._num_over,
            "over": list(self._over),
            "back": [list(one) for one in self._back],
            "first": self._first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved; a window of another length takes as much as it holds.

        Args:
            state: Of `state_dict`.
        """
        self._usual = deque((float(value) for value in state["usual"]), maxlen=self._usual.maxlen)
        self._steps = deque((int(step) for step in state["steps"]), maxlen=self._steps.maxlen)
        self._num_over = int(state["num_over"])
        self._over = deque((float(value) for value in state["over"]), maxlen=self._over.maxlen)
        self._back = [(int(step), float(value)) for step, value in state["back"]]
        self._first = None if state["first"] is None else int(state["first"])
        self._limit = None

    def _take_over(self, step: int, loss: float) -> Trouble | None:
        if self._first is None:
            self._first = self._begin(step)
        self._back = []
        self._num_over += 1
        if math.isfinite(loss):
            self._over.append(loss)
        if self._num_over < self.num_steps:
            return None
        self._num_over = 0
        median, sigma = self._scale()
        text = (
            f"the loss has been over {self.limit:.4g} (median {median:.4g} + {self.k:g} x {sigma:.3g}) for "
            f"{self.num_steps} steps, {loss:.4g} at step {step}; it left its window at step {self._first}"
        )
        return Trouble("loss", step, self._first, text)

    def _begin(self, step: int) -> int:
        """The first bad step of a spike that shows at a step: the loss is that of the updates before it."""
        median, sigma = self._scale()
        first = step
        # A loss that has begun to climb before it was over the limit is part of it.
        for before, value in zip(reversed(self._steps), reversed(self._usual), strict=True):
            if before != first - 1 or value <= median + self.k / 2 * sigma:
                break
            first = before
        return max(first - 1, 0)

    def _push(self, step: int, loss: float) -> None:
        self._usual.append(loss)
        self._steps.append(step)
        self._limit = None

    def _scale(self) -> tuple[float, float]:
        low, median, high = statistics.quantiles(self._usual, n=4, method="inclusive")
        return median, max(_QUARTILES_TO_SIGMA * (high - low), _SMALLEST_SIGMA * abs(median), 1e-12)
