"""Runs a function in several processes of this machine, with what `torch.distributed` reads from the environment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

__all__ = ["RankError", "run_processes"]

# What a launcher or a cluster's scheduler has left describes another job.
_FOREIGN_PREFIXES = ("ACCELERATE_", "FSDP_", "PMI_", "OMPI_", "MV2_")
_RANK_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


class RankError(RuntimeError):
    """A process failed; it has shown its own traceback."""


def run_processes(
    function: Callable[..., None], *, args: tuple[Any, ...] = (), num_processes: int, has_ranks: bool = True
) -> None:
    """Run a function in new processes and wait; when one fails, or this one is told to end, all of them end.

    Args:
        function: Of a module: a new process finds it by name.
        args: What it is called with; travels by pickle.
        num_processes: How many.
        has_ranks: Whether the processes find their ranks in the environment, as after `torchrun`.

    Raises:
        RankError: If a process ends with a status other than 0.
        KeyboardInterrupt: After Ctrl-C.
    """
    context = multiprocessing.get_context("spawn")
    addresses = _addresses(num_processes) if has_ranks else [{} for _ in range(num_processes)]
    processes: list[BaseProcess] = []
    before = signal.signal(signal.SIGTERM, _end)
    try:
        for address in addresses:
            # Daemons: whatever ends this process without the lines below takes them along.
            processes.append(context.Process(target=_run, args=(function, args, num_processes, address), daemon=True))
            processes[-1].start()
        running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
        while running:
            for sentinel in wait(list(running)):
                rank = running.pop(sentinel)
                _check(rank, processes[rank])
    finally:
        for process in processes:
            if process.pid is not None:
                # No grace: one that waits in a collective for a process that is gone hears nothing else.
                process.kill()
                process.join()
        signal.signal(signal.SIGTERM, before)


def _addresses(num_processes: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


def _run(function: Callable[..., None], args: tuple[Any, ...], num_processes: int, address: dict[str, str]) -> None:
    # Ctrl-C in a terminal reaches every process. This one has nothing to tidy up, and its traceback would say nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in list(os.environ):
        if name.startswith(_FOREIGN_PREFIXES) or name in _RANK_VARIABLES:
            del os.environ[name]
    os.environ.update(address)
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        # Each process would take all cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    function(*args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _check(rank: int, process: BaseProcess) -> None:
    process.join()
    if process.exitcode == -signal.SIGINT:
        raise KeyboardInterrupt
    if process.exitcode:
        raise RankError(f"rank {rank} ended with status {process.exitcode}, and the run with it")


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
