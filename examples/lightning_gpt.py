"""Train the small GPT on the standard library's source with Lightning: one process, DDP or FSDP2, CPU or GPU."""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from stabilizer.examples.gpt import GPT
from stabilizer.examples.recipe import (
    StrategyName,
    make_loader,
    make_optimizer,
    make_schedule,
    next_byte_loss,
    num_processes,
)

__all__ = ["LightningGPT", "StrategyName", "make_trainer", "silence_hints", "train"]


class LightningGPT(LightningModule):
    """The GPT, its data and its optimizer.

    Args:
        steps: Length of the run, for the learning-rate schedule.
        num_layers: Number of blocks.
        dim: Width of the residual stream.
        context: Length of a training sequence, in tokens.
        batch_size: Sequences in one step of one process.
        learning_rate: Largest learning rate, reached after the warm-up.
        warmup_steps: Steps of linear warm-up; a cosine to a tenth follows.
        seed: Seed of the weights (the same on every rank) and of the data (a stream of its own for every rank).

    Attributes:
        losses: The loss of every step on this rank's own tokens, in nats per byte; filled by training.
    """

    def __init__(
        self,
        *,
        steps: int,
        num_layers: int = 6,
        dim: int = 192,
        context: int = 128,
        batch_size: int = 8,
        learning_rate: float = 1e-3,
        warmup_steps: int = 20,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.steps = steps
        self.num_layers = num_layers
        self.dim = dim
        self.context = context
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.seed = seed
        self.model: GPT | None = None
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        """Build the model, and under FSDP2 shard every block, then what is left."""
        if self.model is not None:
            return
        torch.manual_seed(self.seed)
        model = GPT(context=self.context, num_layers=self.num_layers, dim=self.dim)
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Predict each byte of the batch from the ones before it.

        Args:
            batch: Token numbers, (batch, context + 1).
            batch_idx: Number of the batch.

        Returns:
            The mean cross-entropy, in nats per byte.
        """
        assert self.model is not None, "Lightning calls configure_model first"
        loss = next_byte_loss(self.model, batch)
        self.losses.append(loss.detach())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW; a linear warm-up, then a cosine."""
        optimizer = make_optimizer(self.parameters(), learning_rate=self.learning_rate)
        schedule = make_schedule(optimizer, steps=self.steps, warmup_steps=self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Random windows of the text, other ones on every rank."""
        return make_loader(
            context=self.context, batch_size=self.batch_size, seed=self.seed, rank=self.trainer.global_rank
        )


class _ProgressBar(TQDMProgressBar):
    """Lightning's bar without the number of the logger's folder."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class _EndOnTerminate(Callback):
    """Ends the run at once when the process is told to terminate.

    Lightning's own handler tells the other ranks by a broadcast first, which waits for ever for a rank that is inside
    another collective.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal.signal(signal.SIGTERM, self._end)

    @staticmethod
    def _end(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)


def make_trainer(
    strategy: StrategyName = "fsdp2", *, steps: int, logdir: Path, callbacks: Sequence[Callback] = ()
) -> Trainer:
    """Make a trainer for this machine: up to two GPUs if there are any, else the CPU.

    Args:
        strategy: One process, or data parallelism in two (in one, if there is one GPU).
        steps: Number of optimizer steps.
        logdir: Folder for TensorBoard; the run goes to `<strategy>/version_<n>` in it.
        callbacks: Callbacks beside the progress bar and the handling of signals.

    Returns:
        A trainer for one `fit`.
    """
    on_gpu = torch.cuda.is_available()
    devices = num_processes(strategy)
    strategies: dict[StrategyName, str | Strategy] = {
        "single": "auto",
        "ddp": DDPStrategy(),
        "fsdp2": ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1),
    }
    return Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=devices,
        strategy=strategies[strategy],
        precision="bf16-mixed" if on_gpu else "32-true",
        # Both processes are here, even inside a job that a cluster's scheduler started.
        plugins=[LightningEnvironment()],
        max_epochs=1,
        # The stream has no end: this is also what the progress bar counts to.
        limit_train_batches=steps,
        # RandomWindows gives each rank its own data.
        use_distributed_sampler=False,
        logger=TensorBoardLogger(save_dir=logdir, name=strategy),
        log_every_n_steps=1,
        # The bar comes last: what callbacks print when training starts stands above it.
        callbacks=[_EndOnTerminate(), *callbacks, _ProgressBar()],
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def train(trainer: Trainer, module: LightningModule) -> None:
    """Fit, and leave no process behind.

    Args:
        trainer: From `make_trainer`.
        module: What to train.
    """
    try:
        trainer.fit(module)
    except BaseException:
        # The other process waits in a collective for this one, which will not come.
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(getattr(signal, "SIGKILL", signal.SIGTERM))
        raise


def silence_hints() -> None:
    """Hide what Lightning says about choices that this example makes on purpose, and what nobody can act on here."""
    # Lightning speaks through the package that was imported last: two names, and each with a fabric of its own.
    for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        for module in ("utilities.rank_zero", "utilities.distributed"):
            logging.getLogger(f"{package}.{module}").setLevel(logging.WARNING)
    # The text is in memory: a worker process would only take a core away from training.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own use of torch.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
