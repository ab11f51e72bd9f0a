"""What a loop saves of its callbacks, and gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.suites import Suites
from stabilizer.errors import warn

__all__ = ["LoopStates"]


class LoopStates:
    """Part of a handle: the states of its callbacks."""

    callbacks: Sequence[StabilizerCallback]
    is_closed: bool
    _suites: Suites
    _num_backwards: int
    _save_fn: Callable[[str], None] | None = None

    def save_with(self, function: Callable[[str], None] | None) -> None:
        """Say how a checkpoint is saved.

        Args:
            function: See `attach`.
        """
        self._save_fn = function

    @property
    def can_save(self) -> bool:
        """Whether anybody has said how a checkpoint is saved."""
        return self._save_fn is not None

    def save_checkpoint(self, name: str) -> str | None:
        """Have the loop save a checkpoint; on every rank.

        Args:
            name: What the loop is told.

        Returns:
            The name; `None` where the loop has not said how to save.
        """
        if self._save_fn is None:
            return None
        self._save_fn(name)
        return name

    def state_dict(self) -> dict[str, Any]:
        """States of all callbacks by their `state_key`, for a checkpoint: plain types and CPU tensors."""
        return {callback.state_key: callback.state_dict() for callback in self.callbacks}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back states; on every rank, and at any time between two steps.

        Args:
            state_dict: What `state_dict` gave. A callback without an entry starts anew, with a warning.

        Raises:
            ValueError: If an entry is not of its callback.
        """
        missing = [callback.state_key for callback in self.callbacks if callback.state_key not in state_dict]
        if missing:
            warn(f"no state of {', '.join(missing)}, which start anew; there is {sorted(state_dict)}")
        if not self.is_closed:
            self._suites.close(is_end=False)
            self._suites.tally.discard()
            self._num_backwards = 0
        for callback in self.callbacks:
            if callback.state_key in state_dict:
                callback.load_state_dict(state_dict[callback.state_key])
