"""Progress: how far long work is, where somebody looks."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any

from stabilizer.console import is_terminal, make_console
from stabilizer.reduction import rank

__all__ = ["Progress"]

#: Seconds before anything is shown: on a terminal, and elsewhere. What ends sooner shows nothing.
_FIRST_ON_TERMINAL, _FIRST = 0.5, 5.0
#: Seconds between two refreshes of the line on a terminal, and between two lines elsewhere.
_EVERY_ON_TERMINAL, _EVERY = 0.1, 10.0


class Progress:
    """Shows progress on stderr on rank 0: a line that replaces itself on a terminal, now and then a line elsewhere.

    It has no thread: what it shows changes when the work tells. A stream that cannot be written is no failure.

    Args:
        what: The work, in a few words.
        total: How much there is to do, at most.
        unit: What is counted.

    Example:
        >>> with Progress("searching", total=2, unit="passes") as progress:
        ...     progress.advance()
        >>> progress.done
        1
    """

    def __init__(self, what: str, *, total: float, unit: str) -> None:
        self.done: float = 0
        self._what, self._total, self._unit = what, total, unit
        self._is_on = rank() == 0 and sys.stderr is not None
        self._is_terminal = self._is_on and is_terminal(sys.stderr)
        self._start = time.monotonic()
        self._next = self._start + (_FIRST_ON_TERMINAL if self._is_terminal else _FIRST)
        self._bar: Any = None
        self._task: Any = None

    def advance(self, num: float = 1) -> None:
        """Some more is done.

        Args:
            num: How much.
        """
        self.done += num
        now = time.monotonic()
        if not self._is_on or now < self._next:
            return
        self._next = now + (_EVERY_ON_TERMINAL if self._is_terminal else _EVERY)
        try:
            if self._is_terminal:
                self._refresh()
            else:
                sys.stderr.write(f"{self._what}: {self._counted()}, {now - self._start:.0f} s\n")
                sys.stderr.flush()
        except (OSError, ValueError):
            self._is_on = False

    def close(self) -> None:
        """Take the line away; does nothing the second time."""
        bar, self._bar, self._is_on = self._bar, None, False
        if bar is not None:
            with contextlib.suppress(OSError, ValueError):
                bar.stop()

    def __enter__(self) -> Progress:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close, whatever has happened."""
        self.close()

    def _counted(self) -> str:
        return f"{self.done:,.0f} of at most {max(self._total, self.done):,.0f} {self._unit}"

    def _refresh(self) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[counted]}"))
            # Whatever stands in the line already, such as a trainer's own bar, is drawn again by its owner.
            sys.stderr.write("\r\x1b[2K")
            console = make_console(sys.stderr)
            self._bar = Bar(*columns, TimeElapsedColumn(), console=console, transient=True, auto_refresh=False)
            self._task = self._bar.add_task(self._what, total=self._total, counted="")
            self._bar.start()
        self._bar.update(self._task, completed=self.done, total=max(self._total, self.done), counted=self._counted())
        self._bar.refresh()
