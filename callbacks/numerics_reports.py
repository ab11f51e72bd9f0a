"""Where the findings of NumericsCallback go: the log, a folder, and a trace of the profiler beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.notices import numerics_notice
from stabilizer.errors import logger, warn
from stabilizer.localize.private_files import write_file, write_folder
from stabilizer.markdown import note
from stabilizer.numerics.finding import NumericsFinding
from stabilizer.numerics.report import NumericsReport
from stabilizer.reduction import rank

__all__ = ["REPORT_FILE", "NumericsReports", "Profiling"]

REPORT_FILE = "report.json"


class NumericsReports:
    """Tells findings, and writes each to a folder of its own, on the process that logs. Never ends anything.

    Args:
        folder: For all reports; `None` for `numerics` in the logger's folder.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._has_warned = False

    def base(self, callback: StabilizerCallback, context: StepContext) -> Path:
        """The folder of all reports.

        Args:
            callback: Whose they are.
            context: Of the step.
        """
        base = Path(self._folder) if self._folder is not None else context.log_dir() / "numerics"
        return base / callback.name if callback.name else base

    def tell(
        self, callback: StabilizerCallback, context: StepContext, finding: NumericsFinding, report: NumericsReport
    ) -> Path | None:
        """Say it, and write it.

        Args:
            callback: Whose finding it is.
            context: Of the step.
            finding: To tell.
            report: With all around it.

        Returns:
            The folder; `None` where nothing was written.
        """
        folder: Path | None = None
        if context.is_logging:
            contents = {REPORT_FILE: report.to_json().encode() + b"\n"}
            base, name = self.base(callback, context), f"step_{finding.step}"
            folder = self._tried(lambda: write_folder(base, name, contents))
        self.say(callback, context, finding, folder=folder)  # last: warnings may be errors
        return folder

    def say(
        self,
        callback: StabilizerCallback,
        context: StepContext,
        finding: NumericsFinding,
        *,
        folder: Path | None = None,
    ) -> None:
        """Say it on the console and in the loggers.

        Args:
            callback: Whose finding it is.
            context: Of the step.
            finding: It.
            folder: Of its report; `None` where there is none.
        """
        self._write(context, finding)
        callback.console.tell(numerics_notice(finding, callback.state_key, folder=folder))

    def link(self, context: StepContext, folder: Path | None, finding: NumericsFinding, report: NumericsReport) -> None:
        """Write a report again: GradLoc has found something at the same step.

        Args:
            context: Of the step.
            folder: Of the report.
            finding: With that in it.
            report: Likewise.
        """
        self._write(context, finding)
        if folder is not None:
            self._tried(lambda: write_file(folder / REPORT_FILE, report.to_json().encode() + b"\n"))

    def _write(self, context: StepContext, finding: NumericsFinding) -> None:
        if context.is_logging:
            self._tried(lambda: context.write_text(tags.NUMERICS_TEXT, note(finding.kind, str(finding))))

    def _tried(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warn(f"a report of NumericsCallback could not be written, and training goes on: {error}")
        except Exception:
            logger.exception("a report of NumericsCallback failed; training goes on")
        return None


class Profiling:
    """One trace of torch's profiler a run: of the step after the first incident.

    Attributes:
        is_done: Whether there was one, on whichever rank.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._path: Path | None = None
        self._profiler: Any = None

    def arm(self, finding: NumericsFinding, bases: Sequence[str | None]) -> None:
        """Have the next step traced, on the rank that is named, else on the one that logs.

        Args:
            finding: Of the incident.
            bases: By rank, the folder of reports; `None` where nothing is logged.
        """
        self.is_done = True
        logging = [number for number, base in enumerate(bases) if base is not None]
        if logging and rank() == (logging[0] if finding.rank is None else finding.rank):
            self._path = Path(str(bases[logging[0]])) / f"trace_step_{finding.step + 1}_rank_{rank()}.json"

    def close_step(self) -> None:
        """A step is over: end the trace of it, or begin that of the next one."""
        if self._profiler is not None:
            self.stop()
        elif self._path is not None and torch._C._autograd._profiler_enabled():
            logger.warning("no trace of the step after an incident: another profiler is at work")
            self._path = None
        elif self._path is not None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            try:
                profiler = torch.profiler.profile(activities=activities)
                profiler.start()
                self._profiler = profiler
            except Exception as error:
                logger.warning("no trace of the step after an incident: %s: %s", type(error).__name__, error)
                self._path = None

    def stop(self) -> None:
        """End, and write the trace for its owner only; never raises."""
        profiler, path, self._profiler, self._path = self._profiler, self._path, None, None
        if profiler is None or path is None:
            return
        try:
            profiler.stop()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # nobody else looks into it
                unfinished = Path(folder) / path.name
                profiler.export_chrome_trace(str(unfinished))
                unfinished.chmod(0o600)
                unfinished.replace(path)
            logger.info("a trace of the step after the incident is in %s", path)
        except Exception:
            logger.exception("the trace of the step after an incident could not be written; training goes on")
