"""RunConsole: what one run tells a person while it goes on, each thing once and never a flood; and what it counts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stabilizer.callbacks.run_counts import IncidentLine, KindCount, StepCounts
from stabilizer.console import make_console
from stabilizer.errors import logger, warn
from stabilizer.notices import Notice, StabilizerAlarm
from stabilizer.reduction import rank

if TYPE_CHECKING:
    from stabilizer.localize.incident import Incident

__all__ = ["NUM_BLOCKS", "SPIKE", "RunConsole"]

#: So many blocks of one kind a run prints; what comes after them is counted.
NUM_BLOCKS = 5
#: What incidents of GradLoc are counted as.
SPIKE = "gradient spike"
_ROWS = 5
_OFF = ("0", "false", "no")


class RunConsole:
    """Where callbacks tell what a person should see; one for all callbacks of a run, on every rank.

    The first thing of a step is shown as a block, what else comes of that step as a line; of each kind there are
    `NUM_BLOCKS` blocks, then one sentence says that further ones are only counted. Only rank 0 shows anything.

    Attributes:
        kinds: What was told so far, by kind.
        incidents: Those of GradLoc so far.
        steps: On rank 0, counts of the steps by position of the optimizer.
        rows: What the callbacks say at the end, names and texts.
        sums_up: Whether there is a summary at the end: on rank 0, and not with `STABILIZER_SUMMARY=0`.

    Example:
        >>> console = RunConsole()
        >>> console.count("loss jump", step=7).num
        1
    """

    def __init__(self) -> None:
        self.kinds: dict[str, KindCount] = {}
        self.incidents: list[IncidentLine] = []
        self.steps: dict[int, StepCounts] = {}
        self.rows: list[tuple[str, str]] = []
        self.sums_up = rank() == 0 and os.environ.get("STABILIZER_SUMMARY", "").strip().lower() not in _OFF
        self._shown: tuple[int, int] | None = None  # step and optimizer of the last block
        self._kinds_shown: set[str] = set()  # what was told of that step
        self._said: tuple[int, set[tuple[str, str]]] = (-1, set())  # of that step, whatever the optimizer
        self._errors: set[str] = set()  # of searches

    def count(self, kind: str, *, step: int, num: int = 1) -> KindCount:
        """Count something without telling it.

        Args:
            kind: In a few words.
            step: The optimizer step.
            num: How many steps it stands for.
        """
        found = self.kinds.setdefault(kind, KindCount(first_step=step))
        # Two callbacks may find the same at one step.
        found.num += 0 if step == found.last_step else num
        found.last_step = step
        found.steps.append(step)
        return found

    def marks(self) -> dict[str, list[int]]:
        """The last steps of incidents and of alarms of all other kinds, for pictures; from any thread."""
        found: dict[str, list[int]] = {"incident": [], "alarm": []}
        for kind, count in list(self.kinds.items()):
            found["incident" if kind == SPIKE else "alarm"] += list(count.steps)
        return found

    def tell(self, notice: Notice, *, is_limited: bool = True) -> None:
        """Tell something: a `StabilizerAlarm` carries it, so that filters of warnings hold for it.

        Args:
            notice: What.
            is_limited: Whether only the first ones of its kind are told, and in short beside others of its step.
        """
        found = self.count(notice.kind, step=notice.step, num=notice.count)
        if not is_limited:
            warn(StabilizerAlarm(notice.text, notice))
            return
        if found.num_blocks > NUM_BLOCKS:
            return
        line = None
        if self._follows((notice.step, notice.optimizer_index)):
            line = "" if notice.kind in self._kinds_shown else notice.line
            if line and SPIKE in self._kinds_shown:  # it stands on another stream
                line = line.replace(",", f", beside the {SPIKE} on stdout,", 1)
        if self._is_said_again(notice):
            line = ""
        if line != "":
            found.num_blocks += 1
            self._kinds_shown.add(notice.kind)
        if found.num_blocks > NUM_BLOCKS:
            line = _last_words(notice.kind, notice.more)
        warn(StabilizerAlarm(notice.text, notice, line))

    def show_incident(self, incident: Incident, folder: Path | None) -> None:
        """Show an incident on stdout, where the logs are written.

        Args:
            incident: What was found.
            folder: Where it was written; `None` where it was not.
        """
        from stabilizer.localize.table import incident_advice, incident_title, print_incident

        self.incidents.append(
            IncidentLine(incident.step, f"{incident.type}, {_first_clause(incident.summary)}", folder)
        )
        found = self.count(SPIKE, step=incident.step)
        found.num_blocks += 1
        if rank() != 0 or found.num_blocks > NUM_BLOCKS + 1:
            return
        console, place = make_console(), "" if folder is None else str(folder)
        error = (incident.error or "") if not incident.tokens else ""
        if found.num_blocks > NUM_BLOCKS:
            where = "" if folder is None else str(folder.parent)
            console.print(f"\n{incident_title(incident)}. {_last_words(SPIKE, where)}", markup=False)
        elif error and error in self._errors:
            console.print(f"\n{incident_title(incident)}. The search failed as before", markup=False)
        else:
            console.print()  # a progress bar may have left the cursor in the middle of a line
            more = [("next", incident_advice(incident)), *([("more", place)] if place else [])]
            print_incident(incident, console, max_rows=_ROWS, more=more)
        self._errors.add(error)
        if not console.quiet:  # only what somebody may have seen is something to refer to
            self._follows((incident.step, incident.optimizer_index))
            self._kinds_shown.add(SPIKE)

    def _is_said_again(self, notice: Notice) -> bool:
        """Whether the same was told of this step already, by another optimizer's callbacks."""
        if self._said[0] != notice.step:
            self._said = (notice.step, set())
        said = (notice.kind, notice.what or notice.text)
        is_again = said in self._said[1]
        self._said[1].add(said)
        return is_again

    def _follows(self, at: tuple[int, int]) -> bool:
        """Whether something of this step and optimizer was told last."""
        if at != self._shown:
            self._shown, self._kinds_shown = at, set()
        return bool(self._kinds_shown)

    def count_step(self, contexts: Sequence[Any], *, may_skip: bool) -> None:
        """Count a step that is over; waits for nothing.

        Args:
            contexts: Of it, `StepContext`s; none of a step that nobody has seen.
            may_skip: Whether a callback may skip it; if not, and without a scaler, the device has nothing to count.
        """
        if not self.sums_up or not contexts or (outcome := contexts[0].outcome) is None:
            return
        number, step = contexts[0].optimizer_index, contexts[0].step
        counts = self.steps.get(number)
        if counts is None:
            counts = self.steps[number] = StepCounts(outcome.skipped.device, step=step)
        if may_skip or contexts[0].is_scaled:
            counts.update(step, skipped=outcome.skipped, overflowed=outcome.overflowed)
        else:
            counts.update(step)

    def collect(self, callbacks: Sequence[Any], number: int) -> None:
        """Read what the device has counted, and ask callbacks for their part of the summary. Never raises.

        Args:
            callbacks: `StabilizerCallback`s, which still know their layers.
            number: Position of the optimizer.
        """
        counts = self.steps.get(number)
        if not self.sums_up or counts is None:
            return
        try:
            rows = counts.rows()
            for callback in callbacks:
                rows += [] if callback.has_failed else callback.summary(number)
            self.rows += [(f"opt{number} {name}" if number else name, text) for name, text in rows]
        except Exception:
            logger.exception("the summary of the run failed; it is left out")
            self.sums_up = False


def _last_words(kind: str, more: str) -> str:
    where = f"; they are logged: {more}" if more else ""
    return f"{kind[:1].upper()}{kind[1:]}: told {NUM_BLOCKS} times in this run, further ones are only counted{where}"


def _first_clause(summary: str) -> str:
    """A summary without the norm and the step, which stand beside it."""
    return summary.partition("): ")[2] or summary
