"""Where incidents go: to the screen, into a folder and to the loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.searches import StepReplay
from stabilizer.drawing import can_draw
from stabilizer.errors import logger, warn
from stabilizer.localize.incident import Incident
from stabilizer.localize.markdown import incident_markdown
from stabilizer.localize.result import Result
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
            writer = self._writer(self.folder(callback, context))
            saved: dict[str, Any] = {"batch": batch, "rank": rank(), "micro_batch": number or 0}
            folder = self._tried(context, lambda: writer.write(incident, **saved))
            context.write_text(tags.GRADLOC_INCIDENT, incident_markdown(incident))
            self._tried(context, lambda: self._draw(context, incident, result, writer, folder))
            self._tried(context, lambda: callback.console.show_incident(incident, folder))
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

    def _draw(
        self, context: StepContext, incident: Incident, result: Result, writer: IncidentWriter, folder: Path | None
    ) -> None:
        """Have pictures drawn for the loggers and the incident's folder, where matplotlib is installed."""
        if not can_draw():
            return
        steps, rows = context.store.past(_ROWS)
        norms = rows[:, -1].tolist()
        found = next((finding.map for _, finding in result.findings if finding.map is not None), None)
        wants_map = self._position_map == "always" or (self._position_map == "auto" and incident.type in "BNX")
        drawn_map = found if wants_map else None

        def figures() -> dict[str, Any]:
            return _figures(incident, norms, steps, drawn_map)

        def keep(figures: Mapping[str, Any]) -> None:
            if folder is not None:
                writer.write_pictures(folder, figures)

        context.write_pictures(tags.GRADLOC_PICTURES, figures, then=keep)

    def folder(self, callback: StabilizerCallback, context: StepContext) -> Path:
        """Where incidents are written.

        Args:
            callback: Whose they are.
            context: Of the step.
        """
        base = Path(self._folder) if self._folder is not None else context.log_dir() / "incidents"
        return base / callback.name if callback.name else base


def _figures(
    incident: Incident, norms: list[float], steps: list[int], found: tuple[list[str], list[list[float]]] | None
) -> dict[str, Any]:
    from stabilizer.localize.card import incident_card
    from stabilizer.localize.pictures import norm_history, position_map, top_tokens

    figures = {"card": incident_card(incident, norms, steps=steps)}
    figures["norm_history"] = norm_history(norms, step=incident.step, threshold=incident.threshold, steps=steps)
    if incident.tokens:
        figures["top_tokens"] = top_tokens(incident)
    if found is not None:
        names, values = found
        figures["position_map"] = position_map(torch.tensor(values), names, incident.origin)
    return figures
