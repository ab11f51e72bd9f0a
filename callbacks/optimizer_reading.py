"""One measured step of one optimizer on its way to the host, and what was logged of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.optimizer_meter import SUMS, HealthMeter, StepSums
from stabilizer.late import HostCopy
from stabilizer.optimizer_health import NUM_DECILES, ROW_FIGURES, OptimizerReading, RowBook

__all__ = ["LateReading", "log_step", "row_figures", "send_step"]


@dataclasses.dataclass(frozen=True, eq=False)
class LateReading:
    """Figures of a step, of which the numbers are on their way.

    Attributes:
        reading: With everything that the host has known all along.
        embeddings: Names, in the order of the numbers.
        copy: Whether the step is lost; the total norm; sums by layer; figures of the embeddings.
    """

    reading: OptimizerReading
    embeddings: list[str]
    copy: HostCopy

    def read(self) -> OptimizerReading | None:
        """The figures; waits for them if it must. `None` for a step that was not made."""
        is_lost, total, *numbers = self.copy.read().tolist()
        num_layers = len(self.reading.layers)
        sums = {name: numbers[row * num_layers : (row + 1) * num_layers] for row, name in enumerate(SUMS)}
        rows = {}
        rest, size = numbers[len(SUMS) * num_layers :], len(ROW_FIGURES) + 2 * NUM_DECILES
        for number, name in enumerate(self.embeddings):
            own = rest[number * size : (number + 1) * size]
            rows[name] = {**dict(zip(ROW_FIGURES, own, strict=False)), **self.reading.rows[name]}
        if is_lost:
            return None
        return dataclasses.replace(self.reading, sums=sums, total_norm=total, rows=rows)


def send_step(
    context: StepContext,
    meter: HealthMeter,
    sums: StepSums,
    figures: Mapping[str, Tensor],
    *,
    rates: tuple[float, float] | None,
    is_lost: Tensor,
) -> LateReading:
    """Send a step on its way.

    Args:
        context: Of the step.
        meter: That has measured it.
        sums: What it has found.
        figures: Embedding -> `RowBook.figures`.
        rates: Of the jump, if there is one.
        is_lost: Whether the optimizer was kept from the step, shape (), bool.
    """
    dtype = sums.layers.dtype
    head = torch.stack([is_lost.to(dtype), context.store.total_norm.to(dtype)]).to(sums.layers.device)
    parts = [head, sums.layers.reshape(-1), *(one.to(dtype) for one in figures.values())]
    unknown = (math.nan, math.nan, math.nan)
    known = {one.name: sums.betas[number] or unknown for number, one in enumerate(meter.embeddings)}
    reading = OptimizerReading(
        step=context.step,
        layers=meter.layers.layers,
        sums={},
        total_norm=math.nan,
        betas=meter.betas,
        rows={name: dict(zip(("beta1", "beta2", "eps"), known[name], strict=True)) for name in figures},
        rates=rates,
        is_whole=sums.is_whole,
    )
    return LateReading(reading, list(figures), HostCopy(torch.cat(parts)))


def row_figures(
    meter: HealthMeter, sums: StepSums, books: Mapping[str, RowBook], *, is_lost: Tensor
) -> dict[str, Tensor]:
    """Let the books take a step.

    Args:
        meter: That has measured it.
        sums: What it has found.
        books: By embedding.
        is_lost: Whether the optimizer was kept from the step, shape (), bool.

    Returns:
        Embedding -> `RowBook.figures`.
    """
    found = {}
    for one, rows, betas in zip(meter.embeddings, sums.rows, sums.betas, strict=True):
        gradients, seconds, moved = rows.unbind()
        book = books[one.name]
        book.see(gradients, seconds, is_lost=is_lost.to(rows.device))
        found[one.name] = book.figures(
            seconds, moved, betas=None if betas is None else betas[:2], eps=0.0 if betas is None else betas[2]
        )
    return found


def log_step(
    context: StepContext, meter: HealthMeter, sums: StepSums, figures: Mapping[str, Tensor], *, is_lost: Tensor
) -> None:
    """Log a step; of one that was not made nothing.

    Args:
        context: Of the step.
        meter: That has measured it.
        sums: What it has found.
        figures: Embedding -> `RowBook.figures`.
        is_lost: Whether the optimizer was kept from the step, shape (), bool.
    """
    values = dict(zip(SUMS, sums.layers.masked_fill(is_lost, torch.nan).unbind(), strict=True))
    by_layer = {
        tags.OPTIMIZER_UPDATE_NORM: values["moved"].sqrt(),
        tags.OPTIMIZER_UPDATE_RATIO: (values["moved"] / values["held"]).sqrt(),
    }
    if meter.betas is not None:
        by_layer[tags.OPTIMIZER_RMS] = (values["normalized"] / values["num_second"]).sqrt()
    for tag, found in by_layer.items():
        context.log_layers(tag, context.spread(found.to(torch.float32), fill=torch.nan), finite_only=True)
    if meter.is_low_precision:
        for tag, lost, of in (
            (tags.OPTIMIZER_SWALLOWED_UPDATES, "num_swallowed", "num_to_move"),
            (tags.OPTIMIZER_SWALLOWED_GRADIENTS, "num_lost_parts", "num_parts"),
        ):
            context.log(tag, values[lost].sum() / values[of].sum(), finite_only=True)
    for name, one in figures.items():
        own = one.masked_fill(is_lost, torch.nan)
        num_rows, num_trained, num_silent, _, largest = own[: len(ROW_FIGURES)].unbind()
        numbers = {
            f"{tags.OPTIMIZER_ROWS_NEVER}/{name}": 1 - num_trained / num_rows,
            f"{tags.OPTIMIZER_ROWS_SILENT}/{name}": num_silent / num_trained,
            f"{tags.OPTIMIZER_ROW_STEP}/{name}": largest,
        }
        deciles = own[len(ROW_FIGURES) :].unbind()
        for place in range(NUM_DECILES):
            numbers[f"{tags.OPTIMIZER_ROW_COUNT}/{name}/{place}"] = deciles[place]
            numbers[f"{tags.OPTIMIZER_ROW_NORM}/{name}/{place}"] = deciles[NUM_DECILES + place]
        context.log_many(numbers, finite_only=True)
