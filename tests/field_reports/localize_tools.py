"""What the field reports of localisation share: fits of a small language model in which something is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from stabilizer.callbacks import GradLocCallback, attach
from stabilizer.localize.incident import Incident
from tests.models import VOCABULARY, make_transformer
from tests.tiny_loops import no_log

__all__ = ["LENGTH", "ROWS", "Batch", "Counting", "Language", "Stack", "locator", "only", "steps"]

Batch = dict[str, Tensor]
ROWS, LENGTH = 4, 8


def locator(folder: Path | str, **options: Any) -> GradLocCallback:
    """A GradLocCallback that is soon warm and lets nothing of its own go by.

    Args:
        folder: For incidents.
        **options: Of the callback.
    """
    defaults = {"warmup_steps": 20, "rule": {"name": "robust_log", "warmup_steps": 20}}
    return GradLocCallback(**{**defaults, "dump_dir": str(folder), "strict": True, **options})


def only(callback: GradLocCallback) -> Incident:
    """The one incident that there must be.

    Args:
        callback: After a run.
    """
    [incident] = callback.incidents
    return incident


class Counting(IterableDataset[Batch]):
    """Micro-batches of rows that count up from a random number: soon learnt.

    Args:
        plant: Called with the number of the micro-batch and the batch, which it may change.
        rank: Every rank has its own.
    """

    def __init__(self, plant: Callable[[int, Batch], None], *, rank: int = 0) -> None:
        super().__init__()
        self._plant, self._rank = plant, rank

    def __iter__(self) -> Iterator[Batch]:
        """Without end."""
        number = 0
        while True:
            generator = torch.Generator().manual_seed(1000 * number + self._rank)
            start = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
            tokens = (start + torch.arange(LENGTH + 1)) % VOCABULARY
            batch = {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
            self._plant(number, batch)
            yield batch
            number += 1


class Language(pl.LightningModule):
    """A small language model and its data.

    Args:
        plant: See `Counting`.
        model: From token numbers to logits; default a transformer with two blocks.
        learning_rate: Of AdamW.
    """

    def __init__(
        self, plant: Callable[[int, Batch], None], *, model: nn.Module | None = None, learning_rate: float = 1e-2
    ) -> None:
        super().__init__()
        self.model = make_transformer(num_layers=2) if model is None else model
        self._plant, self._learning_rate = plant, learning_rate

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Mean cross-entropy over the labels that count."""
        logits = self.model(batch["input_ids"])
        if "bias" in batch:
            logits = logits + batch["bias"]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self._learning_rate)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Every rank's own."""
        return DataLoader(Counting(self._plant, rank=self.trainer.global_rank), batch_size=None)


class Stack(nn.Module):
    """Blocks one after another; in one of them something can be planted.

    Args:
        num_blocks: How many.
        make_block: Makes each of them.
    """

    def __init__(self, num_blocks: int, make_block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))

    def forward(self, x: Any) -> Any:
        """What the last block gives."""
        for block in self.blocks:
            x = block(x)
        return x


def steps(
    model: nn.Module,
    callback: GradLocCallback,
    *,
    num_steps: int,
    before: Callable[[int], None],
    loss_of: Callable[[Any], Tensor] = lambda output: output.square().mean(),
) -> None:
    """A plain loop.

    Args:
        model: Maps (rows, positions, 4) to something.
        callback: Attached.
        num_steps: Length of the run.
        before: Called before every step with its number.
        loss_of: Makes a loss of what the model returns.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return loss_of(model(batch))

    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=no_log, loss_fn=loss_fn):
        for step in range(num_steps):
            before(step)
            batch = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(step))
            loss_fn(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
