"""What a host must be able to do so that a micro-batch can be run again."""

from __future__ import annotations

import contextlib
from typing import Protocol

from torch import Tensor, nn

from stabilizer.localize.recording import MicroBatch

__all__ = ["Replayer", "unscaled"]


class Replayer(Protocol):
    """Runs micro-batches of the step at hand again.

    Attributes:
        reason: Why nothing can be run again; `None` if it can.
        model: What is run: the inner module under DDP, whose collectives nobody wants then.
        is_running: Whether a forward that is under way is one of a replay.
        is_replicated: Whether gradients of `model` are this rank's own, still to be averaged over ranks.
        knows_reduction: Whether it is known how ranks' gradients become the step's.
    """

    is_running: bool

    @property
    def reason(self) -> str | None:
        """Why nothing can be run again."""

    @property
    def model(self) -> nn.Module:
        """What is run."""

    @property
    def is_replicated(self) -> bool:
        """Whether gradients of `model` are this rank's own."""

    @property
    def knows_reduction(self) -> bool:
        """Whether it is known how ranks' gradients become the step's."""

    def loss(self, micro_batch: MicroBatch) -> Tensor:
        """The loss as it was propagated: divided by the accumulation, multiplied by the loss scale.

        Args:
            micro_batch: Of this step.

        Returns:
            Shape ().
        """

    def scale(self) -> Tensor | None:
        """The loss scale that is in `loss`, shape (); `None` if there is none."""

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the host's loggers, counters and progress bars out of it."""


def unscaled(squares: Tensor, replayer: Replayer | None) -> Tensor:
    """Square sums of gradients without the loss scale that is in the gradients.

    Args:
        squares: Of any shape.
        replayer: Tells the scale; `None` for none.
    """
    scale = None if replayer is None else replayer.scale()
    return squares if scale is None else squares / scale.to(squares.device, squares.dtype).square()
