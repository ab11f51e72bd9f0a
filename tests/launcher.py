"""Runs a function on several processes that stay alive between tests.

Starting a process and importing torch costs seconds, a collective costs microseconds: the workers are therefore started
once, on first use, and each call builds and destroys its own process group in them. Whatever goes wrong in a call
(an exception, a deadlock, a crash, a left-over child) comes back as one error, and the workers are replaced when they
can no longer be trusted.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.launcher_pool import MAX_WORLD_SIZE, Failure, Pool

__all__ = ["MAX_WORLD_SIZE", "WorkerError", "run_distributed", "set_warning_filters", "shutdown", "worker_pids"]

#: Once a rank has failed, its peers are of no use: those in a collective with it wait for ever.
GRACE_SECONDS = 5.0

#: What is known of each crash in native code whose call was made again.
crashes: list[str] = []

_pool: Pool | None = None
_warning_filters: list[str] | None = None


class WorkerError(RuntimeError):
    """One or more ranks failed; the message holds every failing rank's traceback, the root cause first.

    The root cause is also this error's `__cause__` where it can be pickled.

    Attributes:
        failures: What each failing rank reported, the first failure first.
    """

    def __init__(self, message: str, *, failures: list[Failure]) -> None:
        super().__init__(message)
        self.failures = failures


def run_distributed(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60, **kwargs: Any
) -> list[Any]:
    """Call `function(rank, world_size, *args, **kwargs)` on `world_size` processes joined in a gloo process group.

    Inside the call the environment is that of `torchrun`, so that a host framework (a Lightning `Trainer` with
    `devices=world_size`) trains in these processes and this group. Environment variables, working directory, import
    path and warning filters are the caller's. Random seeds are 0, threads 1, and nothing survives the call.

    Args:
        function: A function of an importable module: it travels by name.
        *args: Picklable; tensors on the CPU.
        world_size: Number of processes, at most `MAX_WORLD_SIZE`.
        timeout: Seconds for the whole call, start of the workers not included.
        **kwargs: Picklable.

    Returns:
        What each rank returned, by rank; tensors detached, as copies on the CPU.

    Raises:
        WorkerError: A rank raised, died, or left a child process, a thread or an unraisable exception behind.
        TimeoutError: The call took longer than `timeout`; the message holds each unfinished rank's stack.
        ValueError: `world_size` is out of range or the call cannot be pickled.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size={world_size} is not in 1..{MAX_WORLD_SIZE}: the pool has no more workers.")
    if function.__module__ == "__main__":
        raise ValueError(f"{function.__qualname__} is in __main__, which workers cannot import: move it to a module.")
    try:
        payload = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The call of {function.__qualname__} cannot be pickled ({error}): give a function at the top level of a"
            " module and plain arguments."
        ) from error
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        return _run_in_pool(payload, name=name, world_size=world_size, timeout=timeout)
    except WorkerError as error:
        # No line of Python can do that: gloo has been seen to crash in a DTensor's collective, once in some thousand
        # calls. It is told at the end of the session, and must not happen twice in a row.
        if f"exit status {-signal.SIGSEGV}" not in str(error):
            raise
        crashes.append(str(error))
    shutdown()
    return _run_in_pool(payload, name=name, world_size=world_size, timeout=timeout)


def _run_in_pool(payload: bytes, *, name: str, world_size: int, timeout: float) -> list[Any]:
    pool = _started_pool(world_size)
    try:
        return _run(pool, payload, name=name, world_size=world_size, timeout=timeout)
    except BaseException:
        # Ctrl-C and a test's own time limit leave ranks in the middle of a call: never hand those to the next test.
        if pool.busy:
            shutdown()
        raise


def set_warning_filters(filters: list[str]) -> None:
    """Set the warning filters of the next calls.

    Args:
        filters: Lines as in pytest's `filterwarnings`, later lines first in force.
    """
    global _warning_filters
    _warning_filters = list(filters)


def worker_pids() -> list[int]:
    """Process ids of the live workers (each the leader of its own process group and session)."""
    return _pool.pids() if _pool is not None else []


def shutdown() -> None:
    """Kill the workers and all they started; the next call starts fresh ones."""
    global _pool
    if _pool is not None:
        _pool.kill()
        _pool = None


def _started_pool(world_size: int) -> Pool:
    global _pool
    if _pool is not None and not _pool.healthy():
        shutdown()
    if _pool is None:
        _pool = Pool()
    try:
        _pool.ensure(world_size)
    except BaseException:
        shutdown()
        raise
    return _pool


def _run(pool: Pool, payload: bytes, *, name: str, world_size: int, timeout: float) -> list[Any]:
    filters = _warning_filters if _warning_filters is not None else _filters_of_the_project()
    pool.submit(payload, world_size=world_size, timeout=timeout, filters=filters)
    deadline = time.monotonic() + timeout
    pool.collect_outcomes(deadline=deadline, grace=GRACE_SECONDS)
    unfinished = pool.unfinished()
    if unfinished:
        stacks = pool.stacks(unfinished)
        failures, output = pool.failures(), {rank: pool.output(rank) for rank in range(world_size)}
        shutdown()
        waiting = "".join(_section(f"rank {rank}, unfinished", stacks[rank], output[rank]) for rank in unfinished)
        if not failures:
            raise TimeoutError(f"{name} did not end within {timeout:g} s on ranks {unfinished}.{waiting}")
        raise _worker_error(name, failures, output=output, tail=waiting)
    clean = pool.finish(grace=2 * GRACE_SECONDS)
    failures, output = pool.failures(), {rank: pool.output(rank) for rank in range(world_size)}
    results = pool.results()
    if not clean:
        shutdown()
    if failures:
        raise _worker_error(name, failures, output=output)
    return [pickle.loads(result) for result in results]


def _worker_error(name: str, failures: list[Failure], *, output: dict[int, str], tail: str = "") -> WorkerError:
    ranks = ", ".join(str(failure.rank) for failure in failures)
    message = f"{name} failed on rank {ranks}: {failures[0].summary}"
    for failure in failures:
        message += _section(f"rank {failure.rank}: {failure.summary}", failure.details, output[failure.rank])
    error = WorkerError(message + tail, failures=failures)
    error.__cause__ = failures[0].exception()
    return error


def _section(title: str, body: str, output: str) -> str:
    text = f"\n\n=== {title}\n{body.rstrip()}"
    return text + (f"\n--- its output\n{output.rstrip()}" if output.strip() else "")


def _filters_of_the_project() -> list[str]:
    """Outside pytest: the same lines, from the file where pytest finds them."""
    # Python 3.10 has no parser of its own; pytest brings this one.
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "pyproject.toml")
    with open(path, "rb") as file:
        pytest_options = tomllib.load(file)["tool"]["pytest"]
    return list(pytest_options.get("ini_options", pytest_options)["filterwarnings"])
