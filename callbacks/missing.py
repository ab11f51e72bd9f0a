"""Tells a user of trainable parameters that never get a gradient."""

from __future__ import annotations

from stabilizer.errors import warn
from stabilizer.late import HostCopy
from stabilizer.measurement import Measurement
from stabilizer.parameters import ParameterIndex

__all__ = ["MissingGradients"]

_STEPS = 3


class MissingGradients:
    """Watches the first steps of a run, then warns once if there is something to say.

    Args:
        index: The parameters.
    """

    def __init__(self, index: ParameterIndex) -> None:
        self._index = index
        self._unseen = {position for position in range(len(index)) if index.owns_elements(position)}
        self._has_elements = bool(self._unseen)
        self._num_steps = 0
        self._totals: list[HostCopy] = []
        self._is_done = False

    def see(self, measurement: Measurement) -> None:
        """Look at a step.

        Args:
            measurement: Of the step, with its gradients in place.
        """
        if self._is_done:
            return
        if self._num_steps == _STEPS:
            if all(total.is_ready for total in self._totals):
                self.conclude()
            return
        self._num_steps += 1
        gradients = self._index.gradients()
        self._unseen -= {position for position, gradient in enumerate(gradients) if gradient is not None}
        self._totals.append(HostCopy(measurement.squares.sum() + measurement.maxima.sum()))

    def conclude(self) -> None:
        """Say what the first steps have shown, once."""
        if self._is_done or not self._num_steps:
            return
        self._is_done = True
        names = [self._index.names[position] for position in sorted(self._unseen)]
        steps = f"the first {self._num_steps} optimizer steps" if self._num_steps > 1 else "the first optimizer step"
        if self._has_elements and len(names) == len(self._index):
            warn(
                f"none of the {len(names)} trainable parameters had a gradient in {steps}: all norms are 0. Either the "
                "loss does not depend on them (inputs detached, reentrant checkpointing of inputs without gradient), "
                "or the trainer keeps gradients to itself, as DeepSpeed ZeRO does; use DDP, FSDP1 or FSDP2 instead"
            )
        elif names:
            warn(
                f"{len(names)} of {len(self._index)} trainable parameters had no gradient in {steps}: {names[:8]}"
                f"{' and more' if len(names) > 8 else ''}. Freeze them (requires_grad=False) if that is meant"
            )
        elif all(not copy.read().any() for copy in self._totals):
            warn(f"the total gradient norm is exactly 0 in {steps}: nothing is being trained")
