"""Where each host keeps its metrics, as the suite writes to it. No host is imported."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

from stabilizer.callbacks.writers import WriterSink, add_scalars, is_summary_writer
from stabilizer.errors import warn
from stabilizer.reduction import rank

__all__ = [
    "STEP_METRIC",
    "AccelerateSink",
    "LightningSink",
    "LogFunction",
    "LoopSink",
]

LogFunction = Callable[[dict[str, float], int], None]

#: The x-axis of our values in a tracker that takes no row of an earlier step than its latest one.
STEP_METRIC = "stabilizer/step"
_TAKES_NO_LATE_ROWS = frozenset({"wandb"})
_OPTIMIZER = re.compile(r"(?:^|/)(opt\d+)/")


class LightningSink(WriterSink):
    """Writes to all loggers of a Trainer, on the process that logs.

    Args:
        trainer: Of either package.
    """

    def __init__(self, trainer: Any) -> None:
        # Weak: a callback that outlives its trainer must not keep it.
        self._trainer = weakref.proxy(trainer)
        self.is_logging = bool(trainer.is_global_zero)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers under a step."""
        for logger in self._trainer.loggers:
            if _is_plain_tensorboard(logger):
                add_scalars(logger.experiment, values, step)
            else:
                logger.log_metrics(values, step=step)

    def folder(self) -> str | None:
        """Of the first logger that has one, else of the Trainer."""
        folders = (getattr(writer, "log_dir", None) or getattr(writer, "save_dir", None) for writer in self._loggers())
        return next((str(folder) for folder in folders if folder), str(self._trainer.default_root_dir))

    def show(self, values: dict[str, float]) -> None:
        """Show numbers on the progress bar."""
        for tag, value in values.items():
            self._trainer.lightning_module.log(tag, value, prog_bar=True, logger=False, rank_zero_only=True)

    def writers(self) -> list[Any]:
        """The experiments of the loggers."""
        return [getattr(writer, "experiment", None) for writer in self._loggers()]

    def _loggers(self) -> list[Any]:
        return list(self._trainer.loggers)


class AccelerateSink(WriterSink):
    """Writes to the trackers of an Accelerator, on its main process.

    Rows come at least one step late. A tracker that drops rows of earlier steps than its own (W&B) gets them in the row
    at hand, with our step as a metric of its own, which is made the x-axis of our values. We move the tracker's step on
    only where the row at hand has an earlier one of ours: never faster than the optimizer, so that a user who logs with
    the step finds it still to come.

    Args:
        accelerator: Its trackers may be made later.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.is_logging = bool(accelerator.is_main_process)
        self._defined: set[str] = set()
        self._held: dict[int, tuple[int, dict[str, int]]] = {}
        self._has_warned = False

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers under a step."""
        trackers = self._accelerator.trackers
        if not trackers and not self._has_warned:
            self._has_warned = True
            warn(
                "the Accelerator has no trackers, so that nothing is logged: Accelerator(log_with=...) and "
                "accelerator.init_trackers(...) before the first step, or attach(..., log=function)"
            )
        for tracker in trackers:
            if tracker.name in _TAKES_NO_LATE_ROWS:
                self._log_late(tracker, values, step)
            elif _is_plain_tracker(tracker):
                add_scalars(tracker.tracker, values, step)
            else:
                tracker.log(values, step=step)

    def folder(self) -> str | None:
        """Of the first tracker that has one, else of the project."""
        folders = (
            getattr(tracker, "logging_dir", None) or getattr(writer, "log_dir", None)
            for tracker, writer in zip(self._accelerator.trackers, self.writers(), strict=True)
        )
        found = next((folder for folder in folders if folder), None) or self._accelerator.project_dir
        return None if found is None else str(found)

    def show(self, values: dict[str, float]) -> None:
        """There is no progress bar that is ours to write on."""

    def _log_late(self, tracker: Any, values: dict[str, float], step: int) -> None:
        # All values of a row are of one optimizer; optimizers count their steps apart.
        optimizer = _OPTIMIZER.search(next(iter(values)))
        axis = STEP_METRIC if optimizer is None else f"stabilizer/{optimizer[1]}_step"
        run = getattr(tracker, "tracker", None)
        self._define(run, values, axis)
        now = getattr(run, "step", None)
        if now is None:
            tracker.log({**values, axis: step})
            return
        at, held = self._held.get(id(tracker), (now, {}))
        if at != now:
            held = {}
        if held.get(axis, step) != step:
            now, held = now + 1, {}
        self._held[id(tracker)] = (now, {**held, axis: step})
        tracker.log({**values, axis: step}, step=now)

    def _define(self, run: Any, values: dict[str, float], axis: str) -> None:
        if not hasattr(run, "define_metric"):
            return
        for tag in (axis, *values):
            if tag not in self._defined:
                self._defined.add(tag)
                run.define_metric(tag, **({} if tag == axis else {"step_metric": axis}))

    def writers(self) -> list[Any]:
        """What the trackers write with."""
        return [getattr(tracker, "tracker", None) for tracker in self._accelerator.trackers]


class LoopSink(WriterSink):
    """Writes to what the user of a plain loop has given, on rank 0.

    Args:
        log: A function of values and step, or a TensorBoard `SummaryWriter`; `None` writes nothing and says so.

    Raises:
        ValueError: If it is neither.
    """

    def __init__(self, log: Any = None) -> None:
        if log is not None and not callable(log) and not hasattr(log, "add_scalar"):
            raise ValueError(
                f"log={log!r}: expected a function log(values, step) or a SummaryWriter of torch.utils.tensorboard"
            )
        self._log = log
        self.is_logging = rank() == 0
        self._has_warned = False

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers under a step."""
        if self._log is None:
            if not self._has_warned:
                self._has_warned = True
                warn("nothing is logged: give attach(..., log=) a function of (values, step) or a SummaryWriter")
        elif hasattr(self._log, "add_scalar"):
            add_scalars(self._log, values, step)
        else:
            self._log(values, step)

    def writers(self) -> list[Any]:
        """What was given."""
        return [self._log]

    def folder(self) -> str | None:
        """Of the writer, if it has one."""
        found = getattr(self._log, "log_dir", None)
        return None if found is None else str(found)

    def show(self, values: dict[str, float]) -> None:
        """There is no progress bar that is ours to write on."""


def _is_plain_tracker(tracker: Any) -> bool:
    """Whether a tracker of Accelerate does nothing with numbers but hand them to torch's writer, one after another."""
    kind = type(tracker)
    is_own = (kind.__module__, kind.__name__) == ("accelerate.tracking", "TensorBoardTracker")
    return is_own and is_summary_writer(tracker.tracker)


def _is_plain_tensorboard(logger: Any) -> bool:
    """Whether a logger of Lightning does nothing with numbers but hand them to torch's writer, one after another."""
    method = getattr(type(logger), "log_metrics", None)
    is_own = str(getattr(method, "__module__", "")).endswith("fabric.loggers.tensorboard")
    has_prefix = bool(getattr(logger, "_prefix", None)) or "log_metrics" in vars(logger)
    return is_own and not has_prefix and is_summary_writer(logger.experiment)
