"""MismatchAlerts: figures of steps on their way to the host, held against limits there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from stabilizer.callbacks.alarm_actions import AlarmAction
from stabilizer.callbacks.alerts import Alerts
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.incoming import Arrived, Incoming
from stabilizer.callbacks.mismatch_alarms import MismatchAlarm, MismatchLimits, MismatchRow, Verdict
from stabilizer.errors import warn
from stabilizer.observations import StepObservations

__all__ = ["MismatchAlerts"]

# Steps that an accelerator has for a row to reach the host before anybody waits for it.
_LAG = 2
_NUM_RECENT = 10
# So many steps without an observation, and none before, are told.
_STEPS = 3
_FIELDS = {"k3": "k3", "ess": "ess", "max": "largest", "ln2": "share", "shift": "mean"}


class _Watch:
    """The rows of one optimizer.

    Args:
        limits: Of the callback.
        cooldown_steps: Of the callback.
    """

    def __init__(self, limits: MismatchLimits, *, cooldown_steps: int) -> None:
        self.incoming = Incoming[dict[str, int]]()
        self._limits, self._cooldown_steps = limits, cooldown_steps
        self._recent: deque[tuple[int, list[float]]] = deque(maxlen=_NUM_RECENT)
        # Kind -> step and severity when it was told, how often it was found since, and where the first of these was.
        self._told: dict[str, list[int]] = {}
        self._untold: dict[str, tuple[int, int]] = {}

    def take_untold(self) -> dict[str, tuple[int, int]]:
        """How many of each kind no alarm has told of since the last call, and at which step the last of them was."""
        untold, self._untold = self._untold, {}
        return untold

    def judge(self, arrived: Arrived[dict[str, int]]) -> list[MismatchAlarm]:
        """What is to be told of a step.

        Args:
            arrived: Its row.
        """
        row = MismatchRow(*arrived.numbers)
        if row.num_tokens:
            # Rows hold finite figures only.
            self._recent.append((arrived.step, list(row)))
        verdicts = self._limits.judge(row)
        return [alarm for one in verdicts for alarm in self._fold(one, row, arrived)]

    def state_dict(self) -> dict[str, Any]:
        """All that the next alarms depend on; waits for what is on its way, which is judged in its time."""
        pending = list(self.incoming.arrived(waits=True))
        self._put_back(pending)
        return {
            "told": {kind: list(told) for kind, told in self._told.items()},
            "recent": [[step, list(row)] for step, row in self._recent],
            "pending": [[one.step, list(one.numbers), dict(one.extra)] for one in pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`.
        """
        self.incoming.clear()
        self._told = {kind: list(told) for kind, told in state["told"].items()}
        self._recent.clear()
        self._recent.extend((int(step), list(row)) for step, row in state["recent"])
        self._put_back([Arrived(*one) for one in state["pending"]])

    def _put_back(self, pending: Sequence[Arrived[dict[str, int]]]) -> None:
        for one in pending:
            self.incoming.push(one.step, torch.tensor(one.numbers, dtype=torch.float64), one.extra)

    def _fold(self, found: Verdict, row: MismatchRow, arrived: Arrived[dict[str, int]]) -> Iterator[MismatchAlarm]:
        step, level = arrived.step, int(found.severity == "alarm")
        told_at, told_level, num, first_step = self._told.get(found.kind, [0, -1, 0, 0])
        # What gets worse is told at once. A run that went back to an older step has not been told of what comes now.
        if 0 <= step - told_at < self._cooldown_steps and level <= told_level:
            self._told[found.kind] = [told_at, told_level, num + 1, first_step if num else step]
            self._untold[found.kind] = (self._untold.get(found.kind, (0, 0))[0] + 1, step)
            return
        self._untold.pop(found.kind, None)
        self._told[found.kind] = [step, level, 0, 0]
        field = _FIELDS.get(found.kind)
        recent = [(when, float(getattr(MismatchRow(*values), field))) for when, values in self._recent] if field else []
        yield MismatchAlarm(
            f"rollout_{found.kind}",
            found.severity,
            step,
            found.value,
            found.limit,
            first_step=first_step if num else step,
            count=num + 1,
            num_tokens=int(row.num_tokens),
            is_old=row.behaviour_is_old > 0,
            recent=tuple(recent),
            **arrived.extra,
        )


