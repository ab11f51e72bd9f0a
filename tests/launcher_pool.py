"""The parent's side of the launcher: processes, pipes, deadlines and kills."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, BinaryIO, cast

MAX_WORLD_SIZE = 4
START_SECONDS = 180.0
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Failure:
    """What went wrong on one rank.

    Attributes:
        rank: Where.
        at: When, in seconds of the machine's monotonic clock: the earliest is the root cause.
        summary: One line.
        details: The traceback, or what is known of a process that died.
        pickled: The exception, or None where it cannot be pickled.
    """

    rank: int
    at: float
    summary: str
    details: str
    pickled: bytes | None = None

    @property
    def secondary(self) -> bool:
        """Whether this is only the echo of a peer that went away."""
        return "gloo/transport" in self.summary

    def exception(self) -> BaseException | None:
        """The exception itself, or None where it does not survive pickling."""
        with contextlib.suppress(Exception):
            loaded = pickle.loads(self.pickled) if self.pickled is not None else None
            return loaded if isinstance(loaded, BaseException) else None
        return None


@dataclass
class Worker:
    """One process, and what it has said in the present call."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int
    output: BinaryIO
    stacks: BinaryIO
    result: bytes | None = None
    failure: Failure | None = None
    released: bool = False
    done: bool = False
    trusted: bool = True
    output_start: int = 0
    stacks_start: int = 0

    @property
    def answered(self) -> bool:
        """Whether this rank's outcome is known."""
        return self.result is not None or self.failure is not None

    def send(self, message: tuple[Any, ...]) -> None:
        """Send, or let the death of the receiver show where answers are awaited."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def release(self) -> None:
        """Let it destroy its process group."""
        if not self.released:
            self.released = True
            self.send(("finish",))


@dataclass
class Pool:
    """Up to `MAX_WORLD_SIZE` workers; worker i is always rank i, and worker 0 hosts the rendezvous of all calls."""

    workers: list[Worker] = field(default_factory=list)
    active: list[Worker] = field(default_factory=list)
    busy: bool = False
    port: int = 0
    num_calls: int = 0
    owner: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        atexit.register(self.kill)

    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [worker.process.pid for worker in self.workers]

    def healthy(self) -> bool:
        """Whether every worker is alive and waits for a call, and belongs to this process (not to one that forked)."""
        return self.owner == os.getpid() and not self.busy and all(w.process.poll() is None for w in self.workers)

    def ensure(self, world_size: int) -> None:
        """Start what is missing, all at once, and wait until each has imported torch."""
        fresh = [self._start(rank) for rank in range(len(self.workers), world_size)]
        self.workers += fresh
        deadline = time.monotonic() + START_SECONDS
        for worker in fresh:
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"Worker {worker.rank} did not start within {START_SECONDS:g} s.")
            try:
                _, port = pickle.loads(worker.connection.recv_bytes())
            except EOFError:
                raise RuntimeError(f"Worker {worker.rank} died as it started:\n{self.output(worker.rank)}") from None
            self.port = port or self.port

    def submit(self, payload: bytes, *, world_size: int, timeout: float, filters: list[str]) -> None:
        """Hand one call to the first `world_size` workers."""
        self.busy = True
        self.num_calls += 1
        self.active = self.workers[:world_size]
        call = {
            "payload": payload,
            "world_size": world_size,
            "timeout": timeout,
            "filters": filters,
            "index": self.num_calls,
            "port": self.port,
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "path": list(sys.path),
        }
        for worker in self.active:
            worker.result, worker.failure, worker.released, worker.done = None, None, False, False
            worker.output_start, worker.stacks_start = _size(worker.output), _size(worker.stacks)
            worker.send(("call", call))

    def collect_outcomes(self, *, deadline: float, grace: float) -> None:
        """Wait until every rank has an outcome, or the deadline, or `grace` seconds after the first failure."""
        while self.unfinished() and time.monotonic() < deadline:
            failed_before = any(worker.failure for worker in self.active)
            self._receive([worker for worker in self.active if not worker.answered], deadline)
            if not failed_before and any(worker.failure for worker in self.active):
                deadline = min(deadline, time.monotonic() + grace)

    def finish(self, *, grace: float) -> bool:
        """Let every rank clean up, now that all have an outcome.

        Returns:
            Whether the workers can serve another call.
        """
        deadline = time.monotonic() + grace
        for worker in self.active:
            worker.release()
        while (waiting := [w for w in self.active if not w.done]) and time.monotonic() < deadline:
            self._receive(waiting, deadline)
        for rank, stack in self.stacks([worker.rank for worker in waiting]).items():
            summary = "the call ended, but its process group could not be destroyed"
            self.workers[rank].failure = self.workers[rank].failure or Failure(rank, time.monotonic(), summary, stack)
        self.busy = bool(waiting)
        return not waiting and all(worker.trusted for worker in self.active)

    def unfinished(self) -> list[int]:
        """Ranks without an outcome."""
        return [worker.rank for worker in self.active if not worker.answered]

    def failures(self) -> list[Failure]:
        """What failed, the first failure first."""
        found = [worker.failure for worker in self.active if worker.failure is not None]
        return sorted(found, key=lambda failure: (failure.secondary, failure.at))

    def results(self) -> list[bytes]:
        """Pickled results by rank, of ranks that did not fail."""
        return [worker.result for worker in self.active if worker.result is not None]

    def output(self, rank: int) -> str:
        """What a rank has written to stdout and stderr in this call."""
        worker = self.workers[rank]
        return _read_from(worker.output, worker.output_start)

    def stacks(self, ranks: list[int]) -> dict[int, str]:
        """The stacks of all threads of these ranks, by a signal that also reaches a process stuck in C++."""
        if not ranks:
            return {}
        before = {rank: _size(self.workers[rank].stacks) for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                self.workers[rank].process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        found = {}
        for rank in ranks:
            stack = _read_from(self.workers[rank].stacks, before[rank])
            found[rank] = stack or "(no stack: the process did not answer)"
        return found

    def kill(self) -> None:
        """Kill each worker's whole process group. SIGTERM would do nothing to a rank stuck in a collective."""
        if self.owner != os.getpid():
            return
        atexit.unregister(self.kill)
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in self.workers:
            worker.process.wait()
            worker.connection.close()
            os.close(worker.lifeline)
            worker.output.close()
            worker.stacks.close()
        self.workers, self.active, self.busy = [], [], False

    def _start(self, rank: int) -> Worker:
        ours, theirs = Pipe(duplex=True)
        lifeline_read, lifeline_write = os.pipe()
        # Files without a name: there is nothing to remove when this process is killed.
        output, stacks = (cast("BinaryIO", tempfile.TemporaryFile()) for _ in range(2))  # noqa: SIM115
        fds = (theirs.fileno(), lifeline_read, stacks.fileno())
        # The kernel's signal comes when the *thread* that forked ends: only the main thread may ask for it.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        path = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.launcher_worker", *map(str, (rank, parent, *fds))],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=fds,
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline_read)
        return Worker(rank, process, ours, lifeline_write, output, stacks)

    def _receive(self, workers: list[Worker], deadline: float) -> None:
        """Take what has arrived; look every half second for a death that no closed pipe tells."""
        by_connection = {worker.connection: worker for worker in workers}
        ready = wait(list(by_connection), timeout=max(0.0, min(0.5, deadline - time.monotonic())))
        for worker in workers:
            if worker.connection in ready:
                self._read(worker)
            elif worker.process.poll() is not None:
                self._mark_dead(worker)

    def _read(self, worker: Worker) -> None:
        try:
            kind, body = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._mark_dead(worker)
            return
        if kind == "result":
            worker.result = body
        elif kind == "failure":
            worker.failure = Failure(worker.rank, *body)
            # Its sockets close, so that peers in a collective with it fail at once instead of waiting.
            worker.release()
        else:
            worker.done, worker.trusted = True, body is None
            if body is not None and worker.failure is None:
                worker.failure = Failure(worker.rank, *body)

    def _mark_dead(self, worker: Worker) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(5)
        worker.done, worker.trusted = True, False
        summary = f"the process died with exit status {worker.process.returncode}"
        if worker.failure is None:
            stack = _read_from(worker.stacks, worker.stacks_start)
            details = "(a negative status is a signal)" + (f"\n{stack}" if stack else "")
            worker.failure = Failure(worker.rank, time.monotonic(), summary, details)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _read_from(file: BinaryIO, start: int) -> str:
    # Never seek: the worker writes at the position that it shares with this file.
    return os.pread(file.fileno(), _size(file) - start, start).decode(errors="replace")
