"""Runs a function in fresh processes joined in a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["run_fresh"]


def run_fresh(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 300) -> list[Any]:
    """Call `function(rank, *args)` once in each of `world_size` new processes, one thread each.

    Args:
        function: Of an importable module.
        *args: What else it takes; picklable.
        world_size: Number of processes.
        timeout: Seconds for all of it.

    Returns:
        What each rank returned, by rank.

    Raises:
        RuntimeError: If a process ended without a result, or time is up.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [
            context.Process(target=_serve, args=(function, rank, world_size, store, results, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(function.__name__, processes, results, timeout=timeout)
        finally:
            for process in processes:
                process.join(10)
                process.kill()
                process.join()


def _collect(name: str, processes: list[Any], results: Any, *, timeout: float) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(processes):
        try:
            rank, answer = results.get(timeout=0.5)
            answers[rank] = answer
        except queue.Empty:
            dead = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in answers]
            if dead or time.monotonic() > deadline:
                why = f"ranks {dead} ended with an error (above)" if dead else f"no result within {timeout:g} s"
                raise RuntimeError(f"{name}: {why}") from None
    return [answers[rank] for rank in range(len(processes))]


def _serve(
    function: Callable[..., Any], rank: int, world_size: int, store: str, results: Any, args: tuple[Any, ...]
) -> None:
    # Two processes on two cores: more threads would wait for each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    results.put((rank, function(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()
