"""The three rules: a loss that jumps, one that drifts upwards, and losses that scatter more than before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from stabilizer.detectors.detection import Detection, Scene
from stabilizer.detectors.sliding import SortedWindow, middle_mean
from stabilizer.detectors.tail import TailRecord

__all__ = ["DriftRule", "JumpRule", "VarianceRule"]

# Up to how many times its limit a single step may be the noise's own.
_DOUBTFUL = 1.5
# Steps between two looks at the tail.
_CALIBRATE_EVERY = 100
# Sigmas that four of five steps are held against, two in a row, and how often a step of a healthy run exceeds them.
_FOUR_OF_FIVE, _FOUR_OF_FIVE_SHARE = 2.5, 0.05
_TWO_IN_A_ROW, _TWO_IN_A_ROW_SHARE = 2.75, 0.003
# Of few scores the tail cannot be told: so many sigmas over their number are added to the lowest limit, and the largest
# grows from 10 by one in 8 scores. 100 scores give a limit within 8 and 22.
_CAUTION, _FIRST_LARGEST, _GROW_EVERY = 400.0, 10.0, 8.0
# Scores that a record which starts anew begins with, and after how many calms without one it does.
_MEMORY = 256
_MAX_CALMS = 4
# Losses between two looks at the variance.
_LOOK_EVERY = 5
# Sigmas beyond which a step says no more of a drift.
_MAX_INCREMENT = 3.0


class JumpRule:
    """A loss far above the last ones, at once: one step, two in a row, or four of five.

    With z the sigmas above the centre, a step is found where z is over the limit of one step, or where this and the
    last one are over that of two, or this and three of the four before over that of four. The limits follow the tail of
    the run's own z: that of one step is exceeded by `target` of 10,000 steps, that of two by 0.3 % of all steps (two in
    a row: 0.1 of 10,000), that of four by 5 %; each has a smallest value, which is the one for normal noise. While
    there are few z (less than 240), the limit of one step stays between 4 + 400 / n and 10 + n / 8 of them.

    What is found does not enter the record of the tail: spikes, however many, do not hide the next one. It does if it
    is no more than 1.5 times the limit, and the first in `calm_steps`, and so may be the noise's own. Only where
    detections have come within `calm_steps` of each other for four times as long are they no longer out of the
    ordinary: the record starts anew from the last 256 z, whatever they are.

    Args:
        target: Steps of 10,000 healthy ones that may exceed the limit of one step.
        limits: Smallest and largest limit of one step, in sigmas.
        calm_steps: Steps without a detection that end a storm of them.
        accept_after: Steps of a lasting jump after which it is accepted.
    """

    def __init__(self, *, target: float, limits: tuple[float, float], calm_steps: int, accept_after: int) -> None:
        self.target, self.limits = target, limits
        self.calm_steps, self.accept_after = calm_steps, accept_after
        self._tail = TailRecord()
        # Limits of one step, of two and of four.
        self._limits = [limits[1], _TWO_IN_A_ROW, _FOUR_OF_FIVE]
        self._last: deque[tuple[int, float]] = deque(maxlen=5)
        self._recent: deque[float] = deque(maxlen=_MEMORY)
        # Steps since the last detection; in a row up to now: without that many; elevated; all of them.
        self._calm, self._num_restless, self._num_elevated, self._num_scored = calm_steps, 0, 0, 0
        #: Whether four of the last five steps are over the limit of four; each step says it anew.
        self.is_lasting = False

    @property
    def is_accepted(self) -> bool:
        """Whether the jump has lasted for so long that it is where the loss is now."""
        return self._num_elevated >= self.accept_after

    def is_outlier(self, z: float) -> bool:
        """Whether a step is over the limit of one step.

        Args:
            z: Sigmas above the centre.
        """
        return z > self._limits[0]

    def judge(self, scene: Scene, z: float) -> Detection | None:
        """Take a step, and say what is wrong with it.

        Args:
            scene: The step.
            z: Its sigmas above the centre.

        Returns:
            The first of the three that holds; None if none does.
        """
        self._last.append((scene.step, z))
        one, two, four = self._limits
        self._num_elevated = self._num_elevated + 1 if z > four else max(self._num_elevated - 2, 0)
        elevated = [entry for entry in self._last if entry[1] > four]
        self.is_lasting = len(elevated) >= 4
        if z > one:
            return scene.detection("jump", score=z, limit=one, first_step=scene.step)
        if z > two and len(self._last) > 1 and self._last[-2][1] > two:
            first_step, before = self._last[-2]
            return scene.detection("jump", score=min(z, before), limit=two, first_step=first_step)
        if self.is_lasting and z > four:
            score = sorted(z for _, z in elevated)[-4]
            return scene.detection("jump", score=score, limit=four, first_step=elevated[0][0])
        return None

    def learn(self, z: float, *, is_found: bool) -> None:
        """Let the limits follow a step that has been judged.

        Args:
            z: Sigmas above where losses usually are.
            is_found: Whether `judge` has found something.
        """
        self._recent.append(z)
        is_calm = self._calm >= self.calm_steps
        if not is_found or (is_calm and z <= _DOUBTFUL * self._limits[0]):
            self._tail.add(z)
        if is_calm:
            self._num_restless = 0
        self._calm = 0 if is_found else self._calm + 1
        self._num_restless += 1
        self._num_scored += 1
        if self._num_restless > _MAX_CALMS * self.calm_steps:
            self._tail.restart(self._recent)
            self._num_restless = 0
        elif self._num_scored % _CALIBRATE_EVERY:
            return
        self.calibrate()

    def calibrate(self) -> None:
        """Take the limits from the tail."""
        tail, (low, high) = self._tail, self.limits
        if not tail.total:
            return
        one = min(tail.quantile(self.target / 1e4), _FIRST_LARGEST + tail.total / _GROW_EVERY)
        one = min(max(one, low + _CAUTION / tail.total), high)
        two = max(tail.quantile(_TWO_IN_A_ROW_SHARE), _TWO_IN_A_ROW)
        four = max(tail.quantile(_FOUR_OF_FIVE_SHARE), _FOUR_OF_FIVE)
        self._limits = [one, min(two, one), min(four, one)]

    def accept(self) -> None:
        """Forget the steps so far: the loss is somewhere else now."""
        self._last.clear()
        self._num_elevated, self.is_lasting = 0, False

    def state(self) -> dict[str, Any]:
        """What `load` takes: plain numbers."""
        return {
            "tail": self._tail.state(),
            "limits": list(self._limits),
            "last": [list(entry) for entry in self._last],
            "recent": list(self._recent),
            "numbers": [self._calm, self._num_restless, self._num_elevated, self._num_scored],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a state back.

        Args:
            state: Of `state`.
        """
        self._tail.load(state["tail"])
        self._limits = list(state["limits"])
        self._last = deque(((step, z) for step, z in state["last"]), maxlen=5)
        self._recent = deque(state["recent"], maxlen=_MEMORY)
        self._calm, self._num_restless, self._num_elevated, self._num_scored = state["numbers"]


