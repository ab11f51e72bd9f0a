"""Where incidents go: to the screen, into a folder and to the loggers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.searches import StepReplay
from stabilizer.errors import logger, warn
from stabilizer.localize.incident import Incident
from stabilizer.localize.result import Result
from stabilizer.localize.table import incident_text, print_incident
from stabilizer.localize.writing import IncidentWriter
from stabilizer.reduction import rank

__all__ = ["IncidentReports"]

_ROWS = 64


class IncidentReports:
    """Shows and writes incidents, where the loggers are.

    Args:
        folder: `None` for the logger's.
        dump_batch: Whether to save the micro-batch too.
        max_incidents: Largest number of incidents in the folder.
        max_dump_mb: Largest size of the folder, in MB.
        redact: Keys of the batch that are never saved.
        position_map: "auto", "always" or "never".

    Raises:
        ValueError: If batches cannot be saved here.
    """

    def __init__(
        self,
        folder: str | None,
        *,
        dump_batch: bool,
        max_incidents: int,
        max_dump_mb: float,
        redact: Sequence[str],
        position_map: str,
    ) -> None:
        self._folder, self._max_incidents = folder, max_incidents
        self.redact, self._position_map = tuple(redact), position_map
        self._options: dict[str, Any] = {
            "dump_batch": dump_batch,
            "max_incidents": max_incidents,
            "max_dump_mb": max_dump_mb,
            "redact": self.redact,
        }
        if dump_batch:
            IncidentWriter(Path("incidents"), **self._options)  # what is missing is an error here
        self._has_warned = False
        self._last_writer: IncidentWriter | None = None

    def is_full(self, callback: StabilizerCallback, num_incidents: int) -> bool:
        """Whether this run has had as many incidents as it may; the same on every rank.

        Args:
            callback: Whose they are.
            num_incidents: How many there were.
        """
        if num_incidents < self._max_incidents:
            return False
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{callback.state_key}: {self._max_incidents} incidents in this run: no further step is searched "
                "(max_incidents=)"
            )
        return True

    def write(
        self,
        callback: StabilizerCallback,
        context: StepContext,
        steps: StepReplay,
        incident: Incident | None,
        result: Result,
    ) -> None:
        """Show and write; never ends anything. A collective where micro-batches are saved.

        Args:
            callback: Whose incident it is.
            context: Of the step.
            steps: What was run again.
            incident: To show; `None` where it could not be put together.
            result: Of the search.
        """
        folder = None
        own = [finding for number, finding in result.findings if number == rank()]
        number = own[0].suspect.micro_batch if own else None
        batch = None if number is None else self._tried(context, lambda: steps.micro_batches[number].call())
        if context.is_logging and incident is not None:
            figures = self._tried(context, lambda: self._figures(context, incident, result)) or {}
            self._tried(context, lambda: print_incident(incident))
            self._tried(context, lambda: self._log(context, incident, figures))
            saved: dict[str, Any] = {"batch": batch, "rank": rank(), "micro_batch": number or 0, "figures": figures}
            folder = self._tried(context, lambda: self._writer(self.folder(callback, context)).write(incident, **saved))
        if self._options["dump_batch"]:
            # Other ranks' micro-batches lie beside it, wherever that is.
            folder = steps.store.reducer.objects(folder)[self._writing_rank(steps, context)]
            if not context.is_logging and folder is not None and batch is not None and number is not None:
                self._tried(
                    context,
                    lambda: self._writer(folder.parent).write_batch(folder, batch, rank=rank(), micro_batch=number),
                )

    def _writing_rank(self, steps: StepReplay, context: StepContext) -> int:
        return steps.store.reducer.objects(context.is_logging).index(True)

    def _tried(self, context: StepContext, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception:
            logger.exception("a report on step %d failed; training goes on", context.step)
            return None

    def _writer(self, folder: Path) -> IncidentWriter:
        """One for all incidents of a folder: it tells once what it could not do."""
        if self._last_writer is None or self._last_writer.folder != folder:
            self._last_writer = IncidentWriter(folder, **self._options)
        return self._last_writer

    def _log(self, context: StepContext, incident: Incident, figures: Mapping[str, Any]) -> None:
        context.write_text(tags.GRADLOC_INCIDENT, f"```\n{incident_text(incident)}\n```")
        for name, figure in figures.items():
            context.write_picture(f"{tags.GRADLOC_PICTURES}/{name}", figure)

    def _figures(self, context: StepContext, incident: Incident, result: Result) -> dict[str, Any]:
        """Pictures, where matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return {}
        from stabilizer.localize.pictures import norm_history, position_map, top_tokens

        _, rows = context.store.past(_ROWS)
        norms = rows[:, -1].tolist()
        figures = {"norm_history": norm_history(norms, step=incident.step, threshold=incident.threshold)}
        if incident.tokens:
            figures["top_tokens"] = top_tokens(incident)
        maps = [(number, finding) for number, finding in result.findings if finding.map is not None]
        wants_map = self._position_map == "always" or (self._position_map == "auto" and incident.type in "BNX")
        if maps and wants_map:
            names, values = maps[0][1].map or ([], [])
            figures["position_map"] = position_map(torch.tensor(values), names, incident.origin)
        return figures

    def folder(self, callback: StabilizerCallback, context: StepContext) -> Path:
        """Where incidents are written.

        Args:
            callback: Whose they are.
            context: Of the step.
        """
        base = Path(self._folder) if self._folder is not None else context.log_dir() / "incidents"
        return base / callback.name if callback.name else base
