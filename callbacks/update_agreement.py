"""Failures of our own that must not leave other ranks waiting in a collective."""

from __future__ import annotations

import torch
from torch import Tensor

from stabilizer.late import HostCopy

__all__ = ["SharedFailure"]


class SharedFailure:
    """Ranks that exchange numbers go on together until all of them know that one has failed; then all of them raise.

    Args:
        what: What could not be done.
        device: Where the numbers are.

    Attributes:
        error: What this rank has failed with, the first time; it stays.
    """

    def __init__(self, what: str, *, device: torch.device) -> None:
        self._what = what
        self._num = torch.zeros((), device=device)
        self._noted: HostCopy | None = None
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """This rank has failed; it says so to the others from now on, until all of them know.

        Args:
            error: With what.
        """
        self.error = self.error or error

    def note(self, num_failed: Tensor) -> None:
        """Take what the ranks have exchanged.

        Args:
            num_failed: How many ranks have failed, shape (), the same on every rank.
        """
        self._num += num_failed

    def check(self, *, agrees: bool, is_due: bool) -> None:
        """Raise what went wrong.

        Args:
            agrees: Whether ranks exchange numbers.
            is_due: Whether this is a step at which ranks look, the same on every rank.

        Raises:
            RuntimeError: A rank has failed; on every rank.
            Exception: What this rank has failed with, where no other waits for it.
        """
        if not agrees:
            if self.error is not None:
                raise self.error
        elif is_due:
            # A step or more old: it has arrived long ago.
            noted, self._noted = self._noted, HostCopy(self._num)
            if noted is not None and float(noted.read()):
                raise RuntimeError(f"{self._what} failed on a rank (its log has the traceback)") from self.error
