"""What happens around a save, whichever host saves."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stabilizer.callbacks.checkpoint_worker import CheckpointWorker
from stabilizer.checkpoints.expecting import nonfinite_buffers, weights_of
from stabilizer.checkpoints.guard_file import Expected, Guard, guard_path
from stabilizer.checkpoints.keeping import Keeper
from stabilizer.checkpoints.shelves import shelf_of
from stabilizer.errors import logger, warn
from stabilizer.reduction import rank

__all__ = ["GuardedSaves"]


class GuardedSaves:
    """What happens around a save, whoever saves; on ranks other than the first, nothing does.

    Args:
        keep: See `Keeper`.
        model: As it trains.
        num_optimizers: How many a checkpoint has; 0 if that is not known.
        num_processes: How many write a part of their own; 0 if that is not known.
    """

    def __init__(self, keep: int | None, *, model: Any, num_optimizers: int = 0, num_processes: int = 0) -> None:
        self.keeper = Keeper(keep)
        self.worker = CheckpointWorker(self.keeper)
        self.is_writer = rank() == 0
        self._model, self._sizes = model, (num_optimizers, num_processes)
        self._nonfinite = nonfinite_buffers(model) if self.is_writer else ()
        # Set when the run ends: a rank that has not written its part by then may never do so.
        self.is_over = threading.Event()
        self._undo: list[Callable[[], None]] = []
        self._has_warned = False
        #: Step of the bad checkpoint that was last told of at length.
        self.told_bad: int | None = None
        self._expected: tuple[list[tuple[int, bool]], Expected] | None = None

    def expected(self) -> Expected:
        """What a checkpoint saved now should have."""
        # A training step waits for this: what a model has is looked up again only when it changes.
        key = [(id(parameter), parameter.requires_grad) for parameter in self._model.parameters()]
        if self._expected is None or self._expected[0] != key:
            self._expected = (key, Expected(weights_of(self._model), *self._rest()))
        return self._expected[1]

    def _rest(self) -> tuple[tuple[str, ...], int, int]:
        return self._nonfinite, *self._sizes

    def local(self, path: Any) -> Path | None:
        """The path of a checkpoint; `None` where it is not on a file system, or not of this process.

        Args:
            path: As the host was given it.
        """
        if not self.is_writer:
            return None
        text = os.fspath(path)
        if "://" in text and not text.startswith("file://"):
            if not self._has_warned:
                self._has_warned = True
                warn(f"{text} is on no local file system: it is neither verified nor kept")
            return None
        return Path(os.path.abspath(text.removeprefix("file://")))

    def know(self, path: Any) -> None:
        """Look for good checkpoints where a run resumes from, too.

        Args:
            path: As the host was given it.
        """
        local = self.local(path)
        if local is not None:
            self.keeper.folders[shelf_of(local)] = None

    def displace(self, path: Path) -> Path | None:
        """Move away what a save is about to write over.

        Args:
            path: Where it will write.

        Returns:
            Where the old one is now, if there was one.
        """
        target = self.keeper.displace(path)
        if target is None:
            return None
        self.worker.move(path, target)
        guard = self.keeper.entry(target).guard
        if guard is not None and guard.verdict == "pending" and not self.worker.has(target):
            self.worker.verify(target, step=guard.step, expected=guard.expected)
        return target

    def announce(self, path: Path, step: int, *, inside: bool, is_full: bool = True) -> None:
        """Note what is about to be saved: if the run dies in the middle, the next one knows what is missing.

        Args:
            path: Where.
            step: The optimizer step that comes next.
            inside: See `guard_path`.
            is_full: Whether more than weights are saved.
        """
        self.worker.drop(path)
        pending = Guard("pending", step=step, expected=self.expected(), is_full=is_full, seconds=time.time())
        with contextlib.suppress(OSError):
            guard_path(path, inside=inside).parent.mkdir(parents=True, exist_ok=True)
        self.keeper.note(path, pending, inside=inside)

    def saved(
        self, path: Path, step: int, *, ready: Callable[[], None] | None = None, is_fleeting: bool = False
    ) -> None:
        """Have verified what was saved.

        Args:
            path: Where.
            step: The optimizer step that comes next.
            ready: Waits until all of it is written.
            is_fleeting: See `CheckpointWorker.verify`.
        """
        guard = self.keeper.entry(path).guard
        expected = self.expected() if guard is None or guard.expected is None else guard.expected
        self.worker.verify(path, step=step, expected=expected, ready=ready, is_fleeting=is_fleeting)

    def failed(self, path: Path, displaced: Path | None, *, was_free: bool = False) -> None:
        """Put back what a failed save should have replaced, and take away the half of a file that it has left.

        Args:
            path: Where it was to be saved.
            displaced: From `displace`.
            was_free: Whether nothing was there when the save began.
        """
        self.worker.drop(path)
        # The table of a zip file is written last: one that has it may be whole, and is verified by who looks for it.
        if was_free and path.is_file() and not path.is_symlink() and not zipfile.is_zipfile(path):
            with contextlib.suppress(OSError):
                path.unlink()
        if displaced is not None:
            self.keeper.restore(displaced, path)
            self.worker.move(displaced, path)
        if not os.path.lexists(path):
            self.keeper.forget(path)

    def release(self, path: Path) -> bool:
        """See `Keeper.release`.

        Args:
            path: Of a checkpoint that the host wants to delete.
        """
        may_go = self.keeper.release(path)
        if may_go:
            self.worker.drop(path)
        return may_go

    def close(self) -> None:
        """Take everything away again, and wait for the last verdict."""
        while self._undo:
            with contextlib.suppress(ReferenceError):  # of a Trainer that is gone
                self._undo.pop()()
        self.is_over.set()
        if self.worker.num_open:
            logger.info("the run has ended; %d checkpoints are still to be verified", self.worker.num_open)
        self.worker.wait()
