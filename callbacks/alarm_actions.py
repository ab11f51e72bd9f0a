"""What is done at an alarm: words and mappings that a configuration holds, and functions."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stabilizer import tags
from stabilizer.callbacks.alarms import Alarm
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.notices import alarm_notice, logged
from stabilizer.errors import StabilizerWarning, TrainingStoppedError, logger, warn
from stabilizer.markdown import note
from stabilizer.named_specs import named_spec, refuse_twice
from stabilizer.thresholds.arguments import check_number, check_whole, function_name, imported_function

__all__ = ["AlarmAction", "AlarmActions"]

#: A word, a mapping with `name` and its arguments, or a function of an `Alarm`.
AlarmAction: TypeAlias = (
    Literal["log", "record", "save_checkpoint", "localize", "lower_lr", "stop"]
    | dict[str, Any]
    | Callable[..., None]
    | str  # another word: `AlarmActions` says what is wrong with it, better than a parser of types does
)
# What is done about an alarm of a run that is over.
_AT_END = frozenset({"log", "record", "call"})

# Name -> arguments and their defaults. What comes later in this order is done later; functions come after "record".
_KNOWN: dict[str, dict[str, Any]] = {
    "log": {},
    "record": {"path": None},
    "call": {"function": None},
    "save_checkpoint": {"max_saves": 3},
    "localize": {},
    "lower_lr": {"factor": 0.5, "num_steps": 100},
    "stop": {},
}


class AlarmActions:
    """The actions of one callback, in the order in which they are done.

    Args:
        specs: As the user has written them.

    Attributes:
        specs: As plain types; a function by its name.
        num_saves: Checkpoints of this run so far.

    Raises:
        ValueError: If one is none that is known, or there twice, or an argument is out of range.

    Example:
        >>> actions = AlarmActions(["stop", {"name": "lower_lr", "factor": 0.1}, "log"])
        >>> actions.names, actions.is_common
        (['log', 'lower_lr', 'stop'], True)
    """

    def __init__(self, specs: Sequence[AlarmAction]) -> None:
        if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence):
            raise ValueError(f"on_alarm={specs!r}: expected a list of actions, such as ['log']; [] for none")
        parsed = [_checked(named_spec("on_alarm", spec, _KNOWN)) for spec in specs]
        refuse_twice("on_alarm", [action["name"] for action in parsed])
        order = list(_KNOWN)
        self._actions = sorted(parsed, key=lambda action: order.index(action["name"]))
        self.specs = [
            {**action, "function": function_name(action["function"])} if action["name"] == "call" else dict(action)
            for action in self._actions
        ]
        self.num_saves = 0
        self._saved_at: tuple[int, int] | None = None  # optimizer and step

    @property
    def names(self) -> list[str]:
        """What there is to do."""
        return [action["name"] for action in self._actions]

    @property
    def is_common(self) -> bool:
        """Whether ranks must do it at the same step."""
        return bool({"save_checkpoint", "localize", "lower_lr", "stop", "call"} & set(self.names))

    def missing(self, driver: Any, others: Sequence[StabilizerCallback]) -> list[str]:
        """What cannot be done in a run, with the way out.

        Args:
            driver: The host's.
            others: All callbacks of the run.
        """
        found = []
        if "save_checkpoint" in self.names and not getattr(driver, "can_save", True):
            found.append("save_checkpoint does nothing here: give attach(..., save_fn=) a function of a path")
        if "localize" in self.names and not any(other.localizes for other in others):
            found.append("localize does nothing here: there is no GradLocCallback in the run")
        return found

    def run(
        self, alarm: Alarm, callback: StabilizerCallback, context: StepContext, *, is_end: bool = False
    ) -> tuple[float, int] | None:
        """Do all of it; on every rank.

        Args:
            alarm: What has happened.
            callback: Whose actions these are.
            context: Of the step at hand, which may be a later one than the alarm's.
            is_end: Whether there is nothing left but to tell: the run is over, or it is a warning.

        Returns:
            By what the learning rates are to be multiplied from the next step on, and for how many steps.

        Raises:
            Exception: What an action has failed with, if the callback is strict; after all of them.
        """
        lowered, failure = None, None
        for action in self._actions:
            if is_end and action["name"] not in _AT_END:
                continue
            try:
                self._do(action, alarm, callback, context)
            except Exception as error:
                # A logger or a function fails on one rank, and the others go on to save: this one must come along.
                failure = failure or error
                name, key = action["name"], callback.state_key
                logger.exception("%s: on_alarm: %s failed at step %d; training goes on", key, name, context.step)
            if action["name"] == "lower_lr":
                lowered = action["factor"], action["num_steps"]
        if failure is not None and (callback.strict or isinstance(failure, StabilizerWarning)):
            raise failure
        return lowered

    def _do(self, action: Mapping[str, Any], alarm: Alarm, callback: StabilizerCallback, context: StepContext) -> None:
        name = action["name"]
        if name == "log":
            self._log(alarm, callback, context)
        elif name == "record" and context.is_logging:
            self._record(alarm, action["path"] or context.log_dir() / f"{alarm.subject}_alarms.jsonl")
        elif name == "call":
            action["function"](alarm)
        elif name == "save_checkpoint":
            at = alarm.optimizer_index, context.step
            context.defer(functools.partial(self._save, alarm, callback, at=at, max_saves=action["max_saves"]))
        elif name == "localize" and callback.driver is not None:
            for other in callback.driver.callbacks:
                other.request_search(alarm.optimizer_index)
        elif name == "stop":
            context.defer(functools.partial(_stop, alarm, callback))

    def _log(self, alarm: Alarm, callback: StabilizerCallback, context: StepContext) -> None:
        if alarm.kind != "nonfinite":  # that is told with the ranks, when they are known
            more = logged(context, f"{tags.ALARM}/{alarm.kind}")
            callback.console.tell(alarm_notice(alarm, callback.state_key, more=more))
        context.write_text(tags.ALARM_TEXT, note(f"{alarm.subject} alarm: {alarm.kind}", alarm.text))

    def _record(self, alarm: Alarm, path: str | Path) -> None:
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("a", encoding="utf-8") as file:
                file.write(alarm.to_json() + "\n")
        except OSError as error:
            warn(f"the {alarm.subject} alarm of step {alarm.step} could not be written to {target}: {error}")

    def _save(self, alarm: Alarm, callback: StabilizerCallback, *, at: tuple[int, int], max_saves: int) -> None:
        # A second alarm of the same step would save the same.
        if self.num_saves >= max_saves or self._saved_at == at or callback.driver is None:
            return
        self._saved_at = at
        self.num_saves += 1  # the checkpoint knows of itself
        name = _checkpoint_name(alarm, callback)
        try:
            path = callback.driver.save_checkpoint(name)
        except TrainingStoppedError:
            raise
        except Exception:
            # A full disk is no reason to end a run.
            logger.exception("the checkpoint %s could not be saved; training goes on", name)
            self.num_saves -= 1
            return
        if path is not None and self.num_saves == max_saves:
            warn(f"{callback.state_key}: {path} is the last of {max_saves} checkpoints at alarms (max_saves)")


def _checkpoint_name(alarm: Alarm, callback: StabilizerCallback) -> str:
    """Of a file; alarms of other callbacks and optimizers have other names."""
    optimizer = f"opt{alarm.optimizer_index}" if alarm.optimizer_index else ""
    parts = [re.sub(r"[^\w.-]+", "_", callback.name), optimizer, f"alarm_step_{alarm.step}_{alarm.kind}"]
    return "_".join(part for part in parts if part)


def _stop(alarm: Alarm, callback: StabilizerCallback) -> None:
    shown = ", ".join(f"{value:.4g}" for _, value in alarm.recent[-10:])
    raise TrainingStoppedError(f"{callback.state_key}: {alarm.text}. The last {alarm.series}: {shown}")


def _checked(action: dict[str, Any]) -> dict[str, Any]:
    if action["name"] == "lower_lr":
        check_number("on_alarm: lower_lr: factor", action["factor"], above=0, below=1)
        check_whole("on_alarm: lower_lr: num_steps", action["num_steps"], low=1)
    if action["name"] == "save_checkpoint":
        check_whole("on_alarm: save_checkpoint: max_saves", action["max_saves"], low=1)
    if action["name"] == "record" and action["path"] is not None:
        if not isinstance(action["path"], str | os.PathLike):
            raise ValueError(f"on_alarm: record: path={action['path']!r}: expected the name of a file")
        return {**action, "path": os.fspath(action["path"])}  # a checkpoint holds plain types
    if action["name"] == "call" and not callable(action["function"]):
        return {
            **action,
            "function": imported_function("on_alarm: call: function", action["function"], example="my.alerts.page"),
        }
    return action
