"""What alarms of every kind have in common: what is done about them, and learning rates that stay lowered."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from stabilizer import tags
from stabilizer.callbacks.alarm_actions import AlarmAction, AlarmActions
from stabilizer.callbacks.alarms import Alarm
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext

__all__ = ["Alerts"]

A = TypeVar("A", bound=Alarm)


class Alerts(Generic[A]):
    """One callback's alarms.

    Args:
        on_alarm: See `AlarmActions`.

    Attributes:
        actions: What is done.
        alarms: The last of them.

    Raises:
        ValueError: If an action is none.
    """

    def __init__(self, on_alarm: Sequence[AlarmAction]) -> None:
        self.actions = AlarmActions(on_alarm)
        self.alarms: deque[A] = deque(maxlen=100)
        self._lowered: dict[int, tuple[float, int]] = {}  # factor, and the first step without it

    def begin_step(self, context: StepContext) -> None:
        """Lower the learning rates while that lasts.

        Args:
            context: Of a step whose gradients are complete.
        """
        factor, end = self._lowered.get(context.optimizer_index, (1.0, 0))
        if context.step < end and "lower_lr" in self.actions.names:
            context.plan.scale_lr(factor)

    def tell(
        self, alarms: Iterable[A], context: StepContext, *, owner: StabilizerCallback, is_end: bool = False
    ) -> None:
        """Log alarms and act on them; on every rank.

        Args:
            alarms: In their order.
            context: Of the step at hand.
            owner: The callback.
            is_end: Whether there is nothing left but to tell.
        """
        for alarm in alarms:
            self.alarms.append(alarm)
            context.log(f"{tags.ALARM}/{alarm.kind}", alarm.score if math.isfinite(alarm.score) else 1.0)
            if "log" not in self.actions.names:  # else it is counted when it is told
                owner.console.count(alarm.title, step=alarm.step, num=getattr(alarm, "count", 1))
            lowered = self.actions.run(alarm, owner, context, is_end=is_end or alarm.is_warning)
            if lowered is not None:
                factor, num_steps = lowered
                self._lowered[context.optimizer_index] = (factor, context.step + 1 + num_steps)

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on, plain types."""
        return {
            "lowered": {str(index): list(lowered) for index, lowered in self._lowered.items()},
            "num_saves": self.actions.num_saves,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: Of `state_dict`; empty for one that was saved without alarms.
        """
        lowered = state.get("lowered", {})
        self._lowered = {int(index): (float(factor), int(end)) for index, (factor, end) in lowered.items()}
        self.actions.num_saves = int(state.get("num_saves", 0))
