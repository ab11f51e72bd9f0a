"""HealthHistory: the last steps of one optimizer, on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.health.layout import Layout
from stabilizer.health.limits import Limits
from stabilizer.health.statistics import log_norms
from stabilizer.losses import means
from stabilizer.segments import Segments
from stabilizer.windows import WindowedStatistics

__all__ = ["HealthHistory", "Row"]

# Rows are put into the history in one go, at least that often.
_MAX_BUFFERED = 64


@dataclasses.dataclass(frozen=True)
class Row:
    """What is kept of a step.

    Attributes:
        step: Its number.
        norms: Of the layers that are looked at, shape (layers,).
        total: Norm of all parameters, shape ().
        squares: Sums of squares of the store's units, shape (units,).
        is_left_out: Whether the optimizer did not take it (skipped, overflowed), shape (), bool.
        loss: As `StepLoss.numbers`, shape (4,); `None` if nobody looks at it.
    """

    step: int
    norms: Tensor
    total: Tensor
    squares: Tensor
    is_left_out: Tensor
    loss: Tensor | None


class HealthHistory:
    """Norms of the last steps, and what has to be known of earlier ones. Everything in it is finite.

    Steps that the optimizer did not take, and norms that are not finite, are kept as zeros, which no statistic counts.

    Args:
        layout: The layers.
        unit_modules: Position of its module in the layout for every unit of the store, -1 for none.
        limits: Lengths of the windows.
        device: Where the norms are.

    Attributes:
        norms: By step and column, oldest first, shape (at most `limits.window`, layers + 2 x blocks): the layers, then
            attention and MLP of every block.
        steps: Of the rows.
        num_new: How many of the last rows have not been examined.
        idle: Steps in a row without a gradient, by module, shape (modules,), whole numbers.
        totals: ln of the total norm, over all windows of the drift.
        losses: Over two windows; `None` without a window.
    """

    def __init__(self, layout: Layout, *, unit_modules: Sequence[int], limits: Limits, device: torch.device) -> None:
        self.layout, self.limits, self.device = layout, limits, device
        num_modules, num_parts = len(layout.modules), 2 * len(layout.blocks)
        # What belongs nowhere is summed up in one segment more.
        modules = [num_modules if module < 0 else module for module in unit_modules]
        self._modules = Segments(modules, num_segments=num_modules + 1, device=device)
        parts = [num_parts if part < 0 else part for part in (*layout.module_parts, -1)]
        self._parts = Segments(parts, num_segments=num_parts + 1, device=device)
        self.norms = torch.zeros(0, len(layout.layers) + num_parts, device=device)
        self.steps: list[int] = []
        self.num_new = 0
        self.idle = torch.zeros(num_modules, dtype=torch.long, device=device)
        self.totals = _series(limits.drift_windows * limits.window, device)
        self.losses = None if limits.loss_window is None else _series(2 * limits.loss_window, device)
        self._rows: list[Row] = []

    def append(self, row: Row) -> None:
        """Take a step; nothing is computed but every so often.

        Args:
            row: Of the step.
        """
        self._rows.append(row)
        if len(self._rows) == _MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Put the rows that have come in into the windows."""
        rows, self._rows = self._rows, []
        # Windows take no more at once than they hold.
        size = min(_MAX_BUFFERED, self.limits.window)
        for first in range(0, len(rows), size):
            self._take(rows[first : first + size])

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU clones."""
        self.flush()
        series = {"totals": self.totals, **({} if self.losses is None else {"losses": self.losses})}
        return {
            "layers": list(self.layout.layers),
            "modules": list(self.layout.modules),
            "norms": self.norms.cpu().clone(),
            "steps": list(self.steps),
            "num_new": self.num_new,
            "idle": self.idle.cpu().clone(),
            **{
                name: {key: value.detach().cpu().clone() for key, value in one.state_dict().items()}
                for name, one in series.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state; norms of other layers are of no use, the losses are.

        Args:
            state: What `state_dict` gave; windows of other lengths get as much as they hold.
        """
        if self.losses is not None and "losses" in state:
            self.losses = _restored(self.losses, state["losses"])
        if state["layers"] != list(self.layout.layers) or state["modules"] != list(self.layout.modules):
            return
        self.totals = _restored(self.totals, state["totals"])
        self.norms = state["norms"].to(self.device)[-self.limits.window :]
        self.steps = list(state["steps"])[-self.limits.window :]
        self.num_new = min(state["num_new"], len(self.steps))
        self.idle = state["idle"].to(self.device)

    def _take(self, rows: Sequence[Row]) -> None:
        is_taken = ~torch.stack([row.is_left_out for row in rows])
        steps, column = [row.step for row in rows], is_taken.unsqueeze(1)
        squares = self._modules.sum(torch.stack([row.squares for row in rows], dim=1))
        parts = self._parts.sum(squares)[:-1].sqrt().T
        norms = torch.stack([row.norms for row in rows])
        norms = torch.cat([norms, parts.to(norms.dtype)], dim=1)
        norms = torch.where(column & norms.isfinite(), norms, 0)
        self.norms = torch.cat([self.norms, norms])[-self.limits.window :]
        self.steps = [*self.steps, *steps][-self.limits.window :]
        self.num_new = min(self.num_new + len(rows), len(self.steps))
        squares = squares[:-1].T
        self.idle = _idle(self.idle, squares > 0, is_seen=column & squares.isfinite())
        totals = log_norms(torch.stack([row.total for row in rows]))
        _update(self.totals, totals.masked_fill(~is_taken, torch.nan), steps)
        losses = [row.loss for row in rows if row.loss is not None]
        if self.losses is not None and len(losses) == len(rows):
            _update(self.losses, means(torch.stack(losses)).masked_fill(~is_taken, torch.nan), steps)


def _idle(idle: Tensor, is_active: Tensor, *, is_seen: Tensor) -> Tensor:
    """Steps in a row without a gradient, after some more steps.

    Args:
        idle: Before, shape (modules,).
        is_active: Whether there was a gradient, by step, shape (steps, modules).
        is_seen: Whether a step counts, shape (steps, modules).
    """
    num_after = is_seen.flip(0).cumsum(0).flip(0) - is_seen.long()
    after_last = torch.where(is_active & is_seen, num_after, len(is_seen)).amin(0)
    return torch.where((is_active & is_seen).any(0), after_last, idle + is_seen.sum(0))


def _series(size: int, device: torch.device) -> WindowedStatistics:
    series: WindowedStatistics = WindowedStatistics(windows=(size,)).to(device)
    return series


def _update(series: WindowedStatistics, values: Tensor, steps: Sequence[int]) -> None:
    first, size = steps[0], series.windows[-1]
    assert len(steps) <= size
    if steps[-1] - first + 1 == len(steps):
        series.update(values, torch.arange(first, first + len(steps), device=values.device))
        return
    for value, step in zip(values, steps, strict=True):
        series.update(value, step)


def _restored(series: WindowedStatistics, saved: Mapping[str, Tensor]) -> WindowedStatistics:
    """A series with the state of a checkpoint, whose window may have been another."""
    size, length = saved["values"].numel() - 1, series.windows[-1]
    if size == length:
        series.load_state_dict(dict(saved))
        return series
    num = int(saved["num_finite"])
    slots = torch.arange(max(0, num - min(size, length)), num) % size
    device = series.values.device
    series.update(saved["values"][slots].to(device), saved["steps"][slots].to(device))
    return series
