"""All benchmarks run by one command, and the pages say what it measured."""

from __future__ import annotations

import doctest
import importlib
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import jobs, page, reports, timing
from benchmarks.command import run as run_rows
from benchmarks.jobs import INSIDE_OTHERS, JOBS, Job, Outcome, run_job
from benchmarks.page import COSTS, MARKS, QUOTED, costs, replace_between, table
from benchmarks.timing import Figure
from tests.environments import ROOT

#: What stands in for a benchmark: its output is asked for as of a real one.
WRITES = """
import json, sys
output = sys.argv[sys.argv.index("--output") + 1]
row = sys.argv[1]
value, what = (0.5, "all statistics of a step / torch._foreach_norm") if row == "good" else (1.5, "slow | wide / fast")
how = "".join(option for option in ("--tiny", "--quick") if option in sys.argv)
figure = {"row": row, "what": what, "value": value, "unit": "ratio", "target": 1.0, "how": how, "details": {}}
json.dump({"figures": [{**figure, "is_met": value <= 1}]}, open(output, "w"))
"""
FAILS = "import sys\nsys.exit('there is no way')"
SILENT = ""
HANGS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("child").write_text(str(child.pid))
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with benchmarks that take no time."""
    (tmp_path / "benchmarks").mkdir()
    programs = {"gradient_statistics": WRITES, "fails": FAILS, "silent": SILENT, "hangs": HANGS}
    for name, program in programs.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(program)
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command with pages of its own."""
    good, bad = Job("gradient_statistics", "good"), Job("gradient_statistics", "bad", is_long=True)
    monkeypatch.setattr(command, "JOBS", (good, bad, Job("fails", is_long=True)))
    (folder / "page.md").write_text(f"before\n{MARKS[0]}\nstale\n{MARKS[1]}\nafter\n")
    (folder / "readme.md").write_text(f"before\n{COSTS[0]}\nstale\n{COSTS[1]}\nafter\n")
    paths = [f"--{name}={folder / file}" for name, file in (("page", "page.md"), ("readme", "readme.md"))]
    return lambda *arguments: command.main([*arguments, *paths, f"--results={folder}"])


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]


def test_every_benchmark_is_run() -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py") if "\nif __name__ ==" in path.read_text()}
    known = {job.benchmark for job in JOBS}
    assert files == known | set(INSIDE_OTHERS)
    assert len({job.name for job in JOBS}) == len(JOBS), "one is run twice"
    assert set(INSIDE_OTHERS.values()) <= {job.name for job in JOBS}


@pytest.mark.parametrize("benchmark", sorted({job.benchmark for job in JOBS if job.row}))
def test_every_row_of_a_benchmark_is_run(benchmark: str) -> None:
    rows = importlib.import_module(f"benchmarks.{benchmark}").ROWS
    assert [job.row for job in JOBS if job.benchmark == benchmark] == list(rows)


def test_figures_come_from_a_process_of_its_own(folder: Path) -> None:
    outcome = run_job(Job("gradient_statistics", "good"), folder)
    assert outcome.error is None
    assert [(figure.value, figure.is_met, figure.how) for figure in outcome.figures] == [(0.5, True, "")]
    for options in ({"tiny": True}, {"quick": True}):
        [name] = options
        assert run_job(Job("gradient_statistics", "good"), folder, **options).figures[0].how == f"--{name}"
    assert run_job(Job("gradient_statistics", "good", quick=""), folder, quick=True).figures[0].how == ""


@pytest.mark.parametrize(("name", "error"), [("fails", "exit status 1: there is no way"), ("silent", "no figures")])
def test_one_that_fails_says_so(folder: Path, name: str, error: str) -> None:
    (folder / f"{name}.json").write_text('{"figures": []}')  # of an earlier run: it must not stand in for this one
    outcome = run_job(Job(name), folder)
    assert error in str(outcome.error)
    assert not outcome.figures


