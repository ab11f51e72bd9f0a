"""Faults to be planted in a loop, and models that have a place for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.localize_loops import Plan
from tests.models import VOCABULARY, Block, TinyTransformer, initialise_

__all__ = [
    "MICRO_BATCH",
    "POSITION",
    "ROW",
    "STEP",
    "Classifier",
    "Fused",
    "Headless",
    "Plant",
    "Planted",
    "bad_token",
    "batches",
    "loss_of",
    "losses_of",
]

#: Where the faults are.
STEP, MICRO_BATCH, ROW, POSITION = 24, 1, 2, 5
DIM = 16
Plant = Callable[[dict[str, Any]], None]


class PlantedBlock(Block):
    """A block whose gradient is multiplied on its way down, and to whose output something is added."""

    gain: Tensor | None = None
    added: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs to outputs."""
        gain = self.gain
        if gain is not None:
            x = x.clone()
            x.register_hook(lambda gradient: gradient * gain.unsqueeze(-1))
        output = super().forward(x)
        return output if self.added is None else output + self.added.unsqueeze(-1)


class Planted(TinyTransformer):
    """Its third block is a planted one."""

    def __init__(self) -> None:
        super().__init__(num_layers=4, dim=DIM)
        self.layers[2] = PlantedBlock(DIM, 4, adapters=False)
        initialise_(self)

    def forward(self, tokens: Tensor, gain: Tensor | None = None, added: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Map inputs to outputs."""
        self.layers[2].gain, self.layers[2].added = gain, added
        return super().forward(tokens)


def batches(plan: Plan, rank: int, *, plant: Plant) -> Iterator[list[dict[str, Any]]]:
    """Micro-batches, one of which is changed.

    Args:
        plan: Of the run.
        rank: Whose.
        plant: Changes it.
    """
    for step in range(plan.steps):
        generator = torch.Generator().manual_seed(step)
        rows = []
        for number in range(plan.micro_batches):
            shape = (plan.rows, plan.length)
            batch: dict[str, Any] = {
                "input_ids": torch.randint(VOCABULARY, shape, generator=generator),
                "targets": torch.randint(VOCABULARY, shape, generator=generator),
                "weights": torch.ones(shape),
            }
            if (step, number) == (STEP, MICRO_BATCH):
                plant(batch)
            rows.append(batch)
        yield rows


def losses_of(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    """Weighted loss of every token, (rows, length).

    Args:
        logits: Of the tokens.
        batch: Of `batches`.
    """
    flat = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return flat.view(batch["targets"].shape) * batch["weights"]


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Mean over the tokens, with what is planted.

    Args:
        model: `Planted`, where anything but weights is.
        batch: Of `batches`.
    """
    planted = {name: batch[name] for name in ("gain", "added") if name in batch}
    loss = losses_of(model(batch["input_ids"], **planted), batch).mean()
    if "auxiliary" in batch:
        loss = loss + batch["auxiliary"] * model.layers[1].feed_forward.up.weight.square().sum()  # type: ignore[union-attr,index]
    return loss


def bad_token(batch: dict[str, Any]) -> None:
    """Multiply the loss of one token.

    Args:
        batch: Of `batches`; changed.
    """
    batch["weights"][ROW, POSITION] = 3000.0


class Classifier(nn.Module):
    """Images to classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh())
        self.head = nn.Linear(16, 5)
        initialise_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map inputs to outputs."""
        output: Tensor = self.head(self.body(images))
        return output


class Headless(nn.Module):
    """Its output layer has a name that nobody would look for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.out_projection = nn.Linear(DIM, VOCABULARY)
        initialise_(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map inputs to outputs."""
        output: Tensor = self.out_projection(self.embed(tokens))
        return output


class Fused(TinyTransformer):
    """Reads its head's weight and never calls it."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, dim=DIM)
        initialise_(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map inputs to outputs."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.lm_head.weight)
