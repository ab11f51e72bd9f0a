"""The saves of Lightning's Trainers, of either package: what stands before them, and before what is deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stabilizer.callbacks.checkpoint_saves import GuardedSaves
from stabilizer.callbacks.hosting import stand_before

__all__ = ["TrainerSaves"]


class TrainerSaves(GuardedSaves):
    """The saves of a Lightning Trainer, of either package.

    Args:
        keep: See `Keeper`.
        trainer: With its strategy set up.
        model: As it trains.
        next_step: Gives the optimizer step that comes next.
    """

    def __init__(self, keep: int | None, *, trainer: Any, model: Any, next_step: Callable[[], int]) -> None:
        super().__init__(keep, model=model)
        self._trainer, self._next_step = trainer, next_step
        self._undo.append(stand_before(trainer, "save_checkpoint", self._save))
        self._undo.append(stand_before(trainer.strategy, "remove_checkpoint", self._remove))
        for callback in trainer.checkpoint_callbacks:
            folder = getattr(callback, "dirpath", None)
            path = self.local(folder) if folder else None
            if path is not None:
                self.keeper.folders[path] = None
        if trainer.ckpt_path:
            self.know(trainer.ckpt_path)

    def _save(
        self, original: Callable[..., Any], filepath: Any, weights_only: Any = None, *rest: Any, **more: Any
    ) -> Any:
        step, path = self._next_step(), self.local(filepath)
        if path is None:
            return original(filepath, weights_only, *rest, **more)
        # Only this rank has come so far: all strategies write on the first rank, or after a broadcast from it.
        displaced = self.displace(path)
        was_free = not os.path.lexists(path)
        self.announce(path, step, inside=False, is_full=not weights_only)
        try:
            result = original(filepath, weights_only, *rest, **more)
        except BaseException:
            self.failed(path, displaced, was_free=was_free)
            raise
        ready = _pending_writes(self._trainer.strategy)
        if ready is None and not path.exists():
            self.failed(path, displaced)  # who saves at alarms tells of an error later
        else:
            self.saved(path, step, ready=ready)
        return result

    def _remove(self, original: Callable[..., Any], filepath: Any, *rest: Any, **more: Any) -> Any:
        path = self.local(filepath)
        if path is None or self.release(path):
            return original(filepath, *rest, **more)
        return None


def _pending_writes(strategy: Any) -> Callable[[], None] | None:
    """Waits for what a strategy writes in the background, if it does."""
    executor = getattr(getattr(strategy, "checkpoint_io", None), "_executor", None)
    if executor is None:
        return None
    # It works in order: what it is given now is done when the save is. Later it may take nothing any more.
    done = executor.submit(int)
    return lambda: _wait_for(done)


def _wait_for(future: Any) -> None:
    future.exception()
