"""Notice: something that happened in a run, as a person reads it; and the warning that carries it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

from stabilizer.errors import StabilizerWarning, logger

__all__ = ["Notice", "StabilizerAlarm", "shown_as_ours"]

_LINE_CHARS = 230
# Whose way to format warnings is no wish of the user's: Lightning has one from its import on.
_FORMATTERS = ("warnings", "lightning", "lightning_fabric", "pytorch_lightning")
_COLOURS = {"alarm": "bold red", "warning": "bold yellow", "note": "bold cyan"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice:
    """One thing to tell, for the console and for whoever catches warnings.

    Attributes:
        kind: What it is in a few words, such as "loss jump"; what is told again and again is counted by it.
        step: The optimizer step.
        text: All of it in one line.
        what: What has happened; `text` if it is empty.
        where: In which layer, on which rank, in which batch.
        advice: What to do next.
        more: Where more is.
        source: Who says it.
        severity: "alarm", "warning" or "note".
        count: How many steps it stands for.
        optimizer_index: Position of the optimizer.

    Example:
        >>> Notice(kind="loss jump", step=7, text="step 7: 8 instead of 2", source="LossMeanVarCallback").title
        'Loss jump at step 7 (LossMeanVarCallback)'
    """

    kind: str
    step: int
    text: str
    what: str = ""
    where: str = ""
    advice: str = ""
    more: str = ""
    source: str = ""
    severity: str = "alarm"
    count: int = 1
    optimizer_index: int = 0

    @property
    def title(self) -> str:
        """What, when, and who says it."""
        optimizer = f", optimizer {self.optimizer_index}" if self.optimizer_index else ""
        source = f" ({self.source})" if self.source else ""
        return f"{self.kind[:1].upper()}{self.kind[1:]} at step {self.step}{optimizer}{source}"

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What is known of it, name by name."""
        rows = [("what", self.what or self.text), ("where", self.where), ("next", self.advice), ("more", self.more)]
        return [(name, value) for name, value in rows if value]

    @property
    def line(self) -> str:
        """The whole in short, for what comes with something that was told in full."""
        said = textwrap.shorten(self.what or self.text, _LINE_CHARS, placeholder=" ...")
        return f"Also at step {self.step}, {self.kind}: {said}"

    @property
    def style(self) -> str:
        """Of its title on a terminal."""
        return _COLOURS[self.severity]


class StabilizerAlarm(StabilizerWarning):
    """A warning of something that happened at a step: spikes, losses, checkpoints, faults of numbers.

    It is shown on the console as a block of its own; whoever filters, records or logs warnings finds one line in it.

    Args:
        text: That line.
        notice: What it is about.
        line: Shown instead of the block; empty for nothing at all, where the same was shown already.

    Attributes:
        notice: As given.
    """

    def __init__(self, text: str, notice: Notice | None = None, line: str | None = None) -> None:
        super().__init__(text)
        self.notice, self._line = notice, line

    def shown(self, *, width: int, is_coloured: bool) -> str:
        """What the console shows.

        Args:
            width: In columns.
            is_coloured: Whether it takes colours.
        """
        from stabilizer.console import block_text

        if self.notice is None:
            return f"{self}\n"
        how: dict[str, Any] = {"style": self.notice.style, "width": width, "is_coloured": is_coloured}
        if self._line is not None:
            return block_text(self._line, [], **how) if self._line else ""
        # A line of its own first: a progress bar may have left the cursor in the middle of one.
        return "\n" + block_text(self.notice.title, self.notice.rows, **how)


@contextlib.contextmanager
def shown_as_ours() -> Iterator[None]:
    """While it lasts, our own warnings are shown without a line of code, and alarms as blocks; others as ever.

    Only the text of a warning that is shown becomes another: filters, `-W error`, whoever records warnings and
    `logging.captureWarnings` have all that they had. Somebody's own way to format warnings stays in force.
    """
    theirs = warnings.formatwarning

    def ours(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        try:
            if isinstance(message, StabilizerAlarm):
                # Only the plain way to show a warning goes to stderr; another one may write to a file.
                is_seen = warnings.showwarning.__module__ == "warnings"
                return _shown(message, is_seen=is_seen)
            if isinstance(message, StabilizerWarning):
                return f"{category.__name__}: {message}\n"
        except Exception:
            logger.debug("an alarm could not be shown as a block", exc_info=True)
        return theirs(message, category, filename, lineno, line)

    if theirs.__module__.partition(".")[0] not in _FORMATTERS:
        yield
        return
    warnings.formatwarning = ours
    try:
        yield
    finally:
        if warnings.formatwarning is ours:
            warnings.formatwarning = theirs


def _shown(alarm: StabilizerAlarm, *, is_seen: bool) -> str:
    from stabilizer.console import MAX_WIDTH, WIDTH, is_terminal

    is_coloured = is_seen and is_terminal(sys.stderr)
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, MAX_WIDTH) if is_coloured else WIDTH
    return alarm.shown(width=width, is_coloured=is_coloured)
