"""How far long work is: a line that replaces itself on a terminal, now and then a line elsewhere, else nothing."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stabilizer import progress as progresses
from stabilizer.calibration.logs import find_runs, read_run
from stabilizer.progress import Progress
from tests.console_runs import on_a_terminal
from tests.launcher import run_distributed
from tests.localize_loops import Plan, grad_loc, run


class Clock:
    """Stands in for `time`, and is a minute long in a moment."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progresses, "time", found)
    return found


def test_without_a_terminal_a_line_after_5_seconds_and_every_10(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("searching", total=60, unit="passes") as progress:
        for second in range(1, 41):
            clock.now = second
            progress.advance()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"searching: {second} of at most 60 passes, {second} s" for second in (5, 15, 25, 35)
    ]


def test_what_ends_at_once_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("searching", total=3, unit="passes") as progress:
        for _ in range(3):
            progress.advance()
    assert capsys.readouterr().err == ""


def test_more_than_was_thought_is_no_mistake(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("searching", total=2, unit="passes") as progress:
        clock.now = 9
        progress.advance(3)
    assert "3 of at most 3 passes" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A terminal that takes nothing any more once it is gone."""

    is_gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.is_gone:
            raise OSError("input/output error")
        return super().write(text)


def test_a_terminal_that_is_gone_ends_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    before = sys.stdout
    with Progress("searching", total=3, unit="passes") as progress:
        clock.now = 9
        progress.advance()
        terminal.is_gone = True
        clock.now = 18
        progress.advance(2)
    assert "searching" in terminal.getvalue()
    assert (progress.done, sys.stdout, sys.stderr) == (3, before, terminal)


def test_a_stream_that_is_closed_ends_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "closed").open("w") as closed:
        pass
    monkeypatch.setattr("sys.stderr", closed)
    with Progress("searching", total=2, unit="passes") as progress:
        clock.now = 9
        progress.advance()
        progress.advance()
    assert progress.done == 2


def test_there_is_no_thread(clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progresses, "is_terminal", lambda stream: True)
    before = threading.active_count()
    with Progress("searching", total=2, unit="passes") as progress:
        clock.now = 9
        progress.advance()
        assert threading.active_count() == before
    assert "\x1b[2K" in capsys.readouterr().err, "it was on"


TERMINAL = """
import time
from stabilizer.progress import Progress
with Progress("searching step 7", total=6, unit="passes") as progress:
    for _ in range(6):
        time.sleep(0.2)
        progress.advance()
print("done")
"""


def test_a_terminal_has_one_line_that_goes_away() -> None:
    sent = on_a_terminal(TERMINAL)
    assert "searching step 7" in sent
    assert re.search(r"[3-6] of at most 6 passes", sent)
    assert "\x1b[2K" in sent.rpartition("searching step 7")[2].partition("done")[0], "the line is taken away"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)
    # What is left is what was printed: nothing of the line goes on below it.
    assert plain.rstrip().splitlines()[-1].strip().endswith("done")
    assert all(line.count("searching") <= 1 for line in re.split(r"[\r\n]+", plain))


@pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")
def test_a_search_counts_its_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progresses, "_FIRST", 0.0)
    monkeypatch.setattr(progresses, "_EVERY", 0.0)
    callback = grad_loc(tmp_path)
    run(Plan(), [callback])
    [incident] = callback.incidents
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("searching step 36: ")]
    assert len(lines) == incident.num_passes > 1
    assert re.fullmatch(rf"searching step 36: {incident.num_passes} of at most 16 passes, \d+ s", lines[-1])


def test_reading_logs_counts_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progresses, "_FIRST", 0.0)
    (tmp_path / "metrics.csv").write_text("step,grad_norm\n" + "".join(f"{step},1.5\n" for step in range(1000)))
    [files] = find_runs(tmp_path)
    assert len(read_run(files).series["grad_norm"]) == 1000
    assert capsys.readouterr().err.startswith("reading metrics.csv: 0 of at most 0 MB")


def _two_ranks(rank: int, world_size: int) -> str:
    import contextlib
    import io

    said: Any = io.StringIO()
    progresses_first, progresses._FIRST = progresses._FIRST, 0.0
    try:
        with contextlib.redirect_stderr(said), Progress("searching", total=2, unit="passes") as progress:
            progress.advance()
    finally:
        progresses._FIRST = progresses_first
    return str(said.getvalue())


def test_only_rank_0_shows_it() -> None:
    first, second = run_distributed(_two_ranks)
    assert first.startswith("searching: 1 of at most 2 passes")
    assert second == ""
