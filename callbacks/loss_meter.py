"""The loss of a step for the callbacks that look at it, and what is odd about its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Position
from stabilizer.errors import warn
from stabilizer.losses import LossReduction, StepLoss
from stabilizer.tally import MicroBatchLoss, Weight

__all__ = ["LossMeter", "weights_of"]

_STEPS = 3


def weights_of(callbacks: Sequence[StabilizerCallback]) -> list[Weight]:
    """The kinds of weight that callbacks want losses weighed by, or parts of a step counted in, in one order.

    Args:
        callbacks: All of ours.
    """
    wanted = {weight for callback in callbacks for weight in (callback.loss_weight, callback.part_unit)}
    return sorted(weight for weight in wanted if weight is not None)


class LossMeter:
    """Packs a step's losses for the one collective and hands the reduced ones out.

    Args:
        callbacks: All of ours.
    """

    def __init__(self, callbacks: Sequence[StabilizerCallback]) -> None:
        self._callbacks = [callback for callback in callbacks if callback.loss_weight is not None]
        self._reduction = LossReduction(weights_of(callbacks))
        self._losses: dict[str, StepLoss] = {}
        self._with_extremes = False
        self._num_missing = 0
        self._has_warned_of_window = False

    def pack(self, step: int, pieces: Sequence[MicroBatchLoss], *, device: torch.device) -> Tensor | None:
        """Numbers to sum over ranks.

        Args:
            step: The optimizer step.
            pieces: This rank's losses.
            device: Where the sums are wanted.

        Returns:
            Shape (n,), n being the same on every rank; `None` if nobody looks at the loss.
        """
        self._losses = {}
        if not self._callbacks:
            return None
        self._num_missing = 0 if pieces else self._num_missing + 1
        names = sorted({type(callback).__name__ for callback in self._callbacks if callback.needs_loss})
        if self._num_missing == _STEPS and names:
            warn(
                f"{', '.join(names)}: no loss was seen in {_STEPS} steps. Call handle.record_loss(loss) in a loop that "
                "propagates its loss without accelerator.backward(), or return it from training_step"
            )
        intervals = {callback.extremes_every_n_steps for callback in self._callbacks}
        self._with_extremes = any(interval is not None and step % interval == 0 for interval in intervals)
        return self._reduction.pack(pieces, device=device, with_extremes=self._with_extremes)

    def read(self, sums: Tensor) -> Exception | None:
        """Take the sums over all ranks.

        Args:
            sums: Of what `pack` gave.

        Returns:
            What packing failed with on this rank, if it did.
        """
        if self._callbacks:
            found = self._reduction.unpack(sums, with_extremes=self._with_extremes)
            self._losses = dict(zip(self._reduction.weights, found, strict=True))
        failure, self._reduction.failure = self._reduction.failure, None
        return failure

    def drop(self) -> None:
        """Forget the losses of the step at hand: its optimizer has not moved."""
        self._reduction.drop()

    def loss_for(self, callback: StabilizerCallback) -> StepLoss | None:
        """The step's loss as a callback wants it weighted.

        Args:
            callback: One of ours.
        """
        return None if callback.loss_weight is None else self._losses.get(callback.loss_weight)

    def check_window(self, step: int, position: Position) -> None:
        """Warn once of a window of accumulation that is shorter than what its loss was divided by.

        Args:
            step: The optimizer step.
            position: Its micro-batches.
        """
        if not position.is_short or self._has_warned_of_window:
            return
        self._has_warned_of_window = True
        num, divisor = position.num_micro_batches, position.divisor
        warn(
            f"step {step} (batch {position.batch_index}) has {num} micro-batch{'es' if num > 1 else ''}, but each loss "
            f"is divided by {divisor}: its gradient is {num / divisor:.2g} of what it should be. Nothing is changed. "
            "Drop the last incomplete window, or choose an accumulation that divides the number of batches"
        )
