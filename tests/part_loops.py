"""Plain loops over micro-batches of unequal size under every strategy, and what the parts of their steps should be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilizer.callbacks import StabilizerCallback, attach
from stabilizer.names import layer_names
from tests.models import Batch, make_transformer, token_batch
from tests.spread import CASES, no_sync, spread, sum_by_hand

__all__ = ["PartProbe", "expected_parts", "micro_batch_of", "part_loss", "run_parts", "train"]


class PartProbe(StabilizerCallback):
    """Notes what a step is made of."""

    parts_every_n_steps = 1
    part_unit = "samples"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: dict[int, dict[str, Any]] = {}

    def on_step_end(self, context: Any) -> None:
        """Note it."""
        parts = context.parts
        if parts is None:
            return
        layers = context.store.sums_of(parts.squares).tolist()
        self.seen[context.step] = {
            "squares": dict(zip(context.store.layer_names, layers, strict=True)),
            "whole": dict(zip(context.store.layer_names, context.store.sums_of(parts.whole).tolist(), strict=True)),
            "num_parts": float(parts.num_parts),
            "num_ranks": float(parts.num_ranks),
            "size": float(parts.size),
            "is_known": bool(parts.is_known),
            "reason": parts.reason,
            "mean": [float(value) for value in parts.weights(is_sum=torch.tensor(False))],
            "sum": [float(value) for value in parts.weights(is_sum=torch.tensor(True))],
        }


def size_of(data_rank: int, micro_batch: int) -> int:
    """Samples of a micro-batch: no two alike."""
    return 1 + data_rank + 2 * micro_batch


def micro_batch_of(data_rank: int, micro_batch: int, step: int) -> Batch:
    """Its data."""
    return token_batch(data_rank, step=step, micro_batch=micro_batch, size=size_of(data_rank, micro_batch))


def part_loss(model: nn.Module, batch: Batch, *, num_micro_batches: int) -> Tensor:
    """A mean over the micro-batch, divided by their number."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()) / num_micro_batches


def train(
    model: nn.Module,
    callbacks: list[Any],
    *,
    steps: int,
    micro_batches: Callable[[int], list[Any]],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str = "single",
    tells_loss: bool = True,
    log: Callable[[dict[str, float], int], None] = lambda values, step: None,
) -> None:
    """Train by hand, with accumulation where gradients are synchronized with the last micro-batch only.

    Args:
        model: As it trains.
        callbacks: Ours.
        steps: How many.
        micro_batches: This rank's, of a step.
        loss_fn: Of a micro-batch, as it is propagated.
        optimizer: Default one that leaves the model as it is.
        strategy: Of the model.
        tells_loss: Whether the loop tells its losses.
        log: Takes what is logged.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=log) as handle:
        for step in range(steps):
            batches = micro_batches(step)
            for number, batch in enumerate(batches):
                with contextlib.nullcontext() if number == len(batches) - 1 else no_sync(model):
                    loss = loss_fn(model, batch)
                    if tells_loss:
                        handle.record_loss(loss.detach(), weight=len(batch[0]))
                    loss.backward()
            if strategy == "ddp_tp":
                sum_by_hand(model)
            optimizer.step()
            optimizer.zero_grad()


def run_parts(rank: int, world_size: int, strategy: str, num_micro_batches: int, steps: int = 4) -> Any:
    """What a probe has seen under a strategy."""
    model, data_rank = spread(strategy, rank)
    probe = PartProbe()
    train(
        model,
        [probe],
        steps=steps,
        micro_batches=lambda step: [micro_batch_of(data_rank, n, step) for n in range(num_micro_batches)],
        loss_fn=lambda model, batch: part_loss(model, batch, num_micro_batches=num_micro_batches),
        strategy=strategy,
    )
    return probe.seen


def _part_gradients(strategy: str, num_micro_batches: int, step: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Size of every part and its share in the step's gradient, in float64 and one process."""
    model = make_transformer(dtype=torch.float64)
    num_ranks = CASES[strategy].num_data_ranks
    for data_rank in range(num_ranks):
        for number in range(num_micro_batches):
            model.zero_grad()
            batch = micro_batch_of(data_rank, number, step)
            (part_loss(model, batch, num_micro_batches=num_micro_batches) / num_ranks).backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            yield len(batch[0]), gradients


def expected_parts(strategy: str, num_micro_batches: int, step: int) -> dict[str, Any]:
    """What a probe should see."""
    parts = list(_part_gradients(strategy, num_micro_batches, step))
    names = list(parts[0][1])
    squares = dict.fromkeys(layer_names(names), 0.0)
    for name, layer in zip(names, layer_names(names), strict=True):
        squares[layer] += sum(float(gradients[name].square().sum()) for _, gradients in parts)
    sizes = [float(size) for size, _ in parts]
    num = float(len(sizes))
    return {
        "squares": squares,
        "num_parts": num,
        "num_ranks": float(CASES[strategy].num_data_ranks),
        "size": sum(sizes),
        "mean": [num, num, sum(1 / size for size in sizes)],
        "sum": [sum(sizes), sum(size**2 for size in sizes), sum(sizes)],
    }
