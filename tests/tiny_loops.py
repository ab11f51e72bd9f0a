"""A model of one weight whose loss, gradient and norm are all the number that a test chose.

loop = Loop("plain", Steps())
with loop:
    loop.backward(7.0)  # loss 7, gradient 7
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks import StabilizerCallback, StepContext, attach
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import make_accelerator

__all__ = ["HOSTS", "Loop", "OneLayer", "Steps", "loss_at", "no_log", "prepared_unit", "told", "unit"]

HOSTS = ("plain", "accelerate")


class OneLayer(nn.Linear):
    """One weight, which is 1."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)


def unit(*, learning_rate: float = 0.0) -> tuple[OneLayer, torch.optim.Optimizer]:
    """A model and its optimizer, which leaves the weight where it is unless it is given a rate."""
    model = OneLayer()
    return model, torch.optim.SGD(model.parameters(), lr=learning_rate)


def prepared_unit(**options: Any) -> tuple[Any, Any, Any]:
    """An accelerator, and the model and optimizer that it has prepared.

    Args:
        **options: Of Accelerator.
    """
    accelerator = make_accelerator(**options)
    model, optimizer = accelerator.prepare(*unit())
    return accelerator, model, optimizer


def loss_at(model: Any, value: float, *, size: int = 2) -> Tensor:
    """A loss of this value whose gradient it is, too.

    Args:
        model: Of `unit`.
        value: Any number, also one that is not finite.
        size: Samples in the batch.
    """
    loss: Tensor = model(torch.full((size, 1), value)).mean()
    return loss


def no_log(values: dict[str, float], step: int) -> None:
    """Write nowhere."""


class Steps(StabilizerCallback):
    """Remembers (step, total norm, loss) of every step that was done, for each optimizer."""

    loss_weight = "samples"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: dict[int, list[tuple[int, float, float]]] = {}
        self.positions: list[Any] = []

    def on_step_end(self, context: StepContext) -> None:
        """Note the step."""
        assert context.loss is not None
        row = (context.step, context.store.total_norm.item(), context.loss.mean.item())
        self.rows.setdefault(context.optimizer_index, []).append(row)
        self.positions.append(context.position)

    @property
    def done(self) -> list[tuple[int, float, float]]:
        """Of the first optimizer."""
        return self.rows.get(0, [])

    def losses(self, optimizer_index: int = 0) -> list[float]:
        """Losses alone.

        Args:
            optimizer_index: Position of the optimizer.
        """
        return [loss for _, _, loss in self.rows.get(optimizer_index, [])]


class Loop(contextlib.ExitStack):
    """One weight in a loop of either host; entering it attaches.

    Args:
        host: One of HOSTS.
        *callbacks: Ours.
        optimizer: Makes the optimizers of torch from parameters; default: one SGD that moves nothing.
        scaler: Whether a plain loop has a gradient scaler.
        log: As of attach; default: `rows` keeps what is logged.
    """

    def __init__(
        self, host: str, *callbacks: Any, optimizer: Any = None, scaler: bool = False, log: Any = None
    ) -> None:
        super().__init__()
        self.callbacks = list(callbacks)
        self.rows: list[Any] = []
        rows = self.rows  # not the loop: what writes there must not keep the model alive
        self.log = (lambda *row: rows.append(row)) if log is None else log
        self.accelerator: Any = make_accelerator() if host == "accelerate" else None
        model: Any = OneLayer()
        make = optimizer or (lambda parameters: [torch.optim.SGD(parameters, lr=0.0)])
        self.inner = list(make(model.parameters()))
        if self.accelerator is None:
            self.model, self.optimizers = model, self.inner
        else:
            self.model, *self.optimizers = self.accelerator.prepare(model, *self.inner)
        self.optimizer: Any = self.optimizers[0]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if scaler else None

    def __enter__(self) -> Loop:
        """Attach."""
        self.handle = self.enter_context(
            attach(
                self.accelerator,
                model=self.model,
                optimizer=self.optimizers,
                callbacks=self.callbacks,
                log=self.log,
            )
        )
        return self

    def backward(self, value: float, *, record: float | None = None) -> Tensor:
        """One micro-batch; returns its loss.

        Args:
            value: Of loss and gradient.
            record: Told as the loss instead.
        """
        loss = loss_at(self.model, value)
        if self.accelerator is not None:
            self.accelerator.backward(loss)
        else:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.handle.record_loss(loss if record is None else record)
        return loss

    def step(self, value: float, *, record: float | None = None) -> None:
        """One micro-batch and one step with it.

        Args:
            value: Of loss and gradient.
            record: Told as the loss instead.
        """
        self.backward(value, record=record)
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Collect our warnings instead of failing for them."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StabilizerWarning)
        yield messages
    messages += [str(warning.message) for warning in caught if issubclass(warning.category, StabilizerWarning)]