class MismatchAlerts(Alerts[MismatchAlarm]):
    """One callback's alarms.

    Args:
        on_alarm: See `AlarmActions`.
        limits: What figures are held against.
        cooldown_steps: Steps between two alarms of one kind.
    """

    def __init__(self, on_alarm: Sequence[AlarmAction], *, limits: MismatchLimits, cooldown_steps: int) -> None:
        super().__init__(on_alarm)
        self._limits, self._cooldown_steps = limits, cooldown_steps
        self._watches: dict[int, _Watch] = {}
        self._num_missing = 0

    def end_step(self, context: StepContext, observed: StepObservations, *, owner: StabilizerCallback) -> None:
        """Send a step's figures on their way, look at those that have come, and act.

        Args:
            context: Of a step that is done.
            observed: Of the step.
            owner: The callback.
        """
        index, found = context.optimizer_index, observed.mismatch
        if index not in self._watches:
            self._watches[index] = _Watch(self._limits, cooldown_steps=self._cooldown_steps)
        position = context.position
        where = {"epoch": position.epoch, "batch_index": position.batch_index, "optimizer_index": index}
        figures = [
            observed.num_calls,
            found.num_tokens,
            found.num_sequences,
            found.num_nonfinite,
            observed.num_nonfinite,
            found.kl_k3,
            found.effective_sample_size,
            found.max_abs_log_ratio,
            found.share_beyond_factor_2,
            found.mean_log_ratio,
            found.std_log_ratio,
            observed.means["behaviour_is_old"],
        ]
        # A row is state: what was not observed is 0 in it, with no tokens.
        row = torch.stack(figures).nan_to_num(0.0)
        self._watches[index].incoming.push(context.step, row, where)
        lag = 0 if row.device.type == "cpu" else _LAG
        self._look(context, owner=owner, before=context.step - lag + 1 if self.actions.is_common else None)

    def end_run(self, context: StepContext, *, owner: StabilizerCallback) -> None:
        """Tell of the last steps; there is nothing else to do about them.

        Args:
            context: Of the last step.
            owner: The callback.
        """
        if context.optimizer_index in self._watches:
            self._look(context, owner=owner, before=None, waits=True)
            if self.actions.names:
                for kind, (num, step) in self._watches[context.optimizer_index].take_untold().items():
                    owner.console.count(MismatchAlarm.title_of(f"rollout_{kind}"), step=step, num=num)

    def forget_run(self) -> None:
        """A run is over: in the next one it is told again if nothing is observed."""
        self._num_missing = 0

    def _look(
        self, context: StepContext, *, owner: StabilizerCallback, before: int | None, waits: bool = False
    ) -> None:
        watch = self._watches[context.optimizer_index]
        for arrived in watch.incoming.arrived(before=before, waits=waits):
            self._count(arrived.numbers[0], owner=owner)
            alarms = watch.judge(arrived)
            if self.actions.names:
                self.tell(alarms, context, owner=owner, is_end=waits)

    def _count(self, num_calls: float, *, owner: StabilizerCallback) -> None:
        if num_calls or self._num_missing < 0:
            self._num_missing = -1  # something has come
            return
        self._num_missing += 1
        if self._num_missing == _STEPS:
            self._num_missing = -1
            warn(
                f"{owner.state_key}: nothing was observed in {_STEPS} steps. Call handle.observe(logp_train=..., "
                "logp_rollout=..., mask=...) before the optimizer step in a loop, or the callback's own observe() in "
                "training_step"
            )

    def state_dict(self) -> dict[str, Any]:
        """What the next alarms depend on, plain types."""
        return {
            "watches": {str(index): watch.state_dict() for index, watch in self._watches.items()},
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: Of `state_dict`.
        """
        super().load_state_dict(state)
        self._watches = {}
        for index, saved in state.get("watches", {}).items():
            self._watches[int(index)] = watch = _Watch(self._limits, cooldown_steps=self._cooldown_steps)
            watch.load_state_dict(saved)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_saved": self.state_dict(), "_watches": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.load_state_dict(self.__dict__.pop("_saved"))
