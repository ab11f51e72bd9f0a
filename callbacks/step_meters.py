"""What the callbacks of a suite want of a step beside its norms: losses, parts, observations; in the one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Position
from stabilizer.callbacks.failures import Failures
from stabilizer.callbacks.local_gradients import LocalGradients
from stabilizer.callbacks.loss_meter import LossMeter
from stabilizer.callbacks.observation_meter import ObservationMeter
from stabilizer.callbacks.part_meter import PartMeter
from stabilizer.measurement import Measurement
from stabilizer.store import GradientStore
from stabilizer.tally import MicroBatchLoss

__all__ = ["StepMeters"]


class StepMeters:
    """Packs what all of them need, and hands out the sums over ranks.

    Args:
        callbacks: All of ours.
    """

    def __init__(self, callbacks: Sequence[StabilizerCallback]) -> None:
        self._callbacks = list(callbacks)
        self._losses, self._parts = LossMeter(callbacks), PartMeter(callbacks)
        self._observations = ObservationMeter(callbacks)
        self._sizes: list[int] = []
        self._step = 0

    def check_window(self, step: int, position: Position) -> None:
        """See `LossMeter.check_window`."""
        self._losses.check_window(step, position)

    def pack(
        self, step: int, losses: Sequence[MicroBatchLoss], gradients: LocalGradients | None, *, store: GradientStore
    ) -> Tensor | None:
        """Numbers to sum over ranks.

        Args:
            step: The optimizer step.
            losses: Of this rank's micro-batches.
            gradients: Their local norms; `None` where there are none.
            store: Will measure the step.

        Returns:
            Shape (n,), n being the same on every rank; `None` if nobody wants any.
        """
        self._step = step
        pieces = [
            self._losses.pack(step, losses, device=store.device),
            self._parts.pack(step, gradients, losses, store=store),
            self._observations.pack(device=store.device),
        ]
        self._sizes = [0 if piece is None else piece.numel() for piece in pieces]
        given = [piece for piece in pieces if piece is not None]
        return torch.cat(given) if given else None

    def read(self, measurement: Measurement) -> dict[str, Exception | None]:
        """Take the sums over all ranks.

        Args:
            measurement: With the sums of what `pack` gave.

        Returns:
            What packing failed with on this rank, if it did.
        """
        of_losses, of_parts, observed = measurement.sums.split(self._sizes)
        parts = self._parts.read(of_parts, whole=measurement.squares)
        return {"loss": self._losses.read(of_losses), "parts": parts, "observed": self._observations.read(observed)}

    def tell(self, found: dict[str, Exception | None], failures: Failures) -> None:
        """Turn off those that read what could not be packed.

        Args:
            found: What `read` gave.
            failures: Takes note.
        """
        for number, callback in enumerate(self._callbacks):
            reads = {
                "loss": callback.loss_weight is not None,
                "parts": callback.parts_every_n_steps is not None,
                "observed": callback.observations is not None,
            }
            for what, failure in found.items():
                if failure is not None and reads[what]:
                    failures.of_callback(number, what, failure, step=self._step)

    def drop(self) -> None:
        """Forget the losses of the step at hand: its optimizer has not moved."""
        self._losses.drop()

    def found_for(self, callback: StabilizerCallback) -> dict[str, Any]:
        """A callback's part of its context.

        Args:
            callback: One of ours.

        Returns:
            `loss`, `parts`, `observed` and `observe`.
        """
        return {
            "loss": self._losses.loss_for(callback),
            "parts": self._parts.parts_for(callback, step=self._step),
            "observed": self._observations.observed_for(callback),
            "observe": self._observations.observe_late,
        }
