"""last_good_checkpoint: where a run can go on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

from stabilizer.checkpoints.folders import files_of, peek_step
from stabilizer.checkpoints.guard_file import Expected, Guard, guard_path, write_guard
from stabilizer.checkpoints.shelves import Entry, checkpoints_below, read_entry
from stabilizer.checkpoints.verifying import CheckpointChangedError, sha256_of, verify_checkpoint
from stabilizer.errors import logger, warn

__all__ = ["GoodCheckpoint", "confirm", "last_good_checkpoint", "newest_good"]


@dataclasses.dataclass(frozen=True)
class GoodCheckpoint:
    """A checkpoint that was verified.

    Attributes:
        path: Of the file or folder.
        step: The optimizer step that comes next when a run resumes there; -1 if it does not say.
    """

    path: Path
    step: int


def last_good_checkpoint(folder: str | os.PathLike[str], *, before_step: int | None = None) -> Path | None:
    """Find the newest checkpoint below a folder that a run can safely resume from.

    A checkpoint with a guard file is taken if all its files are there with the sizes and checksums of the verification.
    One without (saved just before the run was killed, or without `CheckpointGuardCallback`) is verified now, and gets
    its guard file. What is bad, cut off or changed is passed over with a warning.

    Args:
        folder: Where checkpoints are, at any depth.
        before_step: Only those that were saved before this optimizer step was taken.

    Returns:
        For `trainer.fit(model, ckpt_path=...)` or `accelerator.load_state(...)`; `None` if there is none, as at the
        first start.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(last_good_checkpoint(folder))
        None
    """
    found = newest_good(checkpoints_below(Path(folder)), before_step=before_step)
    return None if found is None else found.path


def newest_good(
    paths: object, *, before_step: int | None = None, expected: Expected | None = None
) -> GoodCheckpoint | None:
    """Find the newest good one; verifies what has not been, newest first, until one is good.

    Args:
        paths: Of checkpoints.
        before_step: Only those that were saved before this step was taken.
        expected: What the model has, for those whose save did not note it.
    """
    candidates = []
    for path in dict.fromkeys(paths):  # type: ignore[call-overload]
        entry = read_entry(path)
        if entry.problem:
            warn(f"{entry.problem}. It is left out of account: the checkpoint is verified anew")
        guard = entry.guard
        if guard is not None and (guard.verdict == "bad" or not guard.is_full):
            continue
        step = guard.step if guard is not None and guard.step >= 0 else peek_step(path)
        if before_step is None or 0 <= step <= before_step:
            candidates.append((step, _written(path), str(path), entry))
    for step, _, _, entry in sorted(candidates, key=lambda candidate: candidate[:3], reverse=True):
        guard = _settled(entry, expected)
        if guard is not None and guard.verdict == "good" and guard.is_full:
            return GoodCheckpoint(entry.path, guard.step if guard.step >= 0 else step)
    return None


def confirm(path: Path, guard: Guard) -> str:
    """Hold a checkpoint against its guard file.

    Args:
        path: Of the checkpoint.
        guard: Says "good".

    Returns:
        What is wrong; empty if nothing is.
    """
    is_folder = path.is_dir()
    try:
        there = {file.relative_to(path).as_posix() if is_folder else file.name: file for file in files_of(path)}
        for known in guard.files:
            # Looked up among what is there: a name that is none of these leads nowhere.
            file = there.get(known.name)
            if file is None or file.is_symlink() or not file.is_file():
                return f"{known.name} is not there"
            if file.stat().st_size != known.size:
                return f"{known.name} has {file.stat().st_size} bytes instead of {known.size}"
            if sha256_of(file) != known.sha256:
                return f"{known.name} has another checksum"
    except OSError as error:
        return f"it cannot be read ({error})"
    return ""


def _settled(entry: Entry, expected: Expected | None) -> Guard | None:
    """The verdict, made now where there is none; `None` if the checkpoint is not to be used."""
    guard = entry.guard
    if guard is not None and guard.verdict == "good":
        problem = confirm(entry.path, guard)
        if problem:
            warn(
                f"{entry.path} is not what was verified: {problem}. It is passed over; if it was replaced on purpose, "
                f"delete {guard_path(entry.path).name} to have it verified anew"
            )
        return None if problem else guard
    noted = expected if guard is None or guard.expected is None else guard.expected
    try:
        made = verify_checkpoint(entry.path, expected=noted, step=-1 if guard is None else guard.step)
    except CheckpointChangedError as error:
        warn(f"{error}: it is passed over")
        return None
    with contextlib.suppress(OSError):  # it may not be ours to write there
        write_guard(guard_path(entry.path), dataclasses.replace(made, unwanted=guard.unwanted if guard else 0))
    if made.verdict == "bad":
        warn(f"{entry.path} is a bad checkpoint and is passed over: {'; '.join(made.reasons[:3])}")
    else:
        logger.info("%s is verified", entry.path)
    return made


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
