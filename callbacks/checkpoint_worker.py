"""A thread that verifies what was saved, while training goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from stabilizer.checkpoints.guard_file import Expected, Guard
from stabilizer.checkpoints.keeping import Keeper
from stabilizer.checkpoints.shelves import shelf_of
from stabilizer.checkpoints.verifying import CheckpointChangedError, verify_checkpoint
from stabilizer.errors import logger

__all__ = ["CheckpointWorker"]

_MAX_ATTEMPTS = 4
_SECONDS_TO_DELETE = 0.5


@dataclasses.dataclass(eq=False)
class _Job:
    path: Path
    step: int
    expected: Expected | None
    ready: Callable[[], None] | None
    is_fleeting: bool
    was_there: bool
    # Raised when the checkpoint is moved or written over: what was read until then says nothing.
    generation: int = 0
    is_off: bool = False

    def is_of(self, generation: int) -> bool:
        return not self.is_off and self.generation == generation


class CheckpointWorker:
    """Verifies one checkpoint after the other, in the order of the saves.

    The thread lives while there is something to do.

    Args:
        keeper: Of the process that writes.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.num_good = self.num_bad = 0
        #: Verdicts that nobody has told of yet.
        self.verdicts: deque[tuple[Path, Guard]] = deque()
        self._jobs: deque[_Job] = deque()
        self._current: _Job | None = None
        self._lock = keeper.lock
        self._thread: threading.Thread | None = None
        self._is_running = False

    def verify(
        self,
        path: Path,
        *,
        step: int,
        expected: Expected | None,
        ready: Callable[[], None] | None = None,
        is_fleeting: bool = False,
    ) -> None:
        """Have a checkpoint verified.

        Args:
            path: Of it.
            step: The optimizer step that comes next.
            expected: What it should have.
            ready: Waits until all of it is written.
            is_fleeting: Whether the host may delete it at any time, unasked.
        """
        with self._lock:
            self.drop(path)
            self._jobs.append(_Job(path, step, expected, ready, is_fleeting, os.path.lexists(path)))
            if not self._is_running:
                self._is_running = True
                self._thread = threading.Thread(target=self._run, name="stabilizer checkpoints", daemon=True)
                self._thread.start()

    @property
    def num_open(self) -> int:
        """How many checkpoints have no verdict yet."""
        with self._lock:
            return len(self._jobs) + (self._current is not None)

    def has(self, path: Path) -> bool:
        """Whether a checkpoint is being verified, or will be.

        Args:
            path: Of it.
        """
        with self._lock:
            return bool(self._open(path))

    def drop(self, path: Path) -> None:
        """Forget a checkpoint that is being deleted or written over.

        Args:
            path: Of it.
        """
        with self._lock:
            for job in self._open(path):
                job.is_off = True

    def move(self, path: Path, target: Path) -> None:
        """Follow a checkpoint that was moved.

        Args:
            path: Where it was.
            target: Where it is.
        """
        with self._lock:
            for job in self._open(path):
                job.path, job.generation = target, job.generation + 1

    def wait(self) -> None:
        """Wait until all verdicts are there."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _open(self, path: Path) -> list[_Job]:
        current = [] if self._current is None else [self._current]
        return [job for job in (*current, *self._jobs) if job.path == path and not job.is_off]

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._current, self._is_running = None, False
                    return
                job = self._current = self._jobs.popleft()
            try:
                self._do(job)
            except Exception:  # whatever it is: training goes on
                logger.exception("verifying %s failed; it counts as not verified", job.path)

    def _do(self, job: _Job) -> None:
        if job.ready is not None:
            job.ready()
        job.was_there |= os.path.lexists(job.path)
        for attempt in range(_MAX_ATTEMPTS):
            path, generation, guard = job.path, job.generation, None
            if job.is_off:
                return
            with contextlib.suppress(CheckpointChangedError):
                guard = verify_checkpoint(path, expected=job.expected, step=job.step)
            if job.is_fleeting and not attempt and guard is not None and guard.verdict == "bad":
                time.sleep(_SECONDS_TO_DELETE)  # what is missing may be so because all of it is just being deleted
                continue
            self.keeper.look_around(shelf_of(path))
            with self._lock:
                if guard is None or not job.is_of(generation):
                    continue
                is_known = job.was_there or job.is_fleeting or self.keeper.entry(path).guard is None
                if is_known and not os.path.lexists(path):
                    logger.info("%s was deleted before it was verified", path)
                    self.keeper.forget(path)
                else:
                    self._settle(path, guard)
                return
        logger.warning("%s was written to whenever it was read; it counts as not verified", job.path)

    def _settle(self, path: Path, guard: Guard) -> None:
        self.keeper.settle(path, guard)
        self.num_good += guard.verdict == "good"
        self.num_bad += guard.verdict == "bad"
        self.verdicts.append((path, guard))
