"""What a loop tells its callbacks beside what they see."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stabilizer.callbacks.loop_replay import LoopReplayer
from stabilizer.callbacks.loop_states import LoopStates

__all__ = ["LoopTelling"]


class LoopTelling(LoopStates):
    """Part of a handle: losses and batches that its user tells."""

    _batch_index: int
    _replayer: LoopReplayer

    def record_loss(self, loss: Any, *, weight: Tensor | float | None = None) -> None:
        """Take the loss of a micro-batch, instead of the one that `accelerator.backward` was given.

        Args:
            loss: Mean of the micro-batch: a tensor of one element, or a mapping with the key "loss".
            weight: How many tokens or samples it is the mean of.

        Raises:
            ValueError: If it is neither.
        """
        if not self.is_closed:
            self._num_backwards += 1
            self._batch_index += 1
            self._suites.tally.tell(loss, weight=weight)

    def record_batch(self, batch: Any) -> None:
        """Tell the micro-batch that comes next, for `loss_fn`; before the model is called with a part of it.

        Args:
            batch: On its device, as `loss_fn` wants it.
        """
        if not self.is_closed and self._suites.replays.is_on:
            self._replayer.tell(batch)
