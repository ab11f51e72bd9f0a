"""The saves of an accelerator: what stands before them, and what `total_limit` may delete."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zipfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from stabilizer.callbacks.checkpoint_saves import GuardedSaves
from stabilizer.callbacks.hosting import stand_before
from stabilizer.reduction import rank, world_size

__all__ = ["AccelerateSaves", "wait_for_ranks"]

_SECONDS_FOR_RANKS = 300.0
_SECONDS_FOR_GO = 60.0
_SECONDS_AFTER_END = 10.0


class AccelerateSaves(GuardedSaves):
    """The saves of an accelerator.

    Args:
        keep: See `Keeper`.
        accelerator: Of Accelerate.
        model: As it trains.
        next_step: Gives the optimizer step that comes next.
    """

    def __init__(self, keep: int | None, *, accelerator: Any, model: Any, next_step: Callable[[], int]) -> None:
        num_optimizers = len(accelerator._optimizers)
        super().__init__(keep, model=model, num_optimizers=num_optimizers, num_processes=world_size())
        self._accelerator, self._next_step = accelerator, next_step
        self._num_saves = 0
        self._undo.append(stand_before(accelerator, "save_state", self._save))
        self._undo.append(stand_before(accelerator, "load_state", self._load))
        self._undo.append(accelerator.register_save_state_pre_hook(self._announce).remove)
        if self.is_writer and accelerator.project_configuration.automatic_checkpoint_naming:
            self.keeper.folders[Path(os.path.abspath(accelerator.project_dir)) / "checkpoints"] = None

    def _save(self, original: Callable[..., Any], output_dir: Any = None, *rest: Any, **more: Any) -> Any:
        configuration = self._accelerator.project_configuration
        step, is_automatic = self._next_step(), bool(configuration.automatic_checkpoint_naming)
        path = None if is_automatic or output_dir is None else self.local(output_dir)
        displaced = None if path is None else self.displace(path)
        if not is_automatic:
            self._num_saves += 1
            _go(self._num_saves)
        limit = configuration.total_limit
        if is_automatic and self.keeper.keep is not None:
            self._make_room(limit)
            configuration.total_limit = None
        try:
            result = original(output_dir, *rest, **more)
        except BaseException:
            if path is not None:
                self.failed(path, displaced)
            raise
        finally:
            configuration.total_limit = limit
        written = self.local(result)
        if written is not None:
            self.saved(written, step, ready=lambda: wait_for_ranks(written, self.is_over))
        return result

    def _make_room(self, limit: int | None) -> None:
        """Delete what `total_limit` would, but for the last good ones."""
        if limit is None or not self.is_writer:
            return
        place = Path(os.path.abspath(self._accelerator.project_dir)) / "checkpoints"
        there: list[Path] = []
        with contextlib.suppress(OSError):  # there is none yet
            there = sorted((entry for entry in place.iterdir() if entry.is_dir()), key=_number)
        for folder in there[: max(0, len(there) + 1 - limit)]:
            if self.release(folder):
                self.keeper.delete(folder)

    def _announce(self, models: Any, weights: Any, folder: str) -> None:
        path = self.local(folder)
        if path is not None:
            self.announce(path, self._next_step(), inside=True)

    def _load(self, original: Callable[..., Any], input_dir: Any = None, *rest: Any, **more: Any) -> Any:
        if input_dir is not None:
            self.know(input_dir)
        return original(input_dir, *rest, **more)


def _number(folder: Path) -> tuple[int, str]:
    """Accelerate's own order: by the last number in the name."""
    digits = "".join(character if character.isdigit() else " " for character in folder.name).split()
    return (int(digits[-1]) if digits else -1, folder.name)


def _go(number: int) -> None:
    """Let the other ranks write only when the first has moved away what is there.

    By the store that the ranks have met at, no collective: a loop that saves on the first rank only must not hang.
    """
    if world_size() == 1:
        return
    import torch.distributed as dist

    store, key = dist.distributed_c10d._get_default_store(), f"stabilizer/save/{number}"
    if rank() == 0:
        store.set(key, "1")
    else:
        with contextlib.suppress(RuntimeError):  # it never came: it saves nothing
            store.wait([key], timedelta(seconds=_SECONDS_FOR_GO))


def wait_for_ranks(folder: Path, is_over: threading.Event, *, name: str = "random_states_{}.pkl") -> None:
    """Wait until the last file that each rank writes is whole.

    Args:
        folder: Of the checkpoint.
        is_over: Set when the run ends.
        name: Of the files, with a place for the number.
    """
    end = time.monotonic() + _SECONDS_FOR_RANKS
    for number in range(world_size()):
        path = folder / name.format(number)
        while folder.is_dir() and time.monotonic() < end:
            with contextlib.suppress(OSError):
                if zipfile.is_zipfile(path):
                    break
            if is_over.wait(0.05):
                end = min(end, time.monotonic() + _SECONDS_AFTER_END)
                time.sleep(0.05)
