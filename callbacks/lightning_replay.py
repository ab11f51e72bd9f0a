"""Running a Trainer's micro-batches again: its training_step, without its logs, counters and reductions."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from stabilizer.fsdp import has_fsdp1
from stabilizer.localize.recording import MicroBatch
from stabilizer.reduction import world_size

__all__ = ["LightningReplayer"]

_LOGGING = ("log", "log_dict")


class LightningReplayer:
    """A `stabilizer.localize.replaying.Replayer` for Trainers of both packages.

    In manual optimization training_step moves the optimizer, so that it cannot be run again; a module that has a method
    `stabilizer_loss(batch, batch_idx)` can.

    Args:
        trainer: With model, strategy and optimizers set up; a weak proxy.
    """

    def __init__(self, trainer: Any) -> None:
        # The driver's own reference is weak.
        self._trainer = trainer
        self.is_running = False

    @property
    def reason(self) -> str | None:
        """Why nothing can be run again."""
        module = self._trainer.lightning_module
        if module.automatic_optimization or hasattr(module, "stabilizer_loss"):
            return None
        return (
            "training_step moves the optimizer (manual optimization), so that it cannot be run again: give the module "
            "a method stabilizer_loss(batch, batch_idx) that returns the loss as it is propagated"
        )

    @property
    def model(self) -> nn.Module:
        """The module itself under DDP, the wrapped one under FSDP."""
        wrapped: Any = self._trainer.strategy.model
        model: nn.Module = self._trainer.lightning_module
        return wrapped if wrapped is not None and has_fsdp1(wrapped) else model

    @property
    def is_replicated(self) -> bool:
        """Whether a replay's gradients are a rank's own: under DDP its reductions are left out."""
        is_ddp = isinstance(self._trainer.strategy.model, nn.parallel.DistributedDataParallel)
        return world_size() > 1 and is_ddp

    @property
    def knows_reduction(self) -> bool:
        """Whether it is known how ranks' gradients become the step's: by the strategy."""
        return True

    def loss(self, micro_batch: MicroBatch) -> Tensor:
        """The loss of a micro-batch, as Lightning propagates it."""
        trainer = self._trainer
        module, strategy = trainer.lightning_module, trainer.strategy
        args, kwargs = micro_batch.call()
        # Under DDP not through the wrapper, which reduces.
        owner: Any = module if self.model is module else strategy
        step: Callable[..., Any] = owner.training_step
        divisor = int(trainer.accumulate_grad_batches)
        if not module.automatic_optimization:
            step, divisor = module.stabilizer_loss, 1
        self.is_running = True
        try:
            with strategy.precision_plugin.train_step_context():
                output = step(*args, **kwargs)
        finally:
            self.is_running = False
        found = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(found, Tensor):
            raise RuntimeError(f"{type(module).__name__}.training_step gave no loss: {type(output).__name__}")
        loss = found / divisor
        scale = self.scale()
        return loss if scale is None else loss * scale.to(loss.device)

    def scale(self) -> Tensor | None:
        """The scale of the precision plugin's scaler."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        scale: Tensor | None = getattr(scaler, "_scale", None)
        return scale

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is logged: neither through the module nor through the loggers themselves."""
        trainer = self._trainer
        modules = [part for part in trainer.lightning_module.modules() if hasattr(part, "automatic_optimization")]
        before = {part: {name: part.__dict__[name] for name in _LOGGING if name in part.__dict__} for part in modules}
        loggers = list(trainer.loggers)
        try:
            for part in modules:
                for name in _LOGGING:
                    part.__dict__[name] = _nothing
            trainer.loggers = _dummies(trainer, len(loggers))
            yield
        finally:
            trainer.loggers = loggers
            for part, own in before.items():
                for name in _LOGGING:
                    part.__dict__.pop(name, None)
                part.__dict__.update(own)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands where something would be logged."""


def _dummies(trainer: Any, num: int) -> list[Any]:
    module = next(kind.__module__ for kind in trainer.__class__.__mro__ if kind.__name__ == "Trainer")
    dummy = importlib.import_module(f"{module.rsplit('.', 2)[0]}.loggers.logger").DummyLogger
    return [dummy() for _ in range(num)]
