"""Where a trainer of transformers keeps its metrics: the reporters that `report_to` names."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from stabilizer.callbacks.sinks import LoopSink
from stabilizer.callbacks.writers import WriterSink, add_scalars
from stabilizer.errors import warn

__all__ = ["TrainerSink"]


class TrainerSink(WriterSink):
    """Writes to the reporters of a trainer, on its main process.

    Rows come late, under the trainer's own step, which counts from 1 when our first step is done. TensorBoard gets them
    with our tags; the other reporters get them through `on_log`, as they get the trainer's, with a state of that step.

    Args:
        trainer: The trainer.
        is_reporter: Tells reporters among the trainer's callbacks.
        log: A function of (values, step), or a `SummaryWriter`, to write to beside them.
    """

    def __init__(self, trainer: Any, *, is_reporter: Callable[[Any], bool], log: Any = None) -> None:
        self._trainer = weakref.proxy(trainer)
        self._is_reporter = is_reporter
        self._own = None if log is None else LoopSink(log)
        self._writers_seen: dict[int, Any] = {}
        self._offset = 1
        self._has_warned = False
        self.is_logging = bool(trainer.is_world_process_zero())

    def follow(self, step: int) -> None:
        """Take note of which of the trainer's steps one of ours is.

        Args:
            step: Ours, which the trainer has not counted yet.
        """
        self._offset = int(self._trainer.state.global_step) + 1 - step

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers under a step."""
        reporters, at = self._reporters(), step + self._offset
        if not reporters and self._own is None and not self._has_warned:
            self._has_warned = True
            warn(
                "report_to names no reporter, so that nothing is logged: TrainingArguments(report_to=['tensorboard']), "
                "or StabilizerTrainerCallback(..., log=function)"
            )
        for reporter in reporters:
            writer = self._writer(reporter)
            if writer is None:
                self._report(reporter, values, at)
                continue
            add_scalars(writer, values, at)
        if self._own is not None:
            self._own.scalars(values, at)

    def folder(self) -> str | None:
        """Of TensorBoard's writer, else the trainer's own."""
        folders = (getattr(writer, "log_dir", None) for writer in self.writers())
        return str(next((folder for folder in folders if folder), self._trainer.args.output_dir))

    def show(self, values: dict[str, float]) -> None:
        """The progress bar is the trainer's."""

    def _reporters(self) -> Sequence[Any]:
        return [callback for callback in self._trainer.callback_handler.callbacks if self._is_reporter(callback)]

    def _report(self, reporter: Any, values: dict[str, float], at: int) -> None:
        trainer = self._trainer
        state = copy.copy(trainer.state)
        state.global_step = at
        reporter.on_log(trainer.args, state, trainer.control, logs=dict(values), model=trainer.model)

    def _writer(self, reporter: Any) -> Any:
        """TensorBoard's writer, which its callback makes when training starts and lets go of when it ends."""
        if not hasattr(reporter, "tb_writer"):
            return None
        if reporter.tb_writer is not None:
            self._writers_seen[id(reporter)] = reporter.tb_writer
        return self._writers_seen.get(id(reporter))

    def step_of(self, step: int) -> int:
        """The trainer's, which counts from 1."""
        return step + self._offset

    def writers(self) -> list[Any]:
        """TensorBoard's, and what was given."""
        found = [self._writer(reporter) for reporter in self._reporters()]
        return [writer for writer in found if writer is not None] + ([] if self._own is None else self._own.writers())
