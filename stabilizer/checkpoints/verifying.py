"""verify_checkpoint: is a checkpoint whole, finite, and the model's?"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from pathlib import Path

from stabilizer.checkpoints.findings import Findings
from stabilizer.checkpoints.folders import check_folder, files_of
from stabilizer.checkpoints.guard_file import Expected, Guard, GuardedFile
from stabilizer.checkpoints.reading import check_lightning

__all__ = ["CheckpointChangedError", "sha256_of", "verify_checkpoint"]

_PIECE = 1 << 24


class CheckpointChangedError(Exception):
    """Somebody has written to a checkpoint while it was read."""


def verify_checkpoint(path: str | os.PathLike[str], *, expected: Expected | None = None, step: int = -1) -> Guard:
    """Verify a checkpoint, on the CPU, without executing anything of it.

    Every file is read once for its tensors and once for its checksum. Memory is bounded by the largest tensor of a file
    of safetensors, and by some 100 MB for all others.

    Args:
        path: A file of Lightning (or any of `torch.save`), a folder of `torch.distributed.checkpoint`, or one of
            `accelerator.save_state`.
        expected: What the model has; without it, shapes are not compared.
        step: Of the checkpoint; by default what it says itself.

    Returns:
        The verdict with its reasons, not written anywhere.

    Raises:
        CheckpointChangedError: If it was written to at the same time.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"weight": torch.tensor([1.0, float("nan")])}, f"{folder}/last.ckpt")
        ...     guard = verify_checkpoint(f"{folder}/last.ckpt")
        >>> guard.verdict, guard.reasons
        ('bad', ('tensor weight: 1 of 2 elements are not finite (1 NaN)',))
    """
    path = Path(path)
    findings, files = Findings(expected), []
    findings.step = step
    try:
        before = _marks(path)
        if path.is_dir():
            check_folder(path, findings)
        elif path.is_file():
            check_lightning(path, findings)
        else:
            findings.blame("it is not there")
        findings.compare()
        files = [
            GuardedFile(name, size, sha256_of(path / name if path.is_dir() else path)) for name, size, *_ in before
        ]
        if _marks(path) != before:
            raise CheckpointChangedError(f"{path} was written to while it was read")
    except OSError as error:
        findings.blame(f"it cannot be read: {error}")
    return Guard(
        verdict="good" if findings.is_good else "bad",
        step=step if step >= 0 else findings.step,
        reasons=tuple(findings.reasons),
        files=tuple(files),
        is_full=findings.is_full,
        seconds=time.time(),
    )


def sha256_of(path: Path) -> str:
    """Checksum of a file, in pieces.

    Args:
        path: The file.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _marks(path: Path) -> list[tuple[str, int, int, int]]:
    """Names, sizes, and what changes when a file is written to."""
    marks = []
    for file in files_of(path):
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{file.name} is a link, or no regular file")
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        marks.append((name, found.st_size, found.st_mtime_ns, found.st_ino))
    return marks
