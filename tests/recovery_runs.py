"""Trainings that get into trouble, with a recovery that saves its own checkpoints, in the hosts that can go back."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from stabilizer.callbacks import StabilizerCallback, StepContext, attach
from stabilizer.callbacks.recovery import Recovery
from stabilizer.tally import Weight
from tests.accelerate_loops import make_accelerator
from tests.lightning_models import make_trainer
from tests.recovery_data import BATCH, Line, Loader, Shuffled, make_net, test_loss
from tests.sharding import shard_fsdp2

__all__ = ["BATCH", "Guard", "Line", "Loader", "Module", "Shuffled", "fit", "loop", "make_net", "test_loss"]

ROLL_BACK: dict[str, Any] = {"name": "roll_back", "cooldown_steps": 0}


@dataclasses.dataclass
class Good:
    """A checkpoint that is good."""

    path: Path
    step: int


class GoodOnes:
    """Those that a `Guard` has saved."""

    def __init__(self) -> None:
        self.all: list[Good] = []

    def latest(self, before_step: int) -> Good | None:
        """The newest one up to a step."""
        found = [good for good in self.all if good.step <= before_step]
        return max(found, key=lambda good: good.step, default=None)

    def suspect(self, after_step: int | None) -> None:
        """None of them is ever deleted."""

    def folders(self) -> list[Path]:
        """Where they are."""
        return sorted({good.path.parent for good in self.all})

    def condemn(self, *, after_step: int, reason: str) -> None:
        """Forget those of a time that was bad."""
        self.all = [good for good in self.all if good.step <= after_step]


class Guard(StabilizerCallback):
    """Holds a `Recovery`, and saves a checkpoint every so many steps.

    Args:
        save_every: Steps.
        last_save: No later step is saved.
        name: Of the callback.
        **options: Of `Recovery`.
    """

    needs_loss = False

    def __init__(self, *, save_every: int = 10, last_save: int = 10**9, name: str = "", **options: Any) -> None:
        super().__init__(name=name, strict=True)
        self.recovery = Recovery(self, **options)
        self.loss_weight: Weight | None = "samples" if self.recovery.looks_at_loss else None
        self.may_skip, self.lowers_lr = self.recovery.may_skip, self.recovery.lowers_lr
        self.good, self.save_every, self.last_save = GoodOnes(), save_every, last_save
        self.losses: list[tuple[int, float]] = []

    def join_run(self, host: Any) -> None:
        self.recovery.join_run(host, good_checkpoints=self.good)

    def on_gradients(self, context: StepContext) -> None:
        self.recovery.begin_step(context)
        if context.loss is not None:
            self.losses.append((context.step, float(context.loss.mean)))

    def on_step_end(self, context: StepContext) -> None:
        self.recovery.end_step(context)
        step = context.step + 1
        if step % self.save_every == 0 and step <= self.last_save:
            context.defer(lambda: self.save(step))

    def save(self, step: int) -> None:
        """Save a checkpoint that is good by definition."""
        self.good.all.append(Good(Path(self.driver.save_checkpoint(f"at_{step}")), step))

    def extra_state(self) -> dict[str, Any]:
        return {"recovery": self.recovery.state_dict()}

    def load_extra_state(self, state: Any) -> None:
        self.recovery.load_state_dict(state["recovery"])


class Module(pl.LightningModule):
    """The net in Lightning.

    Args:
        data: Samples.
        shuffles: Whether their order changes from epoch to epoch.
        learning_rate: Of the optimizer.
        jump: Step at which the learning rate is multiplied, and by what.
        workers: Of the loader.
        optimizer: "sgd" (with momentum), "plain" (without), or "adamw".
    """

    def __init__(
        self,
        data: Line,
        *,
        shuffles: bool = False,
        learning_rate: float = 0.1,
        jump: tuple[int, float] | None = None,
        workers: int = 0,
        optimizer: str = "sgd",
    ) -> None:
        super().__init__()
        self.net = make_net()
        self.data, self.shuffles, self.learning_rate, self.jump = data, shuffles, learning_rate, jump
        self.workers, self.optimizer_name = workers, optimizer
        self.seen: list[tuple[int, int, list[float]]] = []
        self.is_sharded = False

    def configure_model(self) -> None:
        """Shard over the mesh of ModelParallelStrategy."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None and not self.is_sharded:
            self.is_sharded = True
            shard_fsdp2(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a micro-batch."""
        inputs, targets = batch
        self.seen.append((self.trainer.current_epoch, batch_idx, inputs[:, 0].tolist()))
        if self.jump is not None and self.trainer.global_step == self.jump[0]:
            factor, self.jump = self.jump[1], None
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= factor
        loss: Tensor = nn.functional.mse_loss(self.net(inputs), targets)
        return loss

    def configure_optimizers(self) -> Any:
        """An optimizer whose rate falls slowly."""
        optimizer: torch.optim.Optimizer
        if self.optimizer_name == "adamw":
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        else:
            momentum = 0.9 if self.optimizer_name == "sgd" else 0.0
            optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=momentum)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Loader:
        """This rank's part."""
        rank, num_ranks = self.trainer.global_rank, self.trainer.world_size
        sampler = Shuffled(len(self.data), rank=rank, num_ranks=num_ranks, shuffles=self.shuffles)
        batches = BatchSampler(sampler, BATCH, drop_last=True)
        return Loader(self.data, batch_sampler=batches, num_workers=self.workers)


def fit(
    guard: Guard | None,
    folder: Path,
    *,
    data: Line,
    strategy: str = "single",
    devices: int = 1,
    max_epochs: int = 1,
    resume_from: Path | None = None,
    callbacks: Sequence[Any] = (),
    trainer_options: dict[str, Any] | None = None,
    kind: type[Module] = Module,
    **options: Any,
) -> Module:
    """Train in Lightning.

    Args:
        guard: The callback.
        folder: For checkpoints.
        data: Samples.
        strategy: Of `make_trainer`.
        devices: Number of ranks.
        max_epochs: Epochs.
        resume_from: A checkpoint.
        callbacks: More of them.
        trainer_options: Of `make_trainer`.
        kind: Class of the module.
        **options: Of `Module`.
    """
    module = kind(data, **options)
    chosen = {"max_steps": -1, "max_epochs": max_epochs, "default_root_dir": folder, **(trainer_options or {})}
    own = [guard] if guard is not None else []
    trainer = make_trainer(strategy, devices=devices, callbacks=[*own, *callbacks], **chosen)
    trainer.fit(module, ckpt_path=None if resume_from is None else str(resume_from))
    return module


def loop(
    guard: Guard,
    folder: Path,
    *,
    data: Line,
    strategy: str = "single",
    rank: int = 0,
    num_ranks: int = 1,
    max_epochs: int = 1,
    resume_from: Path | None = None,
    first: tuple[int, int] = (0, 0),
    learning_rate: float = 0.1,
    shuffles: bool = False,
    accumulate: int = 1,
    with_batches: bool = True,
    after_step: Callable[[int, Any], None] = lambda step, optimizer: None,
) -> types.SimpleNamespace:
    """Train in an Accelerate loop.

    Args:
        guard: The callback.
        folder: For checkpoints.
        data: Samples.
        strategy: Of `make_accelerator`.
        rank: This rank.
        num_ranks: Number of ranks.
        max_epochs: Epochs.
        resume_from: A checkpoint.
        first: Epoch and batch that it goes on with.
        learning_rate: Of SGD.
        shuffles: Whether the order changes from epoch to epoch.
        accumulate: Micro-batches a step.
        with_batches: Whether the loop iterates over `batches`.
        after_step: Called with the number of steps done and the optimizer.
    """
    accelerator = make_accelerator(strategy, project_dir=str(folder), gradient_accumulation_steps=accumulate)
    net = make_net()
    sampler = Shuffled(len(data), rank=rank, num_ranks=num_ranks, shuffles=shuffles)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, BATCH, drop_last=True))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9))
    result = types.SimpleNamespace(net=net, seen=[], num_steps=0)
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=[guard], log=lambda *row: None):
        if resume_from is not None:
            accelerator.load_state(str(resume_from))
        for epoch in range(first[0], max_epochs):
            sampler.set_epoch(epoch)
            start = first[1] if epoch == first[0] else 0
            batches: Any = accelerator.skip_first_batches(loader, start) if start else loader
            if with_batches:
                batches = guard.recovery.data.batches(batches, epoch=epoch, first_batch=start)
            for inputs, targets in batches:
                result.seen.append((epoch, inputs[:, 0].tolist()))
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    result.num_steps += 1
                    after_step(result.num_steps, optimizer)
    return result


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of ours, which other tests look at."""
    import warnings

    from stabilizer.errors import StabilizerWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StabilizerWarning)
        yield
