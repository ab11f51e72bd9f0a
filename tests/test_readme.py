"""README says what the tests say."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.environments import ROOT
from tests.strategy_table import END, START, Combination, combinations, replace_table, table


def test_table_is_up_to_date() -> None:
    command = [sys.executable, "-m", "tests.strategy_table", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_parts_of_a_marker_add_up() -> None:
    marks = [
        {"strategy": "ddp"},
        {"feature": "norms", "host": ["plain", "lightning"], "strategy": "single"},
        {"host": "plain", "feature": "x"},
    ]
    assert combinations(marks, test="test") == {
        Combination("x", "ddp", "plain"),
        Combination("norms", "single", "plain"),
        Combination("norms", "single", "lightning"),
    }


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"feature": "norms", "host": "plain"}, "give feature="),
        ({"feature": "norms", "host": "plain", "strategy": "ddp", "hots": "plain"}, "hots"),
        ({"feature": "norms", "host": "plain", "strategy": "dpp"}, "'dpp'; known are"),
        ({"feature": "norms", "host": "here", "strategy": "ddp"}, "'here'; known are"),
    ],
)
def test_a_wrong_marker_is_an_error(mark: dict[str, Any], message: str) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        combinations([mark], test="test")


def test_table_replaces_what_is_between_the_marks() -> None:
    new = table([Combination("norms", "fsdp2", "plain"), Combination("norms", "single", "lightning")])
    page = replace_table(f"a\n{START}\nold\n{END}\nb\n", new)
    assert page == f"a\n{START}\n\n{new}\n\n{END}\nb\n"
    assert replace_table(page, new) == page
    assert new.splitlines()[2:] == ["| norms | plain loop |  | ✓ |", "| norms | `lightning` | ✓ |  |"]
    with pytest.raises(ValueError, match="once each"):
        replace_table("a page without marks", new)
