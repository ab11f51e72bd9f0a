"""The last good checkpoints stay, whatever the host deletes or writes over."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import threading
from pathlib import Path

from stabilizer.checkpoints.folders import is_checkpoint
from stabilizer.checkpoints.guard_file import Guard, guard_path, remove_guard, write_guard
from stabilizer.checkpoints.index import GuardIndex
from stabilizer.checkpoints.shelves import KEPT, Entry, keepers, removable, shelf_of
from stabilizer.errors import logger

__all__ = ["Keeper"]


class Keeper:
    """Decides about the checkpoints of a run by their guard files; on the one process that writes them.

    Safe to be called from two threads. What it cannot write (a full disk) it remembers for as long as it lives.

    Args:
        keep: How many steps with a good checkpoint stay in each folder; `None` leaves all to the host.

    Attributes:
        suspect_after: Checkpoints of larger steps take nobody's place: the run is in trouble since then.
    """

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.suspect_after: int | None = None
        self.lock = threading.RLock()
        self._index = GuardIndex()
        self._unwritten: dict[Path, Guard] = {}
        # Wanted to be deleted before they were there: a host may write in the background.
        self._unborn: set[Path] = set()
        self.folders: dict[Path, None] = {}

    def entry(self, path: Path) -> Entry:
        """What is known of a checkpoint.

        Args:
            path: Of it.
        """
        with self.lock:
            guard = self._unwritten.get(path)
            return self._index.entry(path) if guard is None else Entry(path, guard)

    def look_around(self, folder: Path) -> None:
        """Look through a folder, if that has not just been done.

        Args:
            folder: The one that checkpoints are in.
        """
        if self._index.is_due(folder):
            self.survey(folder)

    def survey(self, folder: Path) -> None:
        """Look through a folder, without the lock that a save waits for: there may be thousands of checkpoints in it.

        Guard files of checkpoints that somebody else has deleted are taken away.

        Args:
            folder: The one that checkpoints are in.
        """
        for path in self._index.survey(folder):
            with self.lock:
                if not os.path.lexists(path):
                    self.forget(path)

    def note(self, path: Path, guard: Guard, *, inside: bool | None = None) -> None:
        """Write what is known of a checkpoint.

        Args:
            path: Of the checkpoint.
            guard: What is known.
            inside: See `guard_path`.
        """
        with self.lock:
            self.folders[shelf_of(path)] = None
            try:
                write_guard(guard_path(path, inside=inside), guard, durable=guard.verdict != "pending")
                self._unwritten.pop(path, None)
                self._index.put(path, guard)
            except OSError as error:
                if not os.path.lexists(path.parent if guard.verdict == "pending" else path):
                    return  # it was deleted in the meantime
                logger.warning("the guard file of %s cannot be written: %s", path, error)
                self._unwritten[path] = guard
                self._index.put(path, guard)

    def settle(self, path: Path, guard: Guard) -> None:
        """Write a verdict, and delete what is no longer needed because of it.

        Args:
            path: Of the checkpoint.
            guard: Of its verification.
        """
        with self.lock:
            before = self.entry(path).guard
            unwanted = before.unwanted if before else 0
            if path in self._unborn and os.path.lexists(path):
                self._unborn.discard(path)
                unwanted = path.lstat().st_ino
            self.note(path, dataclasses.replace(guard, unwanted=unwanted))
            self.sweep(shelf_of(path))

    def condemn(self, steps: range, *, reason: str) -> None:
        """Mark checkpoints of a time that turned out to be bad, so that no run goes on from one of them.

        Args:
            steps: Of the checkpoints.
            reason: For their guard files.
        """
        paths = self.known()
        with self.lock:
            for path in paths:
                guard = self.entry(path).guard
                if guard is not None and guard.step in steps and guard.verdict == "good":
                    why = f"saved while the run was in trouble: {reason}"
                    self.note(path, dataclasses.replace(guard, verdict="bad", reasons=(why,)))

    def release(self, path: Path) -> bool:
        """Asked before the host deletes a checkpoint.

        Args:
            path: Of the checkpoint.

        Returns:
            Whether it may; else it is deleted here, when newer good ones are there.
        """
        with self.lock:
            guard = self.entry(path).guard
            if self.keep is None or guard is None or guard.verdict == "bad":
                self.forget(path)
                return True
            if not os.path.lexists(path):
                self._unborn.add(path)
                return False
            marked = dataclasses.replace(guard, unwanted=path.lstat().st_ino)
            if path in self._removable(self._shelf_with(path, marked)):
                self.forget(path)
                return True
            self.note(path, marked)
            logger.info("%s stays: it is one of the last good checkpoints, or not verified yet", path)
            return False

    def displace(self, path: Path) -> Path | None:
        """Asked before the host writes over a checkpoint: moves it away, into the folder `kept` beside it.

        Args:
            path: Of the checkpoint.

        Returns:
            Where it is now; `None` if there is none, or it cannot be moved.
        """
        with self.lock:
            if self.keep is None or not is_checkpoint(path):
                return None
            entry, inode = self.entry(path), path.lstat().st_ino
            known = entry.guard or Guard("pending")
            step = f"step{known.step}-" if known.step >= 0 else ""
            try:
                target = _free(path.parent / KEPT, f"{step}{path.name}")
                was_inside = guard_path(path).parent == path
                path.rename(target)
            except OSError as error:
                logger.warning("%s cannot be kept before it is written over: %s", path, error)
                return None
            self.forget(path)
            self.note(target, dataclasses.replace(_renamed(known, target), unwanted=inode), inside=was_inside)
            return target

    def restore(self, target: Path, path: Path) -> None:
        """Put a displaced checkpoint back, after a save that failed.

        Args:
            target: Where it is.
            path: Where it was.
        """
        with self.lock:
            if is_checkpoint(path):
                return
            guard = self.entry(target).guard
            inside = guard_path(target).parent == target
            with contextlib.suppress(OSError):
                if path.is_dir():
                    shutil.rmtree(path)  # what there is of the save that failed
                target.rename(path)
                self.forget(target)
                if guard is not None:
                    self.note(path, dataclasses.replace(_renamed(guard, path), unwanted=0), inside=inside)

    def sweep(self, folder: Path) -> None:
        """Delete what the host wanted deleted and nobody needs any more.

        Args:
            folder: The one that checkpoints are in.
        """
        with self.lock:
            if self.keep is None:
                return
            if not self._index.knows(folder):
                self.survey(folder)
            for path in self._removable(self._index.entries(folder)):
                logger.info("%s is deleted, as it was wanted: newer good checkpoints are there", path)
                self.delete(path)

    def delete(self, path: Path) -> None:
        """Delete a checkpoint and its guard file; what cannot be deleted stays.

        Args:
            path: Of the checkpoint.
        """
        with self.lock:
            try:
                if path.is_dir() and not path.is_symlink():
                    with contextlib.suppress(FileNotFoundError):  # somebody else deletes it too
                        shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be deleted: %s", path, error)
                return
            self.forget(path)
            with contextlib.suppress(OSError):
                (path.parent if path.parent.name == KEPT else path.parent / KEPT).rmdir()  # only if it is empty

    def known(self) -> list[Path]:
        """All checkpoints in the folders that were written to."""
        for folder in list(self.folders):
            self.survey(folder)
        with self.lock:
            entries = [entry for folder in self.folders for entry in self._index.entries(folder)]
        return sorted(entry.path for entry in entries if is_checkpoint(entry.path))

    def forget(self, path: Path) -> None:
        """Forget a checkpoint that is gone, and take its guard file away.

        Args:
            path: Where it was.
        """
        with self.lock:
            self._unwritten.pop(path, None)
            self._unborn.discard(path)
            self._index.forget(path)
            remove_guard(path)

    def _removable(self, entries: list[Entry]) -> list[Path]:
        assert self.keep is not None
        after = self.suspect_after
        trusted = [one for one in entries if after is None or one.guard is None or one.guard.step <= after]
        while gone := {one.path for one in keepers(trusted, keep=self.keep) if not self._is_good(one.path)}:
            trusted = [one for one in trusted if one.path not in gone]
        return removable(trusted, keep=self.keep)

    def _is_good(self, path: Path) -> bool:
        """Whether a checkpoint is still what it was when it was looked at: others may go for it."""
        guard = self.entry(path).guard
        return is_checkpoint(path) and guard is not None and guard.verdict == "good"

    def _shelf_with(self, path: Path, guard: Guard) -> list[Entry]:
        others = [entry for entry in self._index.entries(shelf_of(path)) if entry.path != path]
        return [*others, Entry(path, guard)]


def _renamed(guard: Guard, path: Path) -> Guard:
    """The file of a checkpoint that is one file has the checkpoint's name."""
    if path.is_dir():
        return guard
    return dataclasses.replace(guard, files=tuple(dataclasses.replace(file, name=path.name) for file in guard.files))


def _free(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    candidates = [name, *(f"{number}-{name}" for number in range(2, 1000))]
    return next(folder / candidate for candidate in candidates if not os.path.lexists(folder / candidate))
