"""Layers whose gradients have the norms that a test chooses, in a plain loop.

with HandLoop(LayerClipCallback(), a=3, b=2) as loop:
    received = loop.step(a=5.0, b=0.1)  # what the optimizer was given, by layer
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks import StabilizerCallback, attach
from tests.loggers import Points, points_of

__all__ = ["HandLoop", "fixed", "gradient_of", "norms_of"]


def fixed(threshold: float, **options: Any) -> dict[str, Any]:
    """The rule of one threshold.

    Args:
        threshold: Its value.
        **options: Its other arguments.
    """
    return {"name": "fixed", "threshold": threshold, **options}


def gradient_of(norm: float, size: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient of this norm with different elements, shape (1, size).

    Args:
        norm: Any number, also one that is not finite.
        size: Number of elements.
        dtype: Of the result.
    """
    direction = torch.linspace(1, 2, size, dtype=torch.float64)
    return (norm * direction / direction.norm()).to(dtype).view(1, size)


class HandLoop(contextlib.ExitStack):
    """A model of layers without anything to compute; entering it attaches.

    Args:
        *callbacks: Ours.
        learning_rate: Of plain SGD.
        dtype: Of the weights.
        make: From parameters to an optimizer; default: plain SGD.
        **sizes: Layer -> number of its elements.

    Attributes:
        rows: What was logged.
        changes: Layer -> how often its gradient was written in the last step.
    """

    def __init__(
        self,
        *callbacks: StabilizerCallback,
        learning_rate: float = 0.0,
        dtype: torch.dtype = torch.float32,
        make: Any = None,
        **sizes: int,
    ) -> None:
        super().__init__()
        self.callbacks = list(callbacks)
        self.model = nn.ModuleDict({name: nn.Linear(size, 1, bias=False, dtype=dtype) for name, size in sizes.items()})
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1.0)
        make = make or (lambda parameters: torch.optim.SGD(parameters, lr=learning_rate))
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters())
        self.rows: list[Any] = []
        self.changes: dict[str, int] = {}
        self._received: dict[str, Tensor | None] = {}
        self._given: dict[str, tuple[Tensor, int]] = {}

    def __enter__(self) -> HandLoop:
        """Attach."""
        rows = self.rows
        self.handle = self.enter_context(
            attach(
                None,
                model=self.model,
                optimizer=self.optimizer,
                callbacks=self.callbacks,
                log=lambda *row: rows.append(row),
            )
        )
        # After ours, which has clipped then.
        self.callback(self.optimizer.register_step_pre_hook(self._note).remove)
        return self

    def step(self, **norms: float | Tensor | None) -> dict[str, Tensor | None]:
        """One step.

        Args:
            **norms: Norm of the gradient of every layer, or the gradient itself; None for no gradient.

        Returns:
            What the optimizer was given.
        """
        self._given = {}
        for name, norm in norms.items():
            weight = self.model[name].weight
            if norm is None:
                weight.grad = None
                continue
            is_whole = isinstance(norm, Tensor)
            gradient = norm if is_whole else gradient_of(float(norm), weight.numel(), dtype=weight.dtype)
            weight.grad = gradient.clone().view_as(weight)
            self._given[name] = weight.grad, weight.grad._version
        self.optimizer.step()
        return dict(self._received)

    def steps(self, num: int, **norms: float | None) -> None:
        """Several equal steps.

        Args:
            num: How many.
            **norms: As of `step`.
        """
        for _ in range(num):
            self.step(**norms)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights by layer."""
        return {name: layer.weight.detach().clone() for name, layer in self.model.items()}

    @property
    def points(self) -> Points:
        """What was logged; all of it when the loop has been left."""
        return points_of(self.rows)

    def values(self, tag: str) -> dict[int, float]:
        """What was logged under a tag, by step.

        Args:
            tag: All of it.
        """
        return {step: value for (name, step), value in self.points.items() if name == tag}

    def _note(self, *_: Any) -> None:
        gradients = {name: layer.weight.grad for name, layer in self.model.items()}
        self._received = {name: None if g is None else g.detach().clone() for name, g in gradients.items()}
        self.changes = {}
        for name, (gradient, version) in self._given.items():
            is_same = gradients[name] is gradient
            self.changes[name] = gradient._version - version if is_same else -1


def norms_of(received: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Norms of gradients, in float64.

    Args:
        received: As `HandLoop.step` returned them.
    """
    return {name: 0.0 if g is None else float(g.to(torch.float64).norm()) for name, g in received.items()}
