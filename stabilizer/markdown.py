"""Markdown as TensorBoard shows it: what comes from the data stays text, whatever is in it."""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Sequence

from stabilizer.console import printable

__all__ = ["bullets", "code", "escaped", "heading", "note", "table"]

# What means something in Markdown wherever it stands; "<", ">" and "&" are HTML's.
_SPECIAL = re.compile(r"[\\`*_{}\[\]#|~]")


def escaped(text: str, *, limit: int = 300) -> str:
    r"""Text that shows as it is: no HTML, no Markdown, no line breaks; control characters as escapes.

    Args:
        text: Any.
        limit: Largest number of characters that are shown.

    Example:
        >>> escaped("<b>|a_b|\n")
        '&lt;b&gt;&#124;a&#95;b&#124;&#92;n'
    """
    shown = html.escape(printable(text, limit=limit), quote=False)
    # As numbers of characters: a backslash before them is shown in some places, and undone in others.
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", shown)


def heading(text: str, *, level: int = 3) -> str:
    """A heading.

    Args:
        text: Any; it is escaped.
        level: 1 is the largest.
    """
    return f"{'#' * level} {escaped(text)}"


def note(title: str, text: str) -> str:
    """What a callback has to say: of what kind it is, and in a sentence or two what.

    Args:
        title: Any; it is escaped.
        text: Any; it is escaped.
    """
    return f"**{escaped(title)}**\n\n{escaped(text, limit=4000)}"


def bullets(pairs: Sequence[tuple[str, str]]) -> str:
    """A list of names, each with what there is to say of it.

    Args:
        pairs: Of any texts; they are escaped.
    """
    return "\n".join(f"- **{escaped(name)}** {escaped(text, limit=2000)}" for name, text in pairs)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str] = ()) -> str:
    """A table.

    Args:
        headings: Of the columns.
        rows: Texts of the cells; they are escaped.
        left: Headings of columns of text; the others are numbers, which stand at the right.

    Example:
        >>> print(table(["text", "norm"], [["a|b", "1.5"]], left=["text"]))
        | text | norm |
        |:---|---:|
        | a&#124;b | 1.5 |
    """
    lines = [[escaped(name) or "&nbsp;" for name in headings], *([escaped(cell) for cell in row] for row in rows)]
    rule = "|" + "|".join(":---" if name in left else "---:" for name in headings) + "|"
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([shown[0], rule, *shown[1:]])


def code(text: str, *, language: str = "") -> str:
    """A block of code, in a fence that nothing in it can end.

    Args:
        text: Any.
        language: Of it.
    """
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
