"""README.md of the field reports names every one of them, and no test that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

FOLDER = Path(__file__).parent
REPORTS = {
    report["id"]: report
    for report in json.loads((FOLDER.parent / "data/field-reports.json").read_text(encoding="utf-8"))
}


class Row(NamedTuple):
    """A line of the tables."""

    report: str
    title: str
    status: str
    tests: list[str]
    left: str


def _rows(text: str) -> list[Row]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| B")]
    return [
        Row(report, title, status, re.findall(r"`(\w+)`", tests), left) for report, title, status, tests, left in cells
    ]


def _problems(text: str) -> list[str]:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("test_*.py"))
    existing = re.findall(r"^def (test_(B\d{3})_\w+)\(", sources, re.MULTILINE)
    rows = _rows(text)
    mentioned = re.findall(r"\bB\d{3}\b", text)
    problems = [
        f"{report} is mentioned {mentioned.count(report)} times" for report in REPORTS if mentioned.count(report) != 1
    ]
    problems += [f"{report} is no report" for report in mentioned if report not in REPORTS]
    for row in rows:
        if row.title != REPORTS.get(row.report, {}).get("title"):
            problems.append(f"{row.report} has another title")
        if sorted(row.tests) != sorted(name for name, report in existing if report == row.report):
            problems.append(f"{row.report}: tests {row.tests} are not those that exist")
        if row.status not in ("shown", "in part", "left out"):
            problems.append(f"{row.report}: status {row.status!r}")
        if (row.status == "left out") == bool(row.tests) or (row.status == "shown") == bool(row.left):
            problems.append(f"{row.report} is {row.status!r} with tests {row.tests} and {row.left!r} left")
    return problems


def test_every_report_is_mentioned_once_and_shown_ones_have_their_tests() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(_rows(text)) == len(REPORTS) == 115
    assert _problems(text) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| B001 |", "| B002 |"),
        ("| in part |", "| shown |"),
        ("`test_B001_fsdp2", "`test_B001_fsdp3"),
        ("| B077 |", "| B077 and B088 |"),
    ],
)
def test_a_mistake_in_the_table_is_seen(old: str, new: str) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert old in text
    assert _problems(text.replace(old, new, 1)) != []
