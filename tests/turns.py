"""Lets a test that measures time run with no other beside it, where several processes run tests."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

__all__ = ["turn"]


@contextlib.contextmanager
def turn(folder: Path, *, is_alone: bool) -> Iterator[None]:
    """Wait for a turn among processes that share a folder, and hold it.

    Whoever wants to be alone closes the gate behind itself first: those that come later wait there, so that the wait
    is no longer than the test that runs now. Locks of files end with their process, however that ends; they are given
    back by name all the same, because a child that was forked meanwhile has the same open files.

    Args:
        folder: Exists.
        is_alone: Whether nobody else may have a turn meanwhile; else those that need not be alone share it.
    """
    with (folder / "gate.lock").open("w") as gate, (folder / "turns.lock").open("w") as turns:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(turns, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        if not is_alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(turns, fcntl.LOCK_UN)
            fcntl.flock(gate, fcntl.LOCK_UN)
