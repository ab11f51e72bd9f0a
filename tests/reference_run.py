"""A run of plain SGD in one process and float64: what every host and strategy must reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from stabilizer.names import layer_names
from tests import reference
from tests.models import Batch, loss_of, make_transformer, reference_gradients

__all__ = ["LEARNING_RATE", "ReferenceRun", "reference_run"]

LEARNING_RATE = 0.05


class ReferenceRun(NamedTuple):
    """By step: norm of every layer, total norm, and the loss of every micro-batch."""

    layers: list[dict[str, float]]
    totals: list[float]
    losses: list[list[float]]


def reference_run(
    steps: Sequence[Sequence[Batch]], *, max_norm: float | None = None, prefix: str = "", **options: Any
) -> ReferenceRun:
    """Train.

    Args:
        steps: For every step all micro-batches of all ranks, which weigh the same.
        max_norm: Clip by it; the norms are those before.
        prefix: What a host puts before the names of parameters.
        **options: Of `make_transformer`.
    """
    model: nn.Module = make_transformer(**options).double()
    run = ReferenceRun([], [], [])
    for batches in steps:
        gradients = reference_gradients(model, batches)
        names = dict(zip(gradients, layer_names([f"{prefix}{name}" for name in gradients]), strict=True))
        run.layers.append(reference.layer_norms(gradients, names.__getitem__))
        run.totals.append(reference.total_norm(gradients))
        with torch.no_grad():
            run.losses.append([float(loss_of(model, batch)) for batch in batches])
            factor = 1.0 if max_norm is None else min(1.0, max_norm / (run.totals[-1] + 1e-6))
            for name, parameter in model.named_parameters():
                if (gradient := gradients.get(name)) is not None:
                    parameter -= LEARNING_RATE * factor * gradient
    return run
