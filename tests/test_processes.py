"""Workers end with their parent, however it ends, and a process that a test forgot is found."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

from tests import launcher, processes
from tests.processes import is_alive

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_PARENT = """
    import os, sys, threading, time
    sys.path.insert(0, {root!r})
    from tests import launcher, test_launcher
    launcher.set_warning_filters([])
    def start():
        launcher.run_distributed(test_launcher._pid)
        print(*launcher.worker_pids(), flush=True)
    def hang():
        start()
        launcher.run_distributed(test_launcher._deadlock)
    {then}
"""


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("start()", id="ends"),
        pytest.param("hang()", id="killed in a collective"),
        # The kernel watches the main thread alone: here only the closed pipe can tell.
        pytest.param("threading.Thread(target=hang).start()", id="killed, started by a thread"),
        # A forked child keeps the pipe open: here only the kernel can tell.
        pytest.param("start(); os.fork(); time.sleep(1000)", id="killed, with a child that lives on"),
    ],
)
def test_workers_end_with_their_parent(then: str) -> None:
    code = textwrap.dedent(_PARENT).format(root=ROOT, then=then)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if then != "start()":
            time.sleep(0.5)  # for the ranks to be deep in their collective
            assert all(is_alive(pid) for pid in pids)
            parent.kill()
        parent.wait(30)
        deadline = time.monotonic() + 10
        while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)
    if "fork" in then:
        orphans = processes.left_over(os.environ[processes.MARK], but_not=launcher.worker_pids())
        assert len(orphans) == 1
        processes.kill_all(orphans)


def test_an_orphan_is_found_by_its_mark() -> None:
    mark = os.environ[processes.MARK]
    code = "import subprocess as s; print(s.Popen(['sleep', '1000'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    found = processes.left_over(mark, but_not=launcher.worker_pids())
    assert list(found) == [int(answer.stdout)]
    assert "sleep 1000" in found[int(answer.stdout)]
    processes.kill_all(found)
    assert processes.left_over(mark, but_not=launcher.worker_pids(), patience=3.0) == {}
