"""What stands in one folder, and which of it may go."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stabilizer.checkpoints.folders import is_checkpoint
from stabilizer.checkpoints.guard_file import SUFFIX, Guard, read_guard

__all__ = ["KEPT", "Entry", "checkpoints_below", "keepers", "read_entry", "removable", "shelf_of"]

#: Folder beside checkpoints that a host has written over, in which they wait.
KEPT = "kept"
_MAX_DEPTH = 12


class Entry(NamedTuple):
    """A checkpoint and what is known of it.

    Attributes:
        path: Of the checkpoint.
        guard: What its guard file says; `None` if there is none that can be read.
        problem: What is wrong with the guard file.
    """

    path: Path
    guard: Guard | None
    problem: str = ""

    @property
    def is_unwanted(self) -> bool:
        """Whether the host wanted this very checkpoint deleted; a copy of it is another one."""
        if self.guard is None or not self.guard.unwanted:
            return False
        try:
            return self.path.lstat().st_ino == self.guard.unwanted
        except OSError:
            return False


def shelf_of(path: Path) -> Path:
    """The folder that a checkpoint belongs to, also while it waits in `kept` below it.

    Args:
        path: Of the checkpoint.

    Example:
        >>> shelf_of(Path("runs/kept/step4-last.ckpt")).as_posix()
        'runs'
    """
    return path.parent.parent if path.parent.name == KEPT else path.parent


def read_entry(path: Path) -> Entry:
    """Read a guard file, whatever is in it.

    Args:
        path: Of the checkpoint.
    """
    try:
        return Entry(path, read_guard(path))
    except (ValueError, OSError) as error:
        return Entry(path, None, str(error))


def removable(entries: Sequence[Entry], *, keep: int) -> list[Path]:
    """Which checkpoints the host wanted to be deleted and nobody needs any more.

    Of the newest `keep` steps with a good checkpoint one each has to stay, if possible one that the host keeps anyway.
    A bad one counts for nothing; one that is not verified yet is treated as if it could still be good.

    Args:
        entries: Of one folder.
        keep: How many steps.

    Example:
        >>> removable([], keep=2)
        []
    """
    return [path for group in _groups(entries) for path in _removable(group, keep)]


def keepers(entries: Sequence[Entry], *, keep: int) -> list[Entry]:
    """Which good checkpoints have to stay: those that others may go for.

    Args:
        entries: Of one folder.
        keep: How many steps.

    Example:
        >>> keepers([], keep=2)
        []
    """
    return [entry for group in _groups(entries) for entry in _keepers(group, keep)]


def _groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Weights alone are no substitute for what a run can resume from."""
    return [
        [entry for entry in entries if (entry.guard is None or entry.guard.is_full) == is_full]
        for is_full in (True, False)
    ]


def _keepers(entries: Sequence[Entry], keep: int) -> list[Entry]:
    good = [entry for entry in entries if entry.guard is not None and entry.guard.verdict == "good"]
    steps = sorted({_step(entry) for entry in good}, reverse=True)[:keep]
    newest = [entry for entry in good if _step(entry) in steps]
    kept_first = sorted(newest, key=lambda entry: (entry.is_unwanted, str(entry.path)))
    return [next(entry for entry in kept_first if _step(entry) == step) for step in steps]


def _removable(entries: Sequence[Entry], keep: int) -> list[Path]:
    kept = _keepers(entries, keep)
    paths = {entry.path for entry in kept}
    oldest = _step(kept[-1]) if len(kept) == keep else -1
    found = []
    for entry in entries:
        is_open = entry.guard is None or entry.guard.verdict == "pending"
        if entry.is_unwanted and entry.path not in paths and not (is_open and _step(entry) >= oldest):
            found.append(entry.path)
    return found


def checkpoints_below(folder: Path) -> Iterator[Path]:
    """All checkpoints in a folder and in those below it; links are not followed.

    Args:
        folder: Any.

    Yields:
        Paths, by name.
    """
    left = [(folder, 0)]
    while left:
        place, depth = left.pop()
        if is_checkpoint(place):
            yield place
        elif depth <= _MAX_DEPTH and (depth == 0 or not place.is_symlink()):
            left += [(path, depth + 1) for path in reversed(_listed(place))]


def _step(entry: Entry) -> int:
    return -1 if entry.guard is None else entry.guard.step


def _listed(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if not name.endswith(SUFFIX)]
    except OSError:
        return []
