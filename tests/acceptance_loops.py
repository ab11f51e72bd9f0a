"""A plain loop with faults on purpose, for tests of DrillCallback."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilizer import token_gate
from stabilizer.callbacks import DrillCallback, StabilizerCallback, attach
from tests.models import Batch, make_transformer, token_batch
from tests.tiny_loops import no_log

__all__ = ["MICRO_BATCHES", "STEP", "Seen", "data", "gated_loss", "plain_loss", "train"]

#: When the faults are, and of how many micro-batches a step is made.
STEP, MICRO_BATCHES = 2, 2


@dataclasses.dataclass
class Seen:
    """What the optimizer was given and left, by step."""

    gradients: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    weights: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)


def data() -> list[list[Batch]]:
    return [[token_batch(step=step, micro_batch=number) for number in range(MICRO_BATCHES)] for step in range(5)]


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def gated_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return token_gate(losses).mean()


def train(
    *faults: dict[str, Any],
    others: tuple[StabilizerCallback, ...] = (),
    loss_fn: Callable[[nn.Module, Batch], Tensor] = plain_loss,
    steps: list[list[Batch]] | None = None,
    optimizer_class: Any = torch.optim.SGD,
    model: nn.Module | None = None,
    **options: Any,
) -> Seen:
    """A plain loop of five steps of two micro-batches; without faults no callback at all."""
    model = make_transformer(num_layers=2) if model is None else model
    optimizer, seen = optimizer_class(model.parameters(), lr=0.01), Seen()
    callbacks = [*others, *([DrillCallback(faults=list(faults), strict=True, **options)] if faults else [])]

    def told_loss(model: nn.Module, batch: Batch) -> Tensor:
        return loss_fn(model, batch) / MICRO_BATCHES

    def note(*_: Any) -> None:
        seen.rates.append(optimizer.param_groups[0]["lr"])
        named = model.named_parameters()
        seen.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    optimizer.register_step_pre_hook(note)
    handle = (
        attach(None, model=model, optimizer=optimizer, callbacks=callbacks, loss_fn=told_loss, log=no_log)
        if callbacks
        else None
    )
    for step in data() if steps is None else steps:
        for batch in step:
            if handle is not None:
                handle.record_batch(batch)
            loss = told_loss(model, batch)
            seen.losses.append(loss.item())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    if handle is not None:
        handle.close()
    assert optimizer.param_groups[0]["lr"] == 0.01
    return seen
