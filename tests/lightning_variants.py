"""Lightning modules beside the usual one: manual optimization, several optimizers, losses that go wrong."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lightning_models import make_loader
from tests.models import Batch, loss_of, make_transformer

__all__ = ["Manual", "Plain", "TwoOptimizers"]


class Plain(pl.LightningModule):
    """A transformer; everything else is passed in.

    Args:
        model: Default: a transformer.
        optimizer: From parameters to an optimizer.
        loss: From the module, the batch and its number to a loss or None.
    """

    def __init__(self, model: nn.Module | None = None, *, optimizer: Any = None, loss: Any = None) -> None:
        super().__init__()
        self.model = make_transformer() if model is None else model
        self.make_optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05))
        self.make_loss = loss or (lambda module, batch, number: loss_of(module.model, batch))

    def training_step(self, batch: Batch, batch_index: int) -> Tensor | None:
        """The loss of one micro-batch."""
        return self.make_loss(self, batch, batch_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer over what trains."""
        return self.make_optimizer([p for p in self.model.parameters() if p.requires_grad])

    def train_dataloader(self) -> DataLoader[Batch]:
        """This rank's data."""
        return make_loader("transformer", length=96, rank=self.global_rank, num_ranks=self.trainer.world_size)


class Manual(Plain):
    """Manual optimization; clips before it steps, several steps a batch if asked to."""

    def __init__(self, *, clip: float | None = None, algorithm: str = "norm", steps_per_batch: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip, self.algorithm, self.steps_per_batch = clip, algorithm, steps_per_batch

    def training_step(self, batch: Batch, batch_index: int) -> None:
        """All by hand."""
        optimizer = self.optimizers()
        for _ in range(self.steps_per_batch):
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.model, batch))
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip, self.algorithm)
            optimizer.step()


class TwoOptimizers(Plain):
    """Blocks and the rest have an optimizer each; the second steps every `every` batches."""

    def __init__(self, *, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every
        self.expected: list[list[float]] = [[], []]

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters of both optimizers."""
        blocks = list(self.model.layers.parameters())
        inside = {id(parameter) for parameter in blocks}
        return blocks, [parameter for parameter in self.model.parameters() if id(parameter) not in inside]

    def training_step(self, batch: Batch, batch_index: int) -> None:
        """Each optimizer has its own loss, as in a GAN."""
        for number, optimizer in enumerate(self.optimizers()):
            if number and batch_index % self.every:
                continue
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss_of(self.model, batch) * (number + 1))
            gradients = [parameter.grad for parameter in self.parts()[number]]
            self.expected[number].append(torch.nn.utils.get_total_norm(gradients).item())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Two of them."""
        return [torch.optim.SGD(part, lr=0.05) for part in self.parts()]
