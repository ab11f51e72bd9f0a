"""Times functions in turn within one process, and turns the times into ratios that can be trusted."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = [
    "Figure",
    "Samples",
    "agreement",
    "busy",
    "ratio",
    "ratio_figure",
    "threads",
    "time_in_turn",
    "until_two_agree",
]

#: Largest relative difference of a ratio between two runs that agree.
TOLERANCE = 0.05
#: Seconds after which no further run is begun, for want of two that agree; `--quick` makes them few.
patience = 600.0
#: Seconds of every call, by function.
Samples = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        row: Which part of the benchmarks it belongs to.
        what: What is compared with what.
        value: The figure; `None` if it was not measured.
        unit: What the figure counts: "ratio", "collectives", "MB", "waits".
        target: Largest value that is good; `None` if there is no target.
        how: How it was measured, or why it was not.
        details: Times and whatever else stands behind the figure.
    """

    row: str
    what: str
    value: float | None
    unit: str
    target: float | None
    how: str
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; `None` without a target or a measurement."""
        return None if self.value is None or self.target is None else self.value <= self.target


def ratio(samples: Samples, pair: tuple[str, str]) -> float:
    """Median time of one function over that of another.

    Args:
        samples: Times.
        pair: Numerator and denominator.

    Returns:
        The ratio of medians.

    Example:
        >>> ratio({"ours": [2.0, 3.0, 9.0], "theirs": [2.0, 2.0, 2.0]}, ("ours", "theirs"))
        1.5
    """
    return statistics.median(samples[pair[0]]) / statistics.median(samples[pair[1]])


def agreement(first: Samples, second: Samples, pairs: Sequence[tuple[str, str]]) -> float:
    """How far two runs are apart.

    Args:
        first: Times of a run.
        second: Times of the next one.
        pairs: The ratios that matter.

    Returns:
        Largest relative difference of a ratio.

    Example:
        >>> agreement({"a": [1.0], "b": [1.0]}, {"a": [1.1], "b": [1.0]}, [("a", "b")])
        0.1...
    """
    return max(abs(ratio(second, pair) / ratio(first, pair) - 1) for pair in pairs)


def until_two_agree(
    run: Callable[[], Samples], pairs: Sequence[tuple[str, str]], *, runs: int = 8, tolerance: float = TOLERANCE
) -> tuple[Samples, float]:
    """Run after run, until two in a row agree.

    Args:
        run: Times everything several times.
        pairs: The ratios that must agree.
        runs: At most so many runs, at least 2; fewer once `patience` is at its end.
        tolerance: Largest relative difference of a ratio between two runs that agree.

    Returns:
        Times of the last two runs together, and how far their ratios are apart.

    Example:
        >>> until_two_agree(lambda: {"a": [3.0], "b": [2.0]}, [("a", "b")])
        ({'a': [3.0, 3.0], 'b': [2.0, 2.0]}, 0.0)
    """
    start = time.monotonic()
    previous, last = run(), run()
    for _ in range(2, runs):
        if agreement(previous, last, pairs) <= tolerance or time.monotonic() - start > patience:
            break
        previous, last = last, run()
    together = {name: previous[name] + last[name] for name in last}
    return together, agreement(previous, last, pairs)


def time_in_turn(functions: Mapping[str, Callable[[], object]], *, rounds: int) -> Samples:
    """Time functions, every one in every round.

    Args:
        functions: What to time; called with nothing between them.
        rounds: Calls of every function.

    Returns:
        Times.
    """
    samples: Samples = {name: [] for name in functions}
    # Everybody comes after everybody else equally often: what a call leaves in the cache helps all of them.
    orders = itertools.cycle(list(itertools.permutations(functions)))
    gc.collect()
    gc.disable()
    try:
        for order in itertools.islice(orders, rounds):
            for name in order:
                start = time.perf_counter()
                functions[name]()
                samples[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return samples


def ratio_figure(
    row: str,
    what: str,
    samples: Samples,
    pair: tuple[str, str],
    *,
    target: float | None,
    how: str,
    apart: float | None = None,
    num_threads: int | None = None,
) -> Figure:
    """A figure that is a ratio of medians.

    Args:
        row: Which part of the benchmarks it belongs to.
        what: What is compared with what.
        samples: Times.
        pair: Numerator and denominator.
        target: Largest ratio that is good.
        how: What else there is to say beside the number of calls and threads.
        apart: How far the ratios of two runs are apart.
        num_threads: Threads of a process; default those of this one.

    Returns:
        The figure, with medians and smallest times in its details.
    """
    details: dict[str, Any] = {
        "median_seconds": {name: statistics.median(samples[name]) for name in pair},
        "smallest_seconds": {name: min(samples[name]) for name in pair},
        "ratio_of_smallest": min(samples[pair[0]]) / min(samples[pair[1]]),
        "runs_apart": apart,
    }
    numbers = f"n={len(samples[pair[0]])}, {threads(num_threads)}"
    doubt = "" if apart is None or apart <= TOLERANCE else f"; two runs differ by {apart:.0%}"
    return Figure(row, what, ratio(samples, pair), "ratio", target, f"{how}, {numbers}{doubt}", details)


def threads(num_threads: int | None = None) -> str:
    """How many threads a process computes with, in words.

    Args:
        num_threads: Default those of this process.

    Example:
        >>> threads(1), threads(2)
        ('1 thread', '2 threads')
    """
    num_threads = torch.get_num_threads() if num_threads is None else num_threads
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"


def busy() -> str | None:
    """What to tell whoever runs benchmarks on a machine that has other work to do.

    Returns:
        A warning, or `None` if no more processes want to run than there are cores.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return None
    return f"the load is {load:.1f} on {cores} cores: other work disturbs these figures; run them again when it is done"
