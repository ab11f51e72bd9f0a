"""The summary of a run: one block on stdout when it ends, of what has happened in it."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from stabilizer.callbacks.console import SPIKE, RunConsole
from stabilizer.callbacks.notices import BAD_CHECKPOINT, GOOD_CHECKPOINT, ROLLBACK
from stabilizer.callbacks.run_counts import IncidentLine, KindCount
from stabilizer.console import make_console, print_block
from stabilizer.errors import TrainingStoppedError, logger

__all__ = ["show_summary"]

_NUM_KINDS, _NUM_INCIDENTS = 6, 3
_INCIDENT_CHARS = 110
_EVENTS = "events.out.tfevents*"


def show_summary(console: RunConsole, *, folder: Callable[[], str | None], after_exception: bool = False) -> None:
    """Print the summary of a run on stdout, once, on rank 0; `STABILIZER_SUMMARY=0` turns it off. Never raises.

    A run without a step has none.

    Args:
        console: Of the run, with what its callbacks have said at the end.
        folder: Finds the folder of the loggers.
        after_exception: Whether the run breaks off, with the exception that is on its way.
    """
    if not console.sums_up or not console.steps:
        return
    console.sums_up = False
    try:
        rows = [*console.rows, *_kinds(console), *_incidents(console.incidents), *_logs(folder())]
        stream = make_console()
        stream.print()
        print_block(stream, f"Stabilizer summary: {_ending(after_exception)}", rows)
    except Exception:
        logger.exception("the summary of the run failed; it is left out")


def _ending(after_exception: bool) -> str:
    """How the run has ended, as far as the exception on its way tells."""
    if not after_exception:
        return "the run is over"
    error = sys.exc_info()[1]
    if error is None:
        return "the run has broken off"
    if isinstance(error, TrainingStoppedError):
        return "a callback has stopped the run"
    return f"the run has ended with {type(error).__name__}"


def _kinds(console: RunConsole) -> list[tuple[str, str]]:
    """What was told, the most frequent first; what has a row of its own is not among it."""
    kinds = dict(console.kinds)
    counted = {kind: kinds.pop(kind, KindCount()) for kind in (GOOD_CHECKPOINT, BAD_CHECKPOINT, ROLLBACK)}
    if console.incidents:
        kinds.pop(SPIKE, None)
    alarms = sorted(kinds.items(), key=lambda item: (-item[1].num, item[1].first_step))
    texts = [f"{kind}: {one.num:,}, {_between(one)}" for kind, one in alarms[:_NUM_KINDS]]
    texts += [f"and {len(alarms) - _NUM_KINDS} other kinds"] if len(alarms) > _NUM_KINDS else []
    found = [("alarms" if not number else " ", text) for number, text in enumerate(texts or ["none"])]
    good, bad, rollbacks = counted.values()
    if good.num or bad.num:
        where = f" ({_between(bad)})" if bad.num else ""
        found.append(("checkpoints", f"{good.num:,} good, {bad.num:,} bad{where}"))
    if rollbacks.num:
        found.append(("rollbacks", f"{rollbacks.num:,}, {_between(rollbacks)}"))
    return found


def _between(counted: KindCount) -> str:
    first, last = counted.first_step, counted.last_step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _incidents(incidents: Sequence[IncidentLine]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for incident in incidents[:_NUM_INCIDENTS]:
        found.append(("incidents" if not found else " ", f"step {incident.step}: {_short(incident.text)}"))
    if len(incidents) > _NUM_INCIDENTS:
        found.append((" ", f"and {len(incidents) - _NUM_INCIDENTS} more"))
    folders = dict.fromkeys(str(incident.folder.parent) for incident in incidents if incident.folder is not None)
    return found + [("folder", folder) for folder in folders]


def _short(text: str) -> str:
    return textwrap.shorten(text, _INCIDENT_CHARS, placeholder=" ...")


def _logs(folder: str | None) -> list[tuple[str, str]]:
    """Where TensorBoard's files are, if there are any."""
    if folder is None:
        return []
    path = Path(folder)
    has_events = any(path.glob(_EVENTS)) or any(path.glob(f"*/{_EVENTS}"))
    return [("TensorBoard", f"tensorboard --logdir {shlex.quote(folder)}")] if has_events else []
