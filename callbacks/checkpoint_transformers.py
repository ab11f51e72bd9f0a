"""The saves of transformers' trainer: verified when the callbacks' states are in them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stabilizer.callbacks.checkpoint_accelerate import wait_for_ranks
from stabilizer.callbacks.checkpoint_saves import GuardedSaves
from stabilizer.callbacks.hosting import stand_before
from stabilizer.checkpoints.guard_file import Expected
from stabilizer.reduction import world_size

__all__ = ["TransformersSaves"]


class TransformersSaves(GuardedSaves):
    """The saves of a trainer, which deletes the old ones (`save_total_limit`) as it likes.

    Args:
        driver: Of the callbacks; it writes their states into each checkpoint.
        model: As it trains.
        next_step: Gives the optimizer step that comes next.
    """

    def __init__(self, *, driver: Any, model: Any, next_step: Callable[[], int]) -> None:
        super().__init__(None, model=model, num_processes=world_size())
        self._next_step = next_step
        self._undo.append(stand_before(driver, "save_states", self._saved))

    def expected(self) -> Expected:
        """An adapter's tensors have other names in a checkpoint than in the model."""
        has_adapter = any(hasattr(module, "peft_config") for module in self._model.modules())
        return Expected((), *self._rest()) if has_adapter else super().expected()

    def _saved(self, original: Callable[..., Any], folder: Any, *rest: Any, **more: Any) -> Any:
        result = original(folder, *rest, **more)
        path = self.local(folder)
        if path is not None:
            # One process has a file without a number, written before this.
            ready = functools.partial(wait_for_ranks, path, self.is_over, name="rng_state_{}.pth")
            self.saved(path, self._next_step(), ready=ready if world_size() > 1 else None, is_fleeting=True)
        return result
