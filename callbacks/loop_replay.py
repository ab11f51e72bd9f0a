"""Running a loop's micro-batches again: the model on what it was given, and the loss in what it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from stabilizer.fsdp import dtensor_class, has_fsdp1
from stabilizer.localize.recording import MicroBatch
from stabilizer.reduction import world_size

__all__ = ["LoopReplayer", "LossFunction"]

#: Takes the model and a micro-batch, gives its loss as the loop propagates it.
LossFunction = Callable[[nn.Module, Any], Tensor]


class LoopReplayer:
    """A `stabilizer.localize.replaying.Replayer` for loops, with an accelerator or without.

    Args:
        model: As it trains, wrapped.
        loss_fn: Where the loss is not on the model's output.

    Attributes:
        model: The inner module under DDP.
        divisor: What the loop's host divides every loss by.
        scaler: The loop's `GradScaler`, as far as it has told.
        is_running: Whether a forward is one of ours.
    """

    def __init__(self, model: nn.Module, *, loss_fn: LossFunction | None = None) -> None:
        self._is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        inner: Any = model
        self.model: nn.Module = inner.module if self._is_ddp else model
        self.reason: str | None = None
        self.divisor = 1
        self.scaler: Any = None
        self.is_running = False
        self._loss_fn = loss_fn
        self._told: tuple[Any] | None = None
        self._is_told = False

    @property
    def is_replicated(self) -> bool:
        """Whether a replay's gradients are a rank's own."""
        return world_size() > 1 and self._is_ddp

    @property
    def knows_reduction(self) -> bool:
        """Whether ranks' gradients are averaged, rather than by the loop's own code in a way that nobody knows."""
        return world_size() == 1 or self._is_ddp or has_fsdp1(self.model) or self._has_dtensors()

    def loss(self, micro_batch: MicroBatch) -> Tensor:
        """The loss of a micro-batch, as the loop propagates it."""
        args, kwargs = micro_batch.call()
        autocast = contextlib.nullcontext() if micro_batch.autocast is None else micro_batch.autocast.again()
        self.is_running = True
        try:
            with autocast:
                if self._loss_fn is None:
                    loss = _loss_in(self.model(*args, **kwargs))
                else:
                    loss = _checked(self._loss_fn(self.model, _batch(args, kwargs)))
        finally:
            self.is_running = False
        scale = self.scale()
        loss = loss / self.divisor
        return loss if scale is None else loss * scale.to(loss.device)

    def tell(self, batch: Any) -> None:
        """Take the batch of the micro-batch that comes next.

        Args:
            batch: As the loss function wants it.
        """
        self._told, self._is_told = (batch,), True

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What a forward's micro-batch is to be run again with.

        Args:
            args: Of the forward.
            kwargs: Likewise.

        Returns:
            The batch that was told; `None` for one more forward of it, where the loop tells its batches.
        """
        told, self._told = self._told, None
        if told is not None:
            return told, {}
        return None if self._is_told else (args, kwargs)

    def scale(self) -> Tensor | None:
        """The scale of the loop's scaler."""
        scale: Tensor | None = getattr(self.scaler, "_scale", None)
        return scale

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """A loop logs outside of what is run again."""
        yield

    def _has_dtensors(self) -> bool:
        dtensor = dtensor_class()
        return dtensor is not None and any(isinstance(parameter, dtensor) for parameter in self.model.parameters())


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a loss function is given: the batch that the loop has told, or what the model was called with."""
    if kwargs:
        return kwargs if not args else (args, kwargs)
    return args[0] if len(args) == 1 else args


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        told = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise RuntimeError(
            f"loss_fn returned {told}: let attach(..., loss_fn=) have a function of (model, batch) that returns the "
            "loss of a micro-batch as it is propagated, a tensor of one element"
        )
    return loss


def _loss_in(output: Any) -> Tensor:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(found, tuple) and found:
        found = found[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise RuntimeError(
            f"the model returns {type(output).__name__} without a loss: give attach(..., loss_fn=) a function of "
            "(model, batch) that returns the loss of a micro-batch as it is propagated, and tell the batch with "
            "handle.record_batch(batch) if the model is not called with all of it"
        )
    return found
