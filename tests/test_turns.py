"""Tests that measure time run alone: two processes that take turns, and two that run tests."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.environments import ROOT, run_pytest

PROGRAM = """
import json, pathlib, sys, time
sys.path.insert(0, {root!r})
from tests.turns import turn
folder, name = pathlib.Path({folder!r}), sys.argv[1]
for number in range(20):
    is_alone = name == "a" and number % 4 == 0
    with turn(folder, is_alone=is_alone):
        start = time.monotonic()
        time.sleep(0.02)
        print(json.dumps([is_alone, start, time.monotonic()]), flush=True)
"""


def test_nobody_has_a_turn_beside_one_alone(tmp_path: Path) -> None:
    program = PROGRAM.format(root=str(ROOT), folder=str(tmp_path))
    running = [subprocess.Popen([sys.executable, "-c", program, name], stdout=subprocess.PIPE) for name in "ab"]
    try:
        own, others = ([json.loads(line) for line in one.communicate(timeout=60)[0].splitlines()] for one in running)
    finally:
        for one in running:
            one.kill()
    assert len(own) == len(others) == 20
    overlaps = [alone for alone, start, end in own for _, begin, stop in others if begin < end and start < stop]
    assert True not in overlaps
    assert overlaps  # those that need not be alone are not


TESTS = """
import time, pytest

{mark}
@pytest.mark.parametrize("number", range(6))
def test_one(number):
    start = time.monotonic()
    time.sleep(0.05)
    with open({times!r}, "a") as file:
        file.write(f"{name} {{start}} {{time.monotonic()}}\\n")
"""


def test_a_marked_test_runs_beside_no_other(tmp_path: Path) -> None:
    times = tmp_path / "times"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_configure, pytest_runtest_protocol, pytest_unconfigure\n", encoding="utf-8"
    )
    for name, mark in [("a", "@pytest.mark.alone"), ("b", "")]:
        content = textwrap.dedent(TESTS.format(mark=mark, times=str(times), name=name))
        (tmp_path / f"test_{name}.py").write_text(content, encoding="utf-8")
    run_pytest("-n", "2", "--dist", "loadfile", ".", cwd=tmp_path, path=ROOT, seconds=100)
    rows = [line.split() for line in times.read_text(encoding="utf-8").splitlines()]
    spans = {name: [(float(start), float(end)) for kind, start, end in rows if kind == name] for name in "ab"}
    assert {name: len(found) for name, found in spans.items()} == {"a": 6, "b": 6}
    assert not [1 for start, end in spans["a"] for begin, stop in spans["b"] if begin < end and start < stop]
