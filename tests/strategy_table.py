"""README's table of tested combinations, made from the tests' own markers.

A test says what it covers, in one marker or in parts that add up (the parts of a parametrised test, for instance):

    @pytest.mark.covers(feature="layer norms", host="plain")
    @pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.covers(strategy="ddp"))])
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

__all__ = ["HOSTS", "STRATEGIES", "Collector", "Combination", "combinations", "replace_table", "table"]

README = Path(__file__).resolve().parent.parent / "README.md"
START, END = "<!-- tested:start -->", "<!-- tested:end -->"

#: Name in a marker -> head of a column.
STRATEGIES = {
    "single": "one process",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "hsdp": "HSDP",
    "tp": "TP",
    "tp_sp": "TP + SP",
    "fsdp2_tp": "FSDP2 x TP",
}

#: Name in a marker -> what a row says.
HOSTS = {
    "plain": "plain loop",
    "lightning": "`lightning`",
    "pytorch_lightning": "`pytorch_lightning`",
    "accelerate": "Accelerate",
    "transformers": "transformers",
}


class Combination(NamedTuple):
    """What a test covers."""

    feature: str
    strategy: str
    host: str


def combinations(marks: Iterable[Mapping[str, Any]], *, test: str) -> set[Combination]:
    """Read the `covers` markers of one test.

    Args:
        marks: Keyword arguments of each marker, the closest to the test first.
        test: Its name, for errors.

    Returns:
        All that it covers: every marker that is complete, and one put together from those that are not.

    Raises:
        pytest.UsageError: A keyword or a name is unknown, or something is missing.
    """
    complete, parts = [], {}
    for mark in marks:
        if set(mark) == set(Combination._fields):
            complete.append(mark)
        else:
            parts.update({key: value for key, value in mark.items() if key not in parts})
    if parts:
        complete.append(parts)
    found: set[Combination] = set()
    for mark in complete:
        if set(mark) != set(Combination._fields):
            raise pytest.UsageError(f"{test}: covers() has {sorted(mark)}; give feature=, strategy= and host=.")
        values = [[mark[key]] if isinstance(mark[key], str) else list(mark[key]) for key in Combination._fields]
        found |= {Combination(*value) for value in itertools.product(*values)}
    for combination in found:
        for value, known in ((combination.strategy, STRATEGIES), (combination.host, HOSTS)):
            if value not in known:
                raise pytest.UsageError(f"{test}: covers() does not know {value!r}; known are {list(known)}.")
    return found


class Collector:
    """Pytest plugin that notes what the collected tests cover."""

    def __init__(self) -> None:
        self.found: set[Combination] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Read the markers of all tests but those that never run."""
        for item in items:
            if item.get_closest_marker("skip") is None:
                self.found |= combinations([mark.kwargs for mark in item.iter_markers("covers")], test=item.nodeid)


def table(found: Iterable[Combination]) -> str:
    """Format combinations as Markdown.

    Args:
        found: What is tested.

    Returns:
        A row for each feature and host, a column for each strategy that any test covers.

    Example:
        >>> print(table([Combination("norms", "ddp", "plain"), Combination("norms", "single", "plain")]))
        | feature | host | one process | DDP |
        | --- | --- | :-: | :-: |
        | norms | plain loop | ✓ | ✓ |
    """
    tested = set(found)
    columns = [name for name in STRATEGIES if any(each.strategy == name for each in tested)]
    lines = ["| feature | host | " + " | ".join(STRATEGIES[name] for name in columns) + " |"]
    lines.append("| --- | --- |" + " :-: |" * len(columns))
    rows = {(each.feature, list(HOSTS).index(each.host), each.host) for each in tested}
    for feature, _, host in sorted(rows):
        cells = ["✓" if Combination(feature, name, host) in tested else "" for name in columns]
        lines.append(f"| {feature} | {HOSTS[host]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replace_table(text: str, new: str) -> str:
    """Put a table between the marks of a page.

    Args:
        text: The page.
        new: The table.

    Returns:
        The page with the table.

    Raises:
        ValueError: The page does not have each mark once.
    """
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must hold {START} and {END} once each: the table goes between them.")
    before, _, rest = text.partition(START)
    return f"{before}{START}\n\n{new}\n\n{END}{rest.partition(END)[2]}"


def collect() -> set[Combination]:
    """What all tests cover, slow ones and those for a GPU too; none of them runs."""
    collector, output = Collector(), io.StringIO()
    options = ["--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider", str(README.parent / "tests")]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(options, plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"{output.getvalue()}\nThe tests could not be collected (exit code {int(code)}).")
    if not collector.found:
        raise SystemExit("No test has a `covers` marker: the table would be empty.")
    return collector.found


def main() -> int:
    """Write README's table, or compare it with the tests."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the table is not up to date")
    is_check = parser.parse_args().check
    text = README.read_text()
    new = replace_table(text, table(collect()))
    if is_check and new != text:
        sys.stderr.write("README.md does not say what is tested: run scripts/tables.\n")
    elif new != text:
        README.write_text(new)
    return int(is_check and new != text)


if __name__ == "__main__":
    sys.exit(main())