class DriftRule:
    """A loss that goes up and up, or stays a little higher for long: a one-sided cumulative sum.

    S = max(0, S + z - slack), with z the sigmas above where the loss was a while ago, within -3 and 3 so that no
    outlier does it alone: Page, "Continuous inspection schemes" (1954). A drift is found where S is over the limit.

    Args:
        slack: Sigmas a step that are no drift.
        limit: Sigmas that the sum is held against.
    """

    def __init__(self, *, slack: float, limit: float) -> None:
        self.slack, self.limit = slack, limit
        self._sum, self._first_step = 0.0, 0

    def judge(self, scene: Scene) -> Detection | None:
        """Take a step, and say whether the loss drifts.

        Args:
            scene: The step.
        """
        z = (scene.value - scene.reference) / scene.sigma
        increment = min(max(z, -_MAX_INCREMENT), _MAX_INCREMENT) - self.slack
        if self._sum == 0:
            self._first_step = scene.step
        self._sum = max(0.0, self._sum + increment)
        if self._sum <= self.limit:
            return None
        return scene.detection("drift", score=self._sum, limit=self.limit, first_step=self._first_step)

    def accept(self) -> None:
        """Start anew: the loss is somewhere else now, or it is a jump."""
        self._sum = 0.0

    def state(self) -> list[float]:
        """What `load` takes: plain numbers."""
        return [self._sum, self._first_step]

    def load(self, state: list[Any]) -> None:
        """Take a state back.

        Args:
            state: Of `state`.
        """
        self._sum, self._first_step = float(state[0]), int(state[1])


