"""What the guard files of a run's folders say, in memory: each is read when it is new or has changed, and only then."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from stabilizer.checkpoints.folders import FILE_SUFFIXES, is_checkpoint
from stabilizer.checkpoints.guard_file import SUFFIX, Guard, guard_path
from stabilizer.checkpoints.shelves import KEPT, Entry, read_entry, shelf_of

__all__ = ["GuardIndex"]

# Times as long as it took.
_REST = 100

_Mark = tuple[int, int, int] | None


class GuardIndex:
    """Entries of checkpoints by folder; safe to be called from two threads.

    Example:
        >>> index = GuardIndex()
        >>> index.put(Path("runs/last.ckpt"), Guard("good", step=3))
        >>> index.knows(Path("runs")), [entry.guard.step for entry in index.entries(Path("runs"))]
        (False, [3])
    """

    def __init__(self) -> None:
        self._entries: dict[Path, dict[Path, tuple[Entry, _Mark]]] = {}
        self._due: dict[Path, float] = {}
        self._lock = threading.Lock()
        # When each checkpoint was last changed by us: a survey that began before knows less.
        self._changed: dict[Path, int] = {}
        self._clock = 0
        # Guard files without checkpoints that are nobody's business.
        self._alone: dict[Path, _Mark] = {}

    def knows(self, folder: Path) -> bool:
        """Whether a folder was looked through.

        Args:
            folder: Any.
        """
        return folder in self._due

    def is_due(self, folder: Path) -> bool:
        """Whether a folder should be looked through again: that takes at most a hundredth of the time.

        Args:
            folder: Any.
        """
        return time.monotonic() >= self._due.get(folder, 0.0)

    def entries(self, folder: Path) -> list[Entry]:
        """What is known of the checkpoints in a folder, and of those that wait in `kept` below it; reads nothing.

        Args:
            folder: Any.
        """
        with self._lock:
            return [entry for entry, _ in self._entries.get(folder, {}).values()]

    def entry(self, path: Path) -> Entry:
        """What is known of a checkpoint; its guard file is read if it is not the one that was read or written last.

        Args:
            path: Of the checkpoint.
        """
        with self._lock:
            known = self._entries.get(shelf_of(path), {}).get(path)
        mark = _mark(path)
        if known is not None and known[1] == mark:
            return known[0]
        entry = read_entry(path)
        if mark is not None:
            with self._lock:
                self._set(path, (entry, mark))
        return entry

    def put(self, path: Path, guard: Guard) -> None:
        """Note what was written.

        Args:
            path: Of the checkpoint.
            guard: What its guard file says.
        """
        mark = _mark(path)
        with self._lock:
            self._set(path, (Entry(path, guard), mark))

    def forget(self, path: Path) -> None:
        """Forget a checkpoint that is gone.

        Args:
            path: Of it.
        """
        with self._lock:
            self._set(path, None)

    def survey(self, folder: Path) -> list[Path]:
        """Look through a folder; takes a while where there is much in it, and holds nobody up.

        Args:
            folder: Any; one that cannot be read has no checkpoints.

        Returns:
            Checkpoints that are gone and have left their guard files.
        """
        with self._lock:
            known, start, begun = dict(self._entries.get(folder, {})), self._clock, time.monotonic()
        found: dict[Path, tuple[Entry, _Mark]] = {}
        gone: list[Path] = []
        for place in (folder, folder / KEPT):
            there, alone = _look(place)
            for path, mark in there.items():
                one = known.get(path)
                found[path] = one if one is not None and one[1] == mark else (read_entry(path), mark)
            gone += [path for path, mark in alone.items() if self._is_gone(path, mark, known.get(path))]
        with self._lock:
            now = self._entries.get(folder, {})
            for path in {*now, *found}:
                if self._changed.get(path, 0) > start:
                    found.pop(path, None)
                    found.update({path: now[path]} if path in now else {})
            self._entries[folder] = found
            now_is = time.monotonic()
            self._due[folder] = now_is + _REST * (now_is - begun)
            return [path for path in gone if self._changed.get(path, 0) <= start]

    def _is_gone(self, path: Path, mark: _Mark, known: tuple[Entry, _Mark] | None) -> bool:
        """Whether a guard file that stands alone is one of a checkpoint that was there, and no other file."""
        if self._alone.get(path) == mark:
            return False
        was_there = known is not None and known[1] == mark
        guard = known[0].guard if known is not None and was_there else read_entry(path).guard
        names_it = guard is not None and [file.name for file in guard.files] == [path.name]
        if guard is not None and guard.verdict != "pending" and (was_there or names_it):
            return True
        self._alone[path] = mark
        return False

    def _set(self, path: Path, value: tuple[Entry, _Mark] | None) -> None:
        self._clock += 1
        self._changed[path] = self._clock
        shelf = self._entries.setdefault(shelf_of(path), {})
        if value is None:
            shelf.pop(path, None)
        else:
            shelf[path] = value


def _mark(path: Path) -> _Mark:
    """What changes when a guard file is written."""
    return _mark_of(guard_path(path))


def _mark_of(guard: Path | os.DirEntry[str]) -> _Mark:
    try:
        found = guard.lstat() if isinstance(guard, Path) else guard.stat(follow_symlinks=False)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _look(place: Path) -> tuple[dict[Path, _Mark], dict[Path, _Mark]]:
    """The checkpoints in a folder, and those of which there is a guard file alone."""
    if place.name == KEPT and place.is_symlink():
        return {}, {}
    try:
        with os.scandir(place) as entries:
            listed = {entry.name: entry for entry in entries}
    except OSError:
        return {}, {}
    there: dict[Path, _Mark] = {}
    alone: dict[Path, _Mark] = {}
    for name, entry in listed.items():
        if name.endswith(SUFFIX):
            checkpoint = name.removesuffix(SUFFIX)
            if checkpoint not in listed and guard_path(place, inside=True).name != name:
                alone[place / checkpoint] = _mark_of(entry)
        elif entry.is_dir(follow_symlinks=False):
            if is_checkpoint(place / name):
                there[place / name] = _mark(place / name)
        elif os.path.splitext(name)[1] in FILE_SUFFIXES and entry.is_file(follow_symlinks=False):
            guard = listed.get(name + SUFFIX)
            there[place / name] = None if guard is None else _mark_of(guard)
    return there, alone
