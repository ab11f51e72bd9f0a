"""What the field reports on clips and skips share: clips at a limit, and what is left of gradients set by a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, attach
from stabilizer.names import clean_name
from tests.clip_loops import fixed
from tests.field_reports.helpers import total_norm_of
from tests.loggers import Points, points_of
from tests.sharding import full

__all__ = ["Left", "Received", "clip_now", "layer_clip", "series", "total_clip"]


def total_clip(threshold: float, **options: Any) -> AdaptiveClipThreshold:
    """A clip of the total at a fixed limit.

    Args:
        threshold: The limit.
        **options: Of AdaptiveClipThreshold.
    """
    return AdaptiveClipThreshold(rule=fixed(threshold), **{"strict": True, **options})


def layer_clip(threshold: float, **options: Any) -> LayerClipCallback:
    """A clip of each layer at one fixed limit that logs every step.

    Args:
        threshold: The limit.
        **options: Of LayerClipCallback.
    """
    return LayerClipCallback(rule=fixed(threshold), **{"every_n_steps": 1, "strict": True, **options})


@dataclasses.dataclass
class Left:
    """What a clip has left.

    Attributes:
        gradients: Parameter name -> whole gradient, on every rank.
        points: What was logged; on the first rank.
    """

    gradients: dict[str, Tensor]
    points: Points

    def __getitem__(self, tag: str) -> float:
        """What was logged of the one step."""
        return self.points[tag, 0]


class Received(pl.Callback):
    """Notes the norm of what every optimizer is given, step by step; 0 where it is given nothing.

    Attributes:
        norms: By optimizer.
    """

    def __init__(self) -> None:
        self.norms: list[list[float]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers exist now."""
        for optimizer in trainer.optimizers:
            own: list[float] = []
            self.norms.append(own)
            optimizer.register_step_post_hook(lambda given, *_, own=own: own.append(total_norm_of(given)))


def clip_now(
    model: nn.Module,
    *callbacks: Any,
    groups: Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Left:
    """Clip the gradients that are there, in a plain loop that asks for it; a collective.

    Args:
        model: With gradients, of any kind.
        *callbacks: Ours.
        groups: Of `attach`.
        optimizer: Default: one that moves nothing.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    rows: list[Any] = []
    log = lambda *row: rows.append(row)  # noqa: E731
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, groups=groups, log=log) as handle:
        handle.measure()
        named = {clean_name(name): parameter.grad for name, parameter in model.named_parameters()}
        gradients = {name: full(gradient).clone() for name, gradient in named.items() if gradient is not None}
        optimizer.step()
    return Left(gradients, points_of(rows))


def series(points: Points, tag: str) -> dict[int, float]:
    """One tag's values by step.

    Args:
        points: What was logged.
        tag: All of it.
    """
    return {step: value for (name, step), value in points.items() if name == tag}
