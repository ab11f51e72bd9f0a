"""Trainings of the acceptance matrix, in every host: the model, its data, and how it is saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate.state import AcceleratorState
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from stabilizer.callbacks import StabilizerCallback, attach
from tests import accelerate_loops, sharding
from tests.lightning_models import RankSampler, make_trainer
from tests.localize_loops import loss_of_tokens
from tests.models import VOCABULARY, make_transformer
from tests.tiny_loops import no_log

__all__ = ["HOSTS", "LENGTH", "MICRO_BATCHES", "ROWS", "Losses", "Plan", "train"]

#: Host and strategy -> number of processes.
HOSTS = {"lightning/single": 1, "lightning/ddp": 2, "lightning/fsdp2": 2, "accelerate/ddp": 2}
ROWS, LENGTH, MICRO_BATCHES = 4, 8, 2
SAVE_EVERY = 10


class Losses(StabilizerCallback):
    """Keeps the loss of every step."""

    loss_weight = "samples"

    def __init__(self) -> None:
        super().__init__(strict=True)
        self.losses: list[float] = []

    def on_step_end(self, context: Any) -> None:
        assert context.loss is not None
        self.losses.append(float(context.loss.mean))


class Samples(Dataset[Any]):
    """Tokens, targets of which half follow from them, and weights of the tokens' losses."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        """Number of samples."""
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """One sample."""
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        drawn = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        is_drawn = torch.rand(LENGTH, generator=generator) < 0.5
        return tokens, torch.where(is_drawn, drawn, (tokens * 3 + 1) % VOCABULARY), torch.ones(LENGTH)


def loader(rank: int, num_ranks: int, num_steps: int) -> DataLoader[Any]:
    """A rank's micro-batches."""
    length = num_steps * MICRO_BATCHES * ROWS * num_ranks
    sampler = RankSampler(length, rank=rank, num_ranks=num_ranks)
    return DataLoader(Samples(length), batch_size=ROWS, sampler=sampler)


class Module(pl.LightningModule):
    """The transformer, on one device, under DDP or FSDP2."""

    def __init__(self, num_steps: int, *, learning_rate: float) -> None:
        super().__init__()
        self.model: nn.Module = make_transformer(num_layers=2)
        self.num_steps, self.learning_rate, self.is_sharded = num_steps, learning_rate, False

    def configure_model(self) -> None:
        """Shard where there is a mesh."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None and not self.is_sharded:
            self.is_sharded = True
            sharding.shard_fsdp2(self.model, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """The loss of one micro-batch."""
        return loss_of_tokens(self.model, batch)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)

    def train_dataloader(self) -> Any:
        """This rank's data."""
        return loader(self.trainer.global_rank, self.trainer.world_size, self.num_steps)


@dataclasses.dataclass
class Plan:
    """A training, whatever the host.

    Attributes:
        host: One of HOSTS.
        num_steps: Optimizer steps.
        learning_rate: Of AdamW.
        is_scaled: Whether there is a gradient scaler.
        checkpoints: Folder of those that are saved every ten steps; `None` for none.
    """

    host: str
    num_steps: int
    learning_rate: float = 1e-3
    is_scaled: bool = False
    checkpoints: Path | None = None

    @property
    def scaler(self) -> Any:
        """A new one, if there is to be one."""
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10_000) if self.is_scaled else None


def train(plan: Plan, callbacks: list[Any], *, rank: int, num_ranks: int) -> None:
    """Train.

    Args:
        plan: What.
        callbacks: Ours.
        rank: This process.
        num_ranks: How many there are.
    """
    host, _, strategy = plan.host.partition("/")
    if host == "lightning":
        _lightning(plan, strategy, callbacks, num_ranks=num_ranks)
    else:
        _accelerate(plan, strategy, callbacks, rank=rank, num_ranks=num_ranks)


def _lightning(plan: Plan, strategy: str, callbacks: list[Any], *, num_ranks: int) -> None:
    options: dict[str, Any] = {}
    if plan.is_scaled:
        options["plugins"] = MixedPrecision("16-mixed", "cpu", scaler=plan.scaler)
    if plan.checkpoints is not None:
        saving = ModelCheckpoint(plan.checkpoints, every_n_train_steps=SAVE_EVERY, save_top_k=-1)
        callbacks, options["enable_checkpointing"] = [*callbacks, saving], True
    trainer = make_trainer(
        strategy,
        devices=num_ranks,
        max_steps=plan.num_steps,
        accumulate_grad_batches=MICRO_BATCHES,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(Module(plan.num_steps, learning_rate=plan.learning_rate))


def _accelerate(plan: Plan, strategy: str, callbacks: list[Any], *, rank: int, num_ranks: int) -> None:
    accelerator = accelerate_loops.make_accelerator(strategy, gradient_accumulation_steps=MICRO_BATCHES)
    bare, scaler = make_transformer(num_layers=2), plan.scaler
    accelerator.scaler = scaler
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=plan.learning_rate))
    if scaler is not None:
        accelerator.native_amp = True
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
    with attach(
        accelerator, model=model, optimizer=optimizer, callbacks=callbacks, loss_fn=loss_of_tokens, log=no_log
    ) as handle:
        for number, batch in enumerate(loader(rank, num_ranks, plan.num_steps)):
            handle.record_batch(batch)
            with accelerator.accumulate(model):
                accelerator.backward(loss_of_tokens(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            step, inside = divmod(number + 1, MICRO_BATCHES)
            if plan.checkpoints is not None and not inside and step % SAVE_EVERY == 0:
                accelerator.save_state(str(plan.checkpoints / f"step_{step}"))
