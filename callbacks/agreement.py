"""What all ranks must know of each other's trouble, without a collective or a wait of its own on most steps.

A rank raises flags. They travel with the norms (one buffer), and are read much later, at a step that every rank knows
in advance, so that all ranks take the same branch at the same step. Under plain DDP, where norms need no collective,
these few steps have one; there the ranks compare their gradients as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.errors import warn
from stabilizer.late import HostCopy
from stabilizer.measurement import Measurement, describe_difference
from stabilizer.reduction import world_size

__all__ = ["Agreement"]

_INTERVAL = 64


class Agreement:
    """Flags of failed callbacks, of failed measuring, and of Partial gradients that nobody planned for.

    Args:
        num_callbacks: How many callbacks there are, the same on every rank.
    """

    def __init__(self, *, num_callbacks: int) -> None:
        self._local = [0.0] * (num_callbacks + 2)
        self._cache: tuple[list[float], Tensor] | None = None
        self._noted: tuple[int, HostCopy] | None = None
        self._warned = False
        self._known: set[int] = set()
        self.is_off = False

    @property
    def num_flags(self) -> int:
        """Length of the vector of flags."""
        return len(self._local)

    @staticmethod
    def is_due(step: int) -> bool:
        """Whether ranks exchange flags at a step: 0 and the powers of two up to 64, then every 64th.

        Args:
            step: The optimizer step.

        Example:
            >>> [step for step in range(200) if Agreement.is_due(step)]
            [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]
        """
        return step % _INTERVAL == 0 or (step < _INTERVAL and step & (step - 1) == 0)

    def fail(self, number: int) -> None:
        """A callback raised on this rank: tell the others.

        Args:
            number: Of the callback.
        """
        self._local[number] = 1.0

    def is_known(self, number: int) -> bool:
        """Whether all ranks know that a callback has failed on some.

        Args:
            number: Of the callback.
        """
        return world_size() == 1 or number in self._known

    def measuring_failed(self) -> None:
        """Statistics could not be computed on this rank; all ranks stop when they have agreed."""
        self._local[-2] = 1.0
        self.is_off = world_size() == 1

    def request_replan(self, wanted: bool) -> None:
        """Ask all ranks to look again for Partial gradients, or no longer.

        Args:
            wanted: Whether this rank needs it.
        """
        self._local[-1] = float(wanted)

    def flags(self, device: torch.device) -> Tensor:
        """This rank's flags.

        Args:
            device: Where the statistics are.

        Returns:
            Shape (num_flags,); copied to the device only when it has changed.
        """
        if self._cache is None or self._cache[0] != self._local or self._cache[1].device != device:
            self._cache = (list(self._local), torch.tensor(self._local, device=device))
        return self._cache[1]

    def note(self, measurement: Measurement) -> None:
        """Keep what the ranks said at a due step; it is read at the next one.

        Args:
            measurement: Of the step.
        """
        difference = measurement.difference
        extra = measurement.flags.new_zeros(1) if difference is None else difference.reshape(1)
        self._noted = (measurement.step, HostCopy(torch.cat([measurement.flags, extra])))

    def apply(self, callbacks: Sequence[StabilizerCallback]) -> bool:
        """Act, at a due step, on what the ranks said at the one before.

        Args:
            callbacks: In the order of their numbers.

        Returns:
            Whether all ranks are to look again for Partial gradients.
        """
        if self._noted is None:
            return False
        step, copy = self._noted
        *flags, difference = copy.read().tolist()
        self._known.update(number for number in range(len(callbacks)) if flags[number] > 0)
        for number, callback in enumerate(callbacks):
            if flags[number] > 0 and not callback.has_failed:
                callback.has_failed = True
                warn(
                    f"{type(callback).__name__} failed on another rank (its log has the traceback): it is off on all "
                    "ranks from now on"
                )
        if flags[-2] > 0:
            self.is_off = True
            warn("measuring gradients failed on a rank (its log has the traceback): all callbacks are off from now on")
        message = describe_difference(difference, step)
        if message is not None and not self._warned:
            self._warned = True
            warn(message)
        return bool(flags[-1] > 0)
