"""What stands in one folder, and which of it may go."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stabilizer.checkpoints.folders import is_checkpoint
from stabilizer.checkpoints.guard_file import SUFFIX, Guard, read_guard

__all__ = ["KEPT", "Entry", "checkpoints_below", "read_entry", "read_shelf", "removable", "shelf_of"]

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


def read_shelf(folder: Path) -> list[Entry]:
    """The checkpoints in a folder, and those that wait in `kept` below it.

    Args:
        folder: Any; one that cannot be read has none.
    """
    found = []
    for place in (folder, folder / KEPT):
        if not place.is_symlink():
            found += [read_entry(path) for path in _listed(place) if is_checkpoint(path)]
    return found


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
    found: list[Path] = []
    for is_full in (True, False):
        # Weights alone are no substitute for what a run can resume from.
        group = [entry for entry in entries if (entry.guard is None or entry.guard.is_full) == is_full]
        found += _removable(group, keep)
    return found


def _removable(entries: Sequence[Entry], keep: int) -> list[Path]:
    good = [entry for entry in entries if entry.guard is not None and entry.guard.verdict == "good"]
    steps = sorted({_step(entry) for entry in good}, reverse=True)[:keep]
    oldest = steps[-1] if len(steps) == keep else -1
    kept_first = sorted(good, key=lambda entry: (entry.is_unwanted, str(entry.path)))
    keepers = {next(entry.path for entry in kept_first if _step(entry) == step) for step in steps}
    found = []
    for entry in entries:
        is_open = entry.guard is None or entry.guard.verdict == "pending"
        if entry.is_unwanted and entry.path not in keepers and not (is_open and _step(entry) >= oldest):
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
