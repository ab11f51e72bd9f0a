"""Finds processes that a test started, also those whose parent is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping

__all__ = ["MARK", "is_alive", "kill_all", "left_over"]

#: An environment variable that children inherit: parents can die, this stays.
MARK = "STABILIZER_TEST_RUN"


def left_over(mark: str, *, but_not: Collection[int] = (), patience: float = 0.0) -> dict[int, str]:
    """Living processes that carry a mark, except this one.

    Args:
        mark: The value of `MARK` in their environment.
        but_not: Leaders of sessions that may stay.
        patience: Seconds to wait for processes that are about to end.

    Returns:
        Process id -> process id and command line. Always empty where there is no /proc.
    """
    deadline = time.monotonic() + patience
    while (found := _marked(f"{MARK}={mark}".encode(), but_not)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not.

    Args:
        pid: Its id.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill_all(processes: Mapping[int, str]) -> None:
    """SIGKILL each of them.

    Args:
        processes: As found by `left_over`.
    """
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(needle: bytes, but_not: Collection[int]) -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc") if sys.platform == "linux" else []:
        # A process that ends while we look, a zombie or another user's: none of them is ours to report.
        with contextlib.suppress(OSError):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            with open(f"/proc/{entry}/environ", "rb") as file:
                if needle not in file.read().split(b"\0") or os.getsid(int(entry)) in but_not:
                    continue
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
            if command and "multiprocessing.resource_tracker" not in command:
                found[int(entry)] = f"{entry} ({command[:160]})"
    return found