def test_one_that_hangs_is_ended_with_its_children(folder: Path) -> None:
    start = time.monotonic()
    outcome = run_job(Job("hangs", seconds=3), folder)
    assert outcome.error == "not ready after 3 s"
    assert time.monotonic() - start < 30
    child = int((folder / "child").read_text())
    deadline = time.monotonic() + 10
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    """Whether it still runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_table_of_all_is_written_and_quoted(folder: Path, run: Callable[..., int]) -> None:
    assert run() == 0
    text = (folder / "page.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale" not in text
    head, rule, *rows = _rows(text)
    assert len(head) == len(rule) == 6
    assert rows == [["gradient_statistics", "all statistics of a step", "torch._foreach_norm", "0.5", "1", ""]]
    assert re.search(r"on \d{4}-\d\d-\d\d: torch-stabilizer \S+, torch \d\S+, lightning \d", text)
    assert f"{os.cpu_count()} cores" in text
    quoted = _rows((folder / "readme.md").read_text())
    assert len(quoted) == 2 + len(QUOTED)
    assert quoted[2][2:] == ["0.5", "1"]
    assert {row[2] for row in quoted[3:]} == {"not measured"}


def test_what_failed_and_what_is_over_its_limit_is_seen(folder: Path, run: Callable[..., int]) -> None:
    assert run("--long") == 1
    rows = _rows((folder / "page.md").read_text().replace("\\|", "!"))
    assert rows[3] == ["gradient_statistics", "slow ! wide", "fast", "**1.5**", "1", ""]
    assert rows[4] == ["fails", "all", "", "**failed**", "", "exit status 1: there is no way"]


def test_a_missed_limit_is_an_error_only_if_asked(run: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "JOBS", (Job("gradient_statistics", "bad"),))
    assert run() == 0
    assert run("--check") == 1


def test_some_benchmarks_are_shown_and_not_written(
    folder: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("gradient_statistics") == 0
    assert "slow" in capsys.readouterr().out, "one that is named is run, however long it takes"
    assert "stale" in (folder / "page.md").read_text()
    with pytest.raises(SystemExit):
        run("cliping")
    assert "'cliping' is none of gradient_statistics, fails" in capsys.readouterr().err


def test_tiny_figures_do_not_replace_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "JOBS", ())
    before = (ROOT / "benchmarks" / "README.md").read_text()
    assert command.main(["--tiny", f"--results={tmp_path}"]) == 0
    assert (ROOT / "benchmarks" / "README.md").read_text() == before


def test_a_quick_run_says_so(folder: Path, run: Callable[..., int]) -> None:
    assert run("--quick") == 0
    assert "A quick run:" in (folder / "page.md").read_text()
    assert _rows((folder / "page.md").read_text())[2][5] == "--quick"


def test_a_quick_benchmark_makes_two_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    num_runs = []
    runs = itertools.cycle([{"a": [1.0], "b": [1.0]}, {"a": [2.0], "b": [1.0]}])  # no two of them agree

    def row(*, tiny: bool) -> list[Figure]:
        num_runs.append(0)

        def run() -> timing.Samples:
            num_runs[-1] += 1
            return next(runs)

        timing.until_two_agree(run, [("a", "b")], runs=5)
        return []

    for options in ([], ["--quick"], []):
        assert run_rows({"row": row}, title="", results=tmp_path / "all.json", arguments=options) == 0
    assert num_runs == [5, 2, 5]


def test_quoting_measures_nothing(folder: Path, run: Callable[..., int]) -> None:
    text = table([Outcome(Job("clipping"), [_figure()], None, 1.0)])
    (folder / "page.md").write_text(f"{MARKS[0]}\n{text}\n{MARKS[1]}\n")
    assert run("--quote") == 0
    assert not list(folder.glob("*.json"))
    values = {row[2] for row in _rows((folder / "readme.md").read_text())[2:]}
    assert values == {"not measured", "**0.9**"}


def test_a_page_without_a_place_for_the_quote_is_an_error(
    folder: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "readme.md").write_text(f"{COSTS[1]} {COSTS[0]}")
    assert run("--quote") == 1
    assert "readme.md quotes nothing: the page must hold <!-- costs:start -->" in capsys.readouterr().err
    assert (folder / "readme.md").read_text() == f"{COSTS[1]} {COSTS[0]}"


def _figure() -> Figure:
    what = "LayerClip and AdaptiveClip, whole step, nothing clipped / clip_grad_norm_"
    return Figure("one_process", what, 0.9, "ratio", 0.8, "")


def test_every_row_that_is_quoted_is_measured() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert replace_between(text, MARKS, "") != text, "there is no table"
    assert {tuple(row[:3]) for row in _rows(text)} >= set(QUOTED)
    assert "mean nothing" not in text.partition(MARKS[0])[2], "the table is of tiny sizes"


def test_readme_says_what_the_table_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = costs((ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"))
    assert replace_between(readme, COSTS, quoted) == readme, "run scripts/benchmark --quote"


def test_the_command_runs_real_benchmarks(tmp_path: Path) -> None:
    arguments = ["--tiny", "rollout", f"--results={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert [row[0] for row in _rows(done.stdout)[2:]] == ["rollout"] * 3
    assert "rollout: 3 figures" in done.stderr


def test_the_examples_hold() -> None:
    for module in (jobs, page, reports):
        assert doctest.testmod(module).failed == 0
        assert doctest.testmod(module).attempted > 0
