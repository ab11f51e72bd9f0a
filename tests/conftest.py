"""What every test gets: a seed, the worker pool's end, and a check that no process outlives its test."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import launcher
from tests.processes import MARK, kill_all, left_over
from tests.turns import turn

#: A reader's own modules, which the pages of the documentation import by their names there.
collect_ignore = ["docs_modules"]
#: Folder where the processes that run tests take turns.
_TURNS = "STABILIZER_TEST_TURNS"


def pytest_configure(config: pytest.Config) -> None:
    """Mark every process that this one will start, however far down."""
    os.environ[MARK] = uuid.uuid4().hex
    if not hasattr(config, "workerinput"):
        os.environ[_TURNS] = tempfile.mkdtemp(prefix="turns-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers."""
    launcher.shutdown()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(_TURNS), ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand on what is told at the end, where this is one of several processes that run tests."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["crashes"] = list(launcher.crashes)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a process that runs tests hands on."""
    launcher.crashes.extend(getattr(node, "workeroutput", {}).get("crashes", []))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test that measures time run alone; the first of all wrappers, so that no time limit counts the wait."""
    with turn(Path(os.environ[_TURNS]), is_alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell of workers that crashed and whose call was made again."""
    for crash in launcher.crashes:
        terminalreporter.section("A worker crashed, and its call was made again")
        terminalreporter.write_line(crash)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    # Tests of bare environments and of packaging never import torch: neither does this.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """What an earlier test compiled is compiled again: a graph taken from the cache would not be counted."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True)
def _same_warnings_in_workers(request: pytest.FixtureRequest) -> None:
    """The filters of the configuration, the command line and the test's own marks hold in the workers too."""
    lines = list(request.config.getini("filterwarnings")) + list(request.config.getoption("pythonwarnings") or [])
    for mark in reversed(list(request.node.iter_markers("filterwarnings"))):
        lines += mark.args
    launcher.set_warning_filters(lines)


@pytest.fixture(autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """A test that leaves a process running fails: on a user's machine that process would hold memory for ever."""
    yield
    left = left_over(os.environ[MARK], but_not=launcher.worker_pids(), patience=3.0)
    if left:
        kill_all(left)
        pytest.fail(f"The test left processes behind (now killed): {list(left.values())}", pytrace=False)
