"""Code blocks of Markdown pages, and which setup each one runs with.

A line `<!-- run: NAME -->` above a block names the setup of this block and of those after it on the page.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tests.environments import ROOT

__all__ = ["Block", "commands", "pages", "program", "read_blocks"]

RUN = re.compile(r"^\s*<!-- run: ([\w-]+) -->\s*$")


@dataclass(frozen=True)
class Block:
    """One fence of a page.

    Attributes:
        page: The file.
        line: Of its first line of code, counted from 1.
        language: What stands behind the three backticks; empty for none and for an indented block.
        code: Its lines, without the indentation of a list.
        setup: The name in the run line that is in force; "default" if there is none.
        own_setup: The same of a run line right above this block, else empty.
    """

    page: Path
    line: int
    language: str
    code: str
    setup: str
    own_setup: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page}:{self.line}"


def pages() -> list[Path]:
    """Every Markdown file whose blocks are run."""
    top = [path for name in ("README.md", "CONTRIBUTING.md") if (path := ROOT / name).exists()]
    return top + sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order.

    Args:
        page: The file.
    """
    setup, own, found = "default", "", []
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block" and (match := RUN.match(token.content)):
            own = match[1]
            # A file for another program has no names that a later block could use.
            setup = setup if own in ("lightning-cli", "shell") else own
        elif token.type in ("fence", "code_block"):
            first = (token.map or [0])[0] + (2 if token.type == "fence" else 1)
            found.append(Block(page, first, token.info.strip(), token.content, setup, own))
            own = ""
    return found


def program(blocks: Sequence[Block]) -> str:
    """Python blocks as one program whose lines have the numbers that they have on the page.

    Args:
        blocks: Of one page, in order.
    """
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def commands(block: Block) -> Iterator[list[str]]:
    """The words of every command in a console block, without what it prints and without settings before it.

    Args:
        block: Its commands begin with "$ "; a backslash at the end goes on in the next line.
    """
    lines = iter(block.code.splitlines())
    for line in lines:
        if line.startswith("$ "):
            while line.endswith("\\"):
                line = line[:-1] + next(lines)
            for part in line.removeprefix("$ ").split(" && "):
                words = shlex.split(part, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                yield words
