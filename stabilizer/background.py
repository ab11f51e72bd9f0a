"""Background: work that no step waits for, such as drawing, done by one thread in the order in which it came."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from stabilizer.errors import logger

__all__ = ["SHARED", "Background"]

#: How long the end of the program waits for what is left.
_SECONDS_AT_EXIT = 10.0
#: How long a person waits without being told why.
_SECONDS_IN_SILENCE = 2.0


class _Job(NamedTuple):
    what: str
    function: Callable[[], None]
    failed: Callable[[Exception], None]
    is_large: bool


class Background:
    """Does jobs one after another in a thread of its own, which is there only while there are any.

    A job must start no collective and touch no device: other ranks know nothing of it. The thread keeps no program
    alive.

    Args:
        max_jobs: How many may wait. One more is left out, which is told once: the step never waits for its logs.
        max_large: How many of them may be large ones.

    Raises:
        ValueError: If a limit is under 1.

    Example:
        >>> background = Background()
        >>> _ = background.add("a text", lambda: print("written"), failed=print)
        >>> background.drain()
        written
        True
    """

    def __init__(self, *, max_jobs: int = 1000, max_large: int = 16) -> None:
        if max_jobs < 1 or max_large < 1:
            raise ValueError(f"max_jobs={max_jobs}, max_large={max_large}: expected at least 1")
        self._max_jobs, self._max_large = max_jobs, max_large
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_warned = False
        self._given_up: _Job | None = None

    def add(
        self, what: str, function: Callable[[], None], *, failed: Callable[[Exception], None], is_large: bool = False
    ) -> bool:
        """Have a job done.

        Args:
            what: In a few words, for a person.
            function: Called in the thread.
            failed: Called in the thread with what the function has raised.
            is_large: Whether it holds much memory, or takes long.

        Returns:
            Whether it will be done.
        """
        with self._changed:
            num_large = sum(job.is_large for job in self._jobs)
            if len(self._jobs) >= self._max_jobs or (is_large and num_large >= self._max_large):
                self._warn(what)
                return False
            self._jobs.append(_Job(what, function, failed, is_large))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="stabilizer-background", daemon=True)
                self._thread.start()
        return True

    def drain(self, *, seconds: float | None = None) -> bool:
        """Wait until all jobs are done; says so where that takes long, and what is left where it takes too long.

        A job that was waited for in vain is not waited for again.

        Args:
            seconds: How long at most; `None` for as long as it takes.

        Returns:
            Whether they are.
        """
        start, is_told = time.monotonic(), False
        with self._changed:
            while self._jobs:
                waited = time.monotonic() - start
                if self._jobs[0] is self._given_up:
                    return False
                if seconds is not None and waited >= seconds:
                    self._given_up = self._jobs[0]
                    logger.warning(
                        "%d pictures and texts were not written: %s is not done after %.0f s; no longer waiting",
                        len(self._jobs),
                        self._given_up.what,
                        waited,
                    )
                    return False
                if waited >= _SECONDS_IN_SILENCE and not is_told:
                    is_told = True
                    most = "" if seconds is None else f", at most {seconds:.0f} s"
                    logger.warning("waiting for %d pictures and texts to be written%s", len(self._jobs), most)
                self._changed.wait(timeout=0.5 if seconds is None else min(seconds - waited, 0.5))
        return True

    def forget(self) -> None:
        """Drop all jobs and the thread: in a process that was forked, they are the parent's."""
        self._jobs.clear()
        self._changed, self._thread, self._given_up = threading.Condition(), None, None

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread, self._has_warned, self._given_up = None, False, None
                    self._changed.notify_all()
                    return
                job = self._jobs[0]  # it stays there until it is done, for whoever drains
            try:
                job.function()
            except Exception as error:
                self._fail(job, error)
            except BaseException as error:  # the thread is ours, and so it is not for a job to end it
                ended = RuntimeError(f"{job.what} has raised {error!r}")
                ended.__cause__ = error
                self._fail(job, ended)
            finally:
                with self._changed:
                    self._jobs.popleft()
            del job  # and with it what it holds, whatever comes next

    def _fail(self, job: _Job, error: Exception) -> None:
        try:
            job.failed(error)
        except BaseException:
            logger.exception("%s failed (%r), and so did telling it", job.what, error)

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s is left out: %d pictures and texts wait to be written, since the loggers are slower than the run",
                what,
                len(self._jobs),
            )


#: For all runs of the process: matplotlib draws in one thread at a time.
SHARED = Background()
atexit.register(SHARED.drain, seconds=_SECONDS_AT_EXIT)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SHARED.forget)
