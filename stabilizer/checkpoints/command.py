"""The command `stabilizer checkpoints`: its arguments are the options, its docstring is the help."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from stabilizer.errors import StabilizerWarning

if TYPE_CHECKING:
    from stabilizer.checkpoints.shelves import Entry

__all__ = ["CheckpointsError", "checkpoints"]


class CheckpointsError(Exception):
    """A folder that cannot be looked at; the message, one line, is all that a user sees."""


def checkpoints(folder: Path, *, verify: bool = False) -> None:
    """Show the checkpoints below a folder, newest step last, and what is known of each.

    Args:
        folder: Where checkpoints are, at any depth.
        verify: Verify what has not been verified yet, and write its guard file.

    Raises:
        CheckpointsError: If there is no such folder.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from stabilizer.checkpoints.finding import newest_good
    from stabilizer.checkpoints.folders import peek_step
    from stabilizer.checkpoints.shelves import checkpoints_below, read_entry

    if not folder.is_dir():
        raise CheckpointsError(f"{folder} is no folder: expected one with checkpoints in it")
    paths = list(checkpoints_below(folder))
    if verify:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StabilizerWarning)  # the table says it
            for path in paths:
                newest_good([path])
    table = Table("step", Column("checkpoint", overflow="fold", ratio=1), "verdict", "verified at", "what is wrong")
    rows = []
    for path in paths:
        entry = read_entry(path)
        step = peek_step(path) if entry.guard is None or entry.guard.step < 0 else entry.guard.step
        rows.append((step, path.relative_to(folder).as_posix(), *_described(entry)))
    for step, *texts in sorted(rows):
        table.add_row(str(step) if step >= 0 else "?", *(escape(text) for text in texts))
    console = Console()
    console.print(table if rows else f"no checkpoints below {folder}", markup=False)


def _described(entry: Entry) -> tuple[str, str, str]:
    """Verdict, time, and reasons."""
    guard = entry.guard
    if guard is None:
        return "no guard file", "", entry.problem
    if guard.verdict == "pending":
        return "not verified", "", ""
    verdict = guard.verdict if guard.is_full else f"{guard.verdict} (weights alone)"
    return verdict, time.strftime("%F %T", time.localtime(guard.seconds)), "; ".join(guard.reasons)
