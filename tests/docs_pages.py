"""What the pages of the callbacks say, read for comparison with the code: headings, arguments, names of values."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stabilizer import tags
from tests.environments import ROOT

__all__ = ["ARGUMENTS_HEADER", "HEADINGS", "KNOWN_TAGS", "is_tag", "page_of", "read_arguments", "read_tags", "section"]

HEADINGS = (
    "What it does",
    "When to use it",
    "How it works",
    "Arguments",
    "What it logs",
    "What it costs",
    "Limits",
)
ARGUMENTS_HEADER = "| argument | default | unit | what it is, and where the default comes from |"
#: Every name of `stabilizer.tags`, of texts and pictures too.
KNOWN_TAGS = tags.ALL_TAGS | {
    value
    for name in dir(tags)
    if name.isupper() and name != "ALL_TAGS"
    for value in (getattr(tags, name),)
    if isinstance(value, str) and ("/" in value or value in (tags.GRADLOC_PICTURES, tags.FINDING, tags.ALARM))
}
_GROUPS = {tag.partition("/")[0] for tag in KNOWN_TAGS}


def page_of(key: str) -> Path:
    """The page of a callback.

    Args:
        key: Of its feature in a file.
    """
    return ROOT / "docs" / "callbacks" / f"{key}.md"


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level.

    Args:
        text: Of a page.
        title: Of the heading.
    """
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no heading '## {title}'"
    return found[1]


def read_arguments(text: str) -> dict[str, Any]:
    """Argument -> default of the table under "Arguments".

    Args:
        text: Of a page.
    """
    _, header, table = section(text, "Arguments").partition(ARGUMENTS_HEADER + "\n")
    assert header, f"no table with the header {ARGUMENTS_HEADER}"
    table = "\n".join(itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()))
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|[^|]*\| .+ \|$", table, re.MULTILINE)
    assert len(rows) == len(table.splitlines()) - 1, f"a row of another form:\n{table}"
    assert len(dict(rows)) == len(rows), "an argument has two rows"
    return {name: ast.literal_eval(default) for name, default in rows}


def read_tags(text: str) -> set[str]:
    """Names of values between backticks, with braces written out.

    Args:
        text: Of a section.
    """
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    names = {name for span in spans for name in _expanded(span)}
    return {name for name in names if name.partition("/")[0] in _GROUPS and "/" in name and "step_" not in name}


def is_tag(name: str, tag: str) -> bool:
    """Whether a name on a page is a tag, or the tag with a layer, a kind or a window behind it.

    Args:
        name: From a page.
        tag: From `stabilizer.tags`.
    """
    return name == tag or name.startswith((f"{tag}/", f"{tag}_"))


def _expanded(span: str) -> Iterator[str]:
    before, brace, rest = span.partition("{")
    if not brace or "}" not in rest:
        yield span
        return
    choices, _, after = rest.partition("}")
    for choice in choices.split(","):
        yield from _expanded(before + choice.strip() + after)