class VarianceRule:
    """Losses that scatter more than they did: the variance of a short window over that of a long one.

    Each variance is the square of the mean of the middle half of |x_t - x_(t-1)|: the differences of successive losses
    (von Neumann, "Distribution of the ratio of the mean square successive difference to the variance", 1941) do not
    see where the loss is, nor whether it falls, and the middle half of them sees no outlier.

    Args:
        window: Differences in the long window.
        short_window: In the short one.
        limit: Ratio of the variances.
        accept_after: Steps over the limit after which this is how losses scatter now.
    """

    def __init__(self, *, window: int, short_window: int, limit: float, accept_after: int) -> None:
        self.window, self.short_window = window, short_window
        self.limit, self.accept_after = limit, accept_after
        self._long, self._short = SortedWindow(window), SortedWindow(short_window)
        self._last_value: float | None = None
        self._first_step, self._num_over, self._num_pushed = 0, 0, 0

    @property
    def is_accepted(self) -> bool:
        """Whether the losses have scattered more for so long that this is how they scatter now."""
        return self._num_over >= self.accept_after

    def push(self, value: float, *, is_outlier: bool) -> None:
        """Take a loss.

        Args:
            value: The loss.
            is_outlier: Whether it is over its limit: then neither difference with it counts.
        """
        if self._last_value is not None and not is_outlier:
            difference = abs(value - self._last_value)
            self._long.push(difference)
            self._short.push(difference)
        self._last_value = None if is_outlier else value
        self._num_pushed += 1

    def judge(self, scene: Scene) -> Detection | None:
        """Say whether the losses so far scatter more than before; looks at every fifth loss.

        Args:
            scene: The step, whose loss has been pushed.
        """
        if self._num_pushed % _LOOK_EVERY or len(self._short) < self.short_window:
            return None
        # Less is not known of a loss that was rounded.
        usual = max(middle_mean(self._long.ordered), 0.1 * scene.sigma)
        ratio = (middle_mean(self._short.ordered) / usual) ** 2
        if ratio <= self.limit:
            self._num_over = 0
            return None
        if self._num_over == 0:
            self._first_step = scene.step
        self._num_over += _LOOK_EVERY
        return scene.detection("variance", score=ratio, limit=self.limit, first_step=self._first_step)

    def accept(self) -> None:
        """Let the long window be the short one."""
        self._long = SortedWindow(self.window, self._short.arrived)
        self._num_over = 0

    def state(self) -> dict[str, Any]:
        """What `load` takes: plain numbers."""
        return {
            "differences": list(self._long.arrived),
            "last_value": self._last_value,
            "numbers": [self._first_step, self._num_over, self._num_pushed],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a state back, as much of it as the windows hold.

        Args:
            state: Of `state`.
        """
        self._long = SortedWindow(self.window, state["differences"])
        self._short = SortedWindow(self.short_window, self._long.arrived)
        self._last_value = state["last_value"]
        self._first_step, self._num_over, self._num_pushed = state["numbers"]
