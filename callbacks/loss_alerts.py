"""LossAlerts: watches the losses of a callback's optimizers, and does what is to be done at an alarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer.callbacks.alarm_actions import AlarmAction
from stabilizer.callbacks.alerts import Alerts
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.loss_alarms import LossAlarm
from stabilizer.callbacks.loss_watch import LossWatch
from stabilizer.losses import StepLoss

__all__ = ["LossAlerts"]

# What the detectors need at least.
_MIN_SHORT_WINDOW, _MIN_WARMUP = 20, 50


class LossAlerts(Alerts[LossAlarm]):
    """One callback's alarms.

    Args:
        on_alarm: See `AlarmActions`.
        windows: Of the callback, ascending; the detectors take the first and the last, if they are long enough.
        warmup_steps: Of the callback.
        **options: See `LossWatch`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, on_alarm: Sequence[AlarmAction], *, windows: Sequence[int], warmup_steps: int, **options: Any
    ) -> None:
        super().__init__(on_alarm)
        short = max(_MIN_SHORT_WINDOW, windows[0])
        self._options = {
            "window": max(2 * short, windows[-1]),
            "short_window": short,
            "warmup_steps": max(_MIN_WARMUP, warmup_steps),
            **options,
        }
        self._watches: dict[int, LossWatch] = {}
        self._new_watch()  # a bad argument is an error here

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
        self.tell(self._watches[index].take(context, loss, knows_rank=knows_rank), context, owner=owner)

    def end_run(self, context: StepContext, *, owner: StabilizerCallback) -> None:
        """Tell of alarms in the last steps, whose losses were on their way; there is nothing else to do about them.

        Args:
            context: Of the last step.
            owner: The callback.
        """
        watch = self._watches.get(context.optimizer_index)
        if watch is None:
            return
        self.tell(watch.settle(), context, owner=owner, is_end=True)
        for kind, (num, step) in watch.take_untold().items():
            if kind != "nonfinite" or "log" not in self.actions.names:  # else each such step is counted as it is read
                owner.console.count(LossAlarm.title_of(kind), step=step, num=num)

    def state_dict(self) -> dict[str, Any]:
        """What the next alarms depend on, plain types."""
        watches = {str(index): watch.state_dict() for index, watch in self._watches.items()}
        return {"watches": watches, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: Of `state_dict`; empty for one that was saved without alarms.
        """
        self._watches = {int(index): self._new_watch() for index in state.get("watches", {})}
        for index, watch in self._watches.items():
            watch.load_state_dict(state["watches"][str(index)])
        super().load_state_dict(state)

    def _new_watch(self) -> LossWatch:
        return LossWatch(acts=self.actions.is_common, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_saved": self.state_dict(), "_watches": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.load_state_dict(self.__dict__.pop("_saved"))
