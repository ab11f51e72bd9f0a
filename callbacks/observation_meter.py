"""What loops observe of a step, for the callbacks that want it: packed for the one collective."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.observations import ObservationSums, StepObservations

__all__ = ["ObservationMeter", "observe_for"]


def observe_for(callbacks: Sequence[StabilizerCallback], **observed: Any) -> None:
    """Hand what is observed to all that want it.

    Args:
        callbacks: All of ours.
        **observed: See `ObservationTally.observe`.
    """
    for callback in callbacks:
        if callback.observations is not None and not callback.has_failed:
            callback.observations.observe(**observed)


class ObservationMeter:
    """Packs the sums of every callback that wants them, always of one length, and hands those over ranks out.

    Args:
        callbacks: All of ours.
    """

    def __init__(self, callbacks: Sequence[StabilizerCallback]) -> None:
        self._callbacks = [callback for callback in callbacks if callback.observations is not None]
        self._found: dict[str, StepObservations] = {}
        self._failure: Exception | None = None
        self.observe_late = functools.partial(observe_for, self._callbacks, is_late=True)

    def pack(self, *, device: torch.device) -> Tensor | None:
        """Numbers to sum over ranks.

        Args:
            device: Where the sums are wanted.

        Returns:
            Shape (n,), n being the same on every rank; `None` if nobody wants any.
        """
        self._found = {}
        return torch.cat([self._packed(callback, device) for callback in self._callbacks]) if self._callbacks else None

    def read(self, sums: Tensor) -> Exception | None:
        """Take the sums over all ranks.

        Args:
            sums: Of what `pack` gave.

        Returns:
            What packing failed with on this rank, if it did.
        """
        for callback, piece in zip(self._callbacks, sums.chunk(max(1, len(self._callbacks))), strict=False):
            tally = callback.observations
            assert tally is not None
            self._found[callback.state_key] = StepObservations(ObservationSums.unpacked(piece), bounds=tally.bounds)
        failure, self._failure = self._failure, None
        return failure

    def observed_for(self, callback: StabilizerCallback) -> StepObservations | None:
        """What was observed for a callback.

        Args:
            callback: One of ours.
        """
        return self._found.get(callback.state_key)

    def _packed(self, callback: StabilizerCallback, device: torch.device) -> Tensor:
        assert callback.observations is not None
        try:
            return callback.observations.given(device).packed()
        except Exception as error:
            # The other ranks wait in the collective: this one takes part with the same shape.
            self._failure = error
            return ObservationSums.empty(device).packed()
