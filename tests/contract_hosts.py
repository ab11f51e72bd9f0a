"""The same short training in every host, for what callbacks promise whatever the host.

host = make_host("accelerate")
weights = host.train([GradNormCallback()], num_steps=3)
host.points  # (tag, step) -> value
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stabilizer.callbacks import RolloutMismatchCallback, StabilizerCallback, attach
from tests.accelerate_loops import make_accelerator, make_optimizer
from tests.contract_base import EPOCH, Host, OutOfDataError, Wrapped, observed_in, weights_of
from tests.contract_trainer import TrainerHost
from tests.lightning_models import BATCH_SIZE, PACKAGES, expected_batches, make_module, make_trainer
from tests.loggers import row_logger
from tests.models import loss_of
from tests.spread import no_sync

__all__ = ["EPOCH", "HOSTS", "Host", "OutOfDataError", "Wrapped", "make_host", "observed_in"]


class _Lightning(Host):
    def __init__(self, package: str, **options: Any) -> None:
        super().__init__(**options)
        self.package = package

    def train(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        num_steps: int = 3,
        save: Path | None = None,
        load: Path | None = None,
        breaks_at: int | None = None,
    ) -> dict[str, Tensor]:
        logger = row_logger(self.package)
        self.rows = logger.rows
        length = EPOCH * BATCH_SIZE * self.num_ranks * self.num_micro_batches
        self._module = make_module("transformer", package=self.package, optimizer="adamw", length=length)
        original = self._module.training_step

        def step(batch: Any, batch_idx: int) -> Tensor:
            if self._trainer.global_step == breaks_at:
                raise OutOfDataError
            loss: Tensor = original(batch, batch_idx)
            for callback in callbacks:
                if isinstance(callback, RolloutMismatchCallback):
                    callback.observe(**observed_in(batch))
            return loss

        self._module.training_step = step
        self._trainer = make_trainer(
            "ddp" if self.num_ranks > 1 else "single",
            devices=self.num_ranks,
            package=self.package,
            max_steps=num_steps,
            accumulate_grad_batches=self.num_micro_batches,
            callbacks=list(callbacks),
            logger=logger,
        )
        self._trainer.fit(self._module, ckpt_path=None if load is None else str(load / "model.ckpt"))
        if save is not None:
            self._trainer.save_checkpoint(save / "model.ckpt")
        return weights_of(self._module)

    def end_again(self, callbacks: Sequence[StabilizerCallback]) -> None:
        for callback in callbacks:
            hooks: Any = callback
            hooks.on_train_end(self._trainer, self._module)
            hooks.on_exception(self._trainer, self._module, RuntimeError("late"))
            hooks.teardown(self._trainer, self._module, "fit")


class _Loop(Host):
    """A loop over the same batches."""

    accelerator: Any = None

    def train(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        num_steps: int = 3,
        save: Path | None = None,
        load: Path | None = None,
        breaks_at: int | None = None,
    ) -> dict[str, Tensor]:
        self.rows = rows = []
        bare = Wrapped()
        model, optimizer = self._prepare(bare, make_optimizer(bare, name="adamw"))
        self._handle: Any = contextlib.nullcontext()
        if callbacks:
            self._handle = attach(
                self.accelerator,
                model=model,
                optimizer=optimizer,
                callbacks=list(callbacks),
                log=lambda values, step: rows.append((values, step)),
                loss_fn=loss_of,
            )
        with self._handle:
            first = 0 if load is None else self._load(load, bare, optimizer)
            for step in range(first, num_steps):
                for number, batch in enumerate(self._batches(step), start=1):
                    with self._accumulate(model, is_last=number == self.num_micro_batches) as steps:
                        if callbacks:
                            self._handle.record_batch(batch)
                        loss = loss_of(model, batch)
                        if step == breaks_at:
                            raise OutOfDataError
                        if any(callback.observations is not None for callback in callbacks):
                            self._handle.observe(**observed_in(batch))
                        self._backward(loss, batch)
                        if steps:
                            optimizer.step()
                            optimizer.zero_grad()
            if save is not None:
                self._save(save, bare, optimizer, num_steps)
        return weights_of(bare)

    def _batches(self, step: int) -> list[Any]:
        """This rank's, of a step."""
        size = {"num_ranks": self.num_ranks, "num_micro_batches": self.num_micro_batches}
        return expected_batches("transformer", step % EPOCH, **size)[self.rank :: self.num_ranks]

    def end_again(self, callbacks: Sequence[StabilizerCallback]) -> None:
        self._handle.close()
        self._handle.close(after_exception=True)
        self._handle.__exit__(None, None, None)

    @abc.abstractmethod
    def _prepare(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]: ...

    @contextlib.contextmanager
    def _accumulate(self, model: Any, *, is_last: bool) -> Iterator[bool]:
        """Around a micro-batch; yields whether the optimizer is called after it."""
        with contextlib.nullcontext() if is_last else no_sync(model):
            yield is_last

    @abc.abstractmethod
    def _backward(self, loss: Tensor, batch: Any) -> None: ...

    @abc.abstractmethod
    def _save(self, folder: Path, model: nn.Module, optimizer: Any, num_steps: int) -> None: ...

    @abc.abstractmethod
    def _load(self, folder: Path, model: nn.Module, optimizer: Any) -> int: ...


class _Accelerate(_Loop):
    def _prepare(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        self.accelerator = make_accelerator(
            "ddp" if self.num_ranks > 1 else "single", gradient_accumulation_steps=self.num_micro_batches
        )
        wrapped, stepper = self.accelerator.prepare(model, optimizer)
        return wrapped, stepper

    @contextlib.contextmanager
    def _accumulate(self, model: Any, *, is_last: bool) -> Iterator[bool]:
        with self.accelerator.accumulate(model):
            yield True

    def _backward(self, loss: Tensor, batch: Any) -> None:
        self.accelerator.backward(loss)

    def _save(self, folder: Path, model: nn.Module, optimizer: Any, num_steps: int) -> None:
        self.accelerator.save_state(str(folder))
        (folder / "num_steps").write_text(str(num_steps))

    def _load(self, folder: Path, model: nn.Module, optimizer: Any) -> int:
        self.accelerator.load_state(str(folder))
        return int((folder / "num_steps").read_text())


class _Plain(_Loop):
    def _prepare(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return (DistributedDataParallel(model) if self.num_ranks > 1 else model), optimizer

    def _backward(self, loss: Tensor, batch: Any) -> None:
        (loss / self.num_micro_batches).backward()
        if hasattr(self._handle, "record_loss"):
            self._handle.record_loss(loss, weight=len(batch[1]))

    def _save(self, folder: Path, model: nn.Module, optimizer: Any, num_steps: int) -> None:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "num_steps": num_steps}
        torch.save({**states, "callbacks": self._handle.state_dict()}, folder / "all.pt")

    def _load(self, folder: Path, model: nn.Module, optimizer: Any) -> int:
        states = torch.load(folder / "all.pt", weights_only=True)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        self._handle.load_state_dict(states["callbacks"])
        return int(states["num_steps"])


_KINDS: dict[str, Callable[..., Host]] = {
    **{package: lambda package=package, **options: _Lightning(package, **options) for package in PACKAGES},
    "accelerate": _Accelerate,
    "plain": _Plain,
    "transformers": TrainerHost,
}
HOSTS = tuple(_KINDS)


def make_host(name: str, **options: Any) -> Host:
    """A host.

    Args:
        name: One of HOSTS.
        **options: Of Host.
    """
    return _KINDS[name](**options)
