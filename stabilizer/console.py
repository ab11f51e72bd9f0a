"""What people see on the console: blocks of one shape, in colour on a terminal and as plain text elsewhere."""

from __future__ import annotations

import functools
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from stabilizer.errors import logger

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MAX_WIDTH", "WIDTH", "block_text", "is_terminal", "make_console", "print_block", "printable"]

#: Columns of a block where the output is no terminal, and at most.
WIDTH, MAX_WIDTH = 80, 120
_INDENT = 16
#: Names of rows that stay one line, however long they are.
_PATHS = ("more", "folder", "TensorBoard")


def is_terminal(stream: Any) -> bool:
    """Whether somebody looks at a stream who sees colours.

    Args:
        stream: To write to; `None` where there is none.
    """
    try:
        return stream is not None and bool(stream.isatty())
    except (AttributeError, ValueError):  # none that knows, or one that is closed
        return False


def make_console(stream: TextIO | None = None) -> Console:
    """A console that colours nothing where the output is no terminal, whatever FORCE_COLOR says, and is not too wide.

    Where it writes into a pipe that nobody reads any more, it is silent from then on.

    Args:
        stream: Where; default stdout.
    """
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    plain: dict[str, Any] = {} if is_terminal(stream) else {"force_terminal": False, "no_color": True}
    console = Console(file=stream, highlight=False, **plain)
    console.width = min(console.width, MAX_WIDTH)
    # rich's own way ends the process: a run does not depend on who looks at it.
    console.on_broken_pipe = functools.partial(_fall_silent, console)  # type: ignore[method-assign]
    return console


def _fall_silent(console: Console) -> None:
    console.quiet = True
    _say_closed(str(getattr(console.file, "name", "the output")).strip("<>"))
    # What could not be written stays in the stream, and would fail again when Python ends: it goes nowhere instead.
    try:
        number = console.file.fileno()
        kept, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, number)
            console.file.flush()
        finally:
            os.dup2(kept, number)
            os.close(kept)
            os.close(nowhere)
    except (AttributeError, OSError, ValueError):  # no stream of the system
        logger.debug("what could not be written stays in the stream", exc_info=True)


@functools.cache
def _say_closed(name: str) -> None:
    logger.warning("%s is a pipe that nobody reads any more: nothing is shown there; the run goes on", name)


def print_block(console: Console, title: str, rows: Sequence[tuple[str, str]], *, style: str = "bold") -> None:
    """Print a title, and under it names with what there is to say of each. Control characters are shown as escapes.

    Args:
        console: Where.
        title: One line.
        rows: Name and text; a text without a name stands under the title.
        style: Of the title, in rich's words.
    """
    from rich.text import Text

    width, encoding = min(console.width, MAX_WIDTH), console.encoding

    def safe(text: str) -> str:
        # Whatever encoding the output has, a token's text ends nothing.
        return printable(text).encode(encoding, "backslashreplace").decode(encoding)

    console.print(Text(textwrap.fill(safe(title), width), style=style), width=width)
    for name, value in rows:
        indent = f"  {name:<{_INDENT - 2}}" if name else ""
        if name in _PATHS:  # to be copied
            console.print(Text(indent + safe(value)), soft_wrap=True)
            continue
        wrapped = textwrap.fill(safe(value), width, initial_indent=indent, subsequent_indent=" " * len(indent))
        console.print(Text(wrapped, no_wrap=True, overflow="fold"), width=width)


def block_text(
    title: str, rows: Sequence[tuple[str, str]], *, style: str = "bold", width: int = WIDTH, is_coloured: bool = False
) -> str:
    """What `print_block` prints.

    Args:
        title: One line.
        rows: Name and text.
        style: Of the title, in rich's words.
        width: In columns.
        is_coloured: Whether there are codes for colours in it.

    Example:
        >>> print(block_text("Loss jump at step 7", [("what", "the loss jumped to 8")]), end="")
        Loss jump at step 7
          what          the loss jumped to 8
    """
    from rich.console import Console

    stream = io.StringIO()
    colours: dict[str, Any] = {"force_terminal": True} if is_coloured else {"force_terminal": False, "no_color": True}
    print_block(Console(file=stream, width=width, highlight=False, **colours), title, rows, style=style)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def printable(text: str, *, limit: int = 2000) -> str:
    r"""Text that changes nothing on a terminal: control characters and line breaks as escapes, and not too long.

    Args:
        text: Any.
        limit: Largest number of characters.

    Example:
        >>> printable("a\n\x1b[31mb")
        'a\\n\\x1b[31mb'
    """
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."
