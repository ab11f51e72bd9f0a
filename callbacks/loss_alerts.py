"""LossAlerts: watches the losses of a callback's optimizers, and does what is to be done at an alarm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer import tags
from stabilizer.callbacks.alarm_actions import AlarmAction, AlarmActions
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.loss_alarms import LossAlarm
from stabilizer.callbacks.loss_watch import LossWatch
from stabilizer.losses import StepLoss

__all__ = ["LossAlerts"]

# What the detectors need at least.
_MIN_SHORT_WINDOW, _MIN_WARMUP = 20, 50


class LossAlerts:
    """One callback's alarms.

    Args:
        on_alarm: See `AlarmActions`.
        windows: Of the callback, ascending; the detectors take the first and the last, if they are long enough.
        warmup_steps: Of the callback.
        **options: See `LossWatch`.

    Attributes:
        actions: What is done.
        alarms: The last of them.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, on_alarm: Sequence[AlarmAction], *, windows: Sequence[int], warmup_steps: int, **options: Any
    ) -> None:
        self.actions = AlarmActions(on_alarm)
        self.alarms: deque[LossAlarm] = deque(maxlen=100)
        short = max(_MIN_SHORT_WINDOW, windows[0])
        self._options = {
            "window": max(2 * short, windows[-1]),
            "short_window": short,
            "warmup_steps": max(_MIN_WARMUP, warmup_steps),
            **options,
        }
        self._watches: dict[int, LossWatch] = {}
        self._lowered: dict[int, tuple[float, int]] = {}  # factor, and the first step without it
        self._new_watch()  # a bad argument is an error here

    def begin_step(self, context: StepContext) -> None:
        """Lower the learning rates while that lasts.

        Args:
            context: Of a step whose gradients are complete.
        """
        factor, end = self._lowered.get(context.optimizer_index, (1.0, 0))
        if context.step < end and "lower_lr" in self.actions.names:
            context.plan.scale_lr(factor)

    def end_step(self, context: StepContext, loss: StepLoss, *, owner: StabilizerCallback) -> None:
        """Look at the losses that have come, and act.

        Args:
            context: Of a step that is done.
            loss: Of the step.
            owner: The callback.
        """
        index = context.optimizer_index
        if not self.actions.names:
            return
        if index not in self._watches:
            self._watches[index] = self._new_watch()
        # Those of other steps' extremes are of all steps since the last ones.
        knows_rank = owner.extremes_every_n_steps == 1
        for alarm in self._watches[index].take(context, loss, knows_rank=knows_rank):
            lowered = self._tell(alarm, context, owner=owner)
            if lowered is not None:
                factor, num_steps = lowered
                self._lowered[index] = (factor, context.step + 1 + num_steps)

    def end_run(self, context: StepContext, *, owner: StabilizerCallback) -> None:
        """Tell of alarms in the last steps, whose losses were on their way; there is nothing else to do about them.

        Args:
            context: Of the last step.
            owner: The callback.
        """
        watch = self._watches.get(context.optimizer_index)
        for alarm in [] if watch is None else watch.settle():
            self._tell(alarm, context, owner=owner, is_end=True)

    def _tell(
        self, alarm: LossAlarm, context: StepContext, *, owner: StabilizerCallback, is_end: bool = False
    ) -> tuple[float, int] | None:
        self.alarms.append(alarm)
        context.log(f"{tags.ALARM}/{alarm.kind}", alarm.score if math.isfinite(alarm.score) else 1.0)
        return self.actions.run(alarm, owner, context, is_end=is_end)

    def state_dict(self) -> dict[str, Any]:
        """What the next alarms depend on, plain types."""
        return {
            "watches": {str(index): watch.state_dict() for index, watch in self._watches.items()},
            "lowered": {str(index): list(lowered) for index, lowered in self._lowered.items()},
            "num_saves": self.actions.num_saves,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: Of `state_dict`; empty for one that was saved without alarms.
        """
        self._watches = {int(index): self._new_watch() for index in state.get("watches", {})}
        for index, watch in self._watches.items():
            watch.load_state_dict(state["watches"][str(index)])
        lowered = state.get("lowered", {})
        self._lowered = {int(index): (float(factor), int(end)) for index, (factor, end) in lowered.items()}
        self.actions.num_saves = int(state.get("num_saves", 0))

    def _new_watch(self) -> LossWatch:
        return LossWatch(acts=self.actions.is_common, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_saved": self.state_dict(), "_watches": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.load_state_dict(self.__dict__.pop("_saved"))
