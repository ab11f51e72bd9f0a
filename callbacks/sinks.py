"""Where each host keeps its metrics, as the suite writes to it. No host is imported."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from stabilizer.errors import warn
from stabilizer.reduction import rank

__all__ = [
    "STEP_METRIC",
    "AccelerateSink",
    "LightningSink",
    "LogFunction",
    "LoopSink",
    "add_charts",
    "add_picture",
    "add_text",
]

LogFunction = Callable[[dict[str, float], int], None]

#: The x-axis of our values in a tracker that takes no row of an earlier step than its latest one.
STEP_METRIC = "stabilizer/step"
_TAKES_NO_LATE_ROWS = frozenset({"wandb"})
_OPTIMIZER = re.compile(r"(?:^|/)(opt\d+)/")


def add_charts(writers: Sequence[Any], charts: dict[str, list[str]]) -> None:
    """Arrange TensorBoard's Custom Scalars page.

    Args:
        writers: Of any kind; those that have no such page are left out.
        charts: Title -> regular expressions of tags.
    """
    layout = {"stabilizer": {title: ["Multiline", patterns] for title, patterns in charts.items()}}
    for writer in writers:
        if hasattr(writer, "add_custom_scalars"):
            writer.add_custom_scalars(layout)


def add_picture(writers: Sequence[Any], tag: str, figure: Any, step: int) -> None:
    """Write a matplotlib figure where a writer takes one.

    Args:
        writers: Of any kind.
        tag: Its name.
        figure: The figure.
        step: The optimizer step.
    """
    for writer in writers:
        if hasattr(writer, "add_figure"):
            writer.add_figure(tag, figure, step)


def add_text(writers: Sequence[Any], tag: str, text: str, step: int) -> None:
    """Write text where a writer takes it.

    Args:
        writers: Of any kind.
        tag: Its name.
        text: The text.
        step: The optimizer step.
    """
    for writer in writers:
        if hasattr(writer, "add_text"):
            writer.add_text(tag, text, step)


class LightningSink:
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
        for writer in self._trainer.loggers:
            writer.log_metrics(values, step=step)

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Write a figure where a logger takes one."""
        add_picture(self._experiments(), tag, figure, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Write text where a logger takes it."""
        add_text(self._experiments(), tag, text, step)

    def folder(self) -> str | None:
        """Of the first logger that has one, else of the Trainer."""
        folders = (getattr(writer, "log_dir", None) or getattr(writer, "save_dir", None) for writer in self._loggers())
        return next((str(folder) for folder in folders if folder), str(self._trainer.default_root_dir))

    def show(self, values: dict[str, float]) -> None:
        """Show numbers on the progress bar."""
        for tag, value in values.items():
            self._trainer.lightning_module.log(tag, value, prog_bar=True, logger=False, rank_zero_only=True)

    def charts(self, charts: dict[str, list[str]]) -> None:
        """Arrange TensorBoard's Custom Scalars page."""
        add_charts(self._experiments(), charts)

    def _experiments(self) -> list[Any]:
        return [getattr(writer, "experiment", None) for writer in self._loggers()]

    def _loggers(self) -> list[Any]:
        return list(self._trainer.loggers)


class AccelerateSink:
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
        if not any(tracker.name in _TAKES_NO_LATE_ROWS for tracker in trackers):
            self._accelerator.log(values, step=step)
            return
        for tracker in trackers:
            if tracker.name in _TAKES_NO_LATE_ROWS:
                self._log_late(tracker, values, step)
            else:
                tracker.log(values, step=step)

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Write a figure where a tracker takes one."""
        add_picture(self._writers(), tag, figure, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Write text where a tracker takes it."""
        add_text(self._writers(), tag, text, step)

    def folder(self) -> str | None:
        """Of the first tracker that has one, else of the project."""
        folders = (
            getattr(tracker, "logging_dir", None) or getattr(writer, "log_dir", None)
            for tracker, writer in zip(self._accelerator.trackers, self._writers(), strict=True)
        )
        found = next((folder for folder in folders if folder), None) or self._accelerator.project_dir
        return None if found is None else str(found)

    def show(self, values: dict[str, float]) -> None:
        """There is no progress bar that is ours to write on."""

    def charts(self, charts: dict[str, list[str]]) -> None:
        """Arrange TensorBoard's Custom Scalars page."""
        add_charts(self._writers(), charts)

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

    def _writers(self) -> list[Any]:
        return [getattr(tracker, "tracker", None) for tracker in self._accelerator.trackers]


class LoopSink:
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
        self.writers = [log]
        self.is_logging = rank() == 0
        self._has_warned = False

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers under a step."""
        if self._log is None:
            if not self._has_warned:
                self._has_warned = True
                warn("nothing is logged: give attach(..., log=) a function of (values, step) or a SummaryWriter")
        elif hasattr(self._log, "add_scalar"):
            for tag, value in values.items():
                self._log.add_scalar(tag, value, step)
        else:
            self._log(values, step)

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Write a figure where the writer takes one."""
        add_picture(self.writers, tag, figure, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Write text where the writer takes it."""
        add_text(self.writers, tag, text, step)

    def folder(self) -> str | None:
        """Of the writer, if it has one."""
        found = getattr(self._log, "log_dir", None)
        return None if found is None else str(found)

    def show(self, values: dict[str, float]) -> None:
        """There is no progress bar that is ours to write on."""

    def charts(self, charts: dict[str, list[str]]) -> None:
        """Arrange TensorBoard's Custom Scalars page."""
        add_charts(self.writers, charts)
