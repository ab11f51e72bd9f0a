"""What conditions and skip lists should do, written down once more: slow, and with nothing of the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["dropped", "loss_troubles", "nonfinite_troubles"]


def nonfinite_troubles(bad: Sequence[bool], *, num: int, window: int) -> list[tuple[int, int]]:
    """Step at which it holds and first bad step, each time that `num` bad steps lie within `window`."""
    found, counted = [], [step for step, is_bad in enumerate(bad) if is_bad]
    start = 0
    for position, step in enumerate(counted):
        inside = [other for other in counted[start : position + 1] if step - other < window]
        if len(inside) >= num:
            found.append((step, inside[0]))
            start = position + 1
    return found


def loss_troubles(losses: Sequence[float], *, k: float, num_steps: int, window: int) -> list[tuple[int, int]]:
    """Step at which it holds and first bad step.

    A spike begins with a loss over median + k sigma of the last `window` losses outside spikes (at least 20 of them),
    sigma being the distance of the quartiles over that of a standard normal, and at least 1 % of the median. It ends
    with three losses in a row under the limit. Within it, every `num_steps`-th loss over the limit counts.
    """
    usual: list[tuple[int, float]] = []
    found: list[tuple[int, int]] = []
    spike: dict[str, Any] | None = None
    for step, loss in enumerate(losses):
        median, sigma = scale([value for _, value in usual[-window:]])
        limit = median + k * sigma
        if limit < math.inf and not loss <= limit:
            if spike is None:
                spike = {"first": beginning(usual[-window:], step, level=median + k / 2 * sigma), "num": 0}
            spike["num"], spike["back"] = spike["num"] + 1, []
            if spike["num"] % num_steps == 0:
                found.append((step, spike["first"]))
        elif spike is not None:
            spike["back"].append((step, loss))
            if len(spike["back"]) == 3:
                usual, spike = [*usual, *spike["back"]], None
        elif math.isfinite(loss):
            usual.append((step, loss))
    return found


def scale(values: Sequence[float]) -> tuple[float, float]:
    """Median and sigma; infinite while there are too few."""
    if len(values) < 20:
        return math.inf, math.inf
    low, median, high = np.percentile(np.array(values, dtype=np.float64), [25, 50, 75])
    return float(median), float(max((high - low) / (2 * 0.6744897501960817), 0.01 * abs(median)))


def beginning(usual: Sequence[tuple[int, float]], step: int, *, level: float) -> int:
    """The step before the first of the losses over a level that lead up to a step without a gap."""
    while usual and usual[-1] == (step - 1, usual[-1][1]) and usual[-1][1] > level:
        usual, step = usual[:-1], step - 1
    return max(step - 1, 0)


def dropped(entries: Sequence[dict[str, int]], *, num_epochs: int, num_batches: int) -> list[tuple[int, int]]:
    """Epoch and number of every micro-batch that a list leaves out."""
    return [
        (epoch, batch)
        for epoch in range(num_epochs)
        for batch in range(num_batches)
        if any(one["epoch"] == epoch and one["first_batch"] <= batch <= one["last_batch"] for one in entries)
    ]
