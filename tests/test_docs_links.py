"""Every link of every page leads to a file of this tree, and to a heading that is there."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from tests.docs_blocks import pages
from tests.environments import ROOT

PAGES = [*pages(), *ROOT.glob("*/README.md")]


def targets(text: str) -> list[str]:
    """Where links and pictures lead."""
    inline = [child for token in MarkdownIt().parse(text) for child in token.children or ()]
    return [str(child.attrs[name]) for child in inline for name in ("href", "src") if name in child.attrs]


def anchors(text: str) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    tokens, found, seen = MarkdownIt().parse(text), set(), Counter[str]()
    for token, inline in itertools.pairwise(tokens):
        if token.type == "heading_open":
            plain = "".join(child.content for child in inline.children or () if child.type in ("text", "code_inline"))
            kept = (letter for letter in plain.lower() if letter in "-_ " or unicodedata.category(letter)[0] in "LN")
            slug = "".join(kept).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def mistakes(page: Path, text: str) -> Iterator[str]:
    """What is wrong with the links of a page."""
    for target in targets(text):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / unquote(path)).resolve() if path else page
        if not file.is_file():
            yield f"{target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_links(page: str) -> None:
    assert not list(mistakes(ROOT / page, (ROOT / page).read_text(encoding="utf-8")))


def test_every_page_is_in_the_contents() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.DOTALL | re.MULTILINE)
    listed = re.findall(r"^[\w./-]+$", "\n".join(trees), re.MULTILINE)
    assert len(listed) == len(set(listed))
    inside = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in listed if not name.startswith("..")} == inside - {"index"}


def test_a_wrong_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c, d\n\n## Same\n\n## Same\n", encoding="utf-8")
    text = "[1](#a-b-c-d) [2](page.md#same-1) [3](gone.md) [4](#gone) ![5](gone.png) [6](https://example.org#x) [7](.)"
    assert [line.split(":")[0] for line in mistakes(page, text)] == ["gone.md", "#gone", "gone.png", "."]
