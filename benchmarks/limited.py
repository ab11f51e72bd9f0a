"""Runs a program with a time limit, and ends whatever it has started. Nothing is imported that is not Python's own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_limited"]


def run_limited(
    command: Sequence[str | Path], *, cwd: Path, environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run a program in a session of its own, so that its children end with it.

    Args:
        command: The program and its arguments.
        cwd: Where it runs.
        environment: All of its environment.
        seconds: Time limit.

    Returns:
        Its exit status, and what it wrote to both of its outputs.

    Raises:
        TimeoutError: If it was not ready in time; it has been ended.
    """
    with subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            told = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not ready after {seconds:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, *told)
