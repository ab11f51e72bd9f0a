"""Guard files: what is known of a checkpoint, in a JSON file beside it.

Such a file is read as if anybody could have written it: a size limit, plain types only, and nothing that it names is
looked for outside the checkpoint it belongs to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import threading
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from stabilizer.localize.plain_json import from_plain, to_plain

__all__ = [
    "FIRST_STATES",
    "SUFFIX",
    "TRAINER_STATE",
    "Expected",
    "Guard",
    "GuardedFile",
    "Weight",
    "guard_path",
    "read_guard",
    "remove_guard",
    "write_guard",
]

SUFFIX = ".guard.json"
#: What the main process of Accelerate writes last.
FIRST_STATES = "random_states_0.pkl"
#: What transformers' trainer writes last.
TRAINER_STATE = "trainer_state.json"
_INSIDE = f"stabilizer{SUFFIX}"
_VERSION = 1
_MAX_BYTES = 64 << 20
_MAX_NUMBER = 2**62


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter that a checkpoint should have.

    Attributes:
        names: Its clean names; several where weights are tied.
        shape: Of the whole of it.
        required: Whether it trains: a frozen one may be left out.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    required: bool = True


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a run knows of its checkpoints before it saves one.

    Attributes:
        weights: Parameters; none where the model's shapes are not known.
        nonfinite: Clean names of buffers that were not finite from the start, such as a mask of -inf.
        num_optimizers: How many there are; 0 if that is not known.
        num_processes: How many save; 0 if that is not known.
    """

    weights: tuple[Weight, ...] = ()
    nonfinite: tuple[str, ...] = ()
    num_optimizers: int = 0
    num_processes: int = 0


@dataclasses.dataclass(frozen=True)
class GuardedFile:
    """A file of a checkpoint.

    Attributes:
        name: Relative to the checkpoint's folder, with slashes; of a checkpoint that is one file, its own name.
        size: In bytes.
        sha256: Hexadecimal.
    """

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Guard:
    """What a guard file says.

    Attributes:
        verdict: Of the verification; "pending" from the start of a save until then.
        step: The optimizer step that comes next when a run resumes there; -1 if that is not known.
        reasons: Why it is bad, one a line.
        files: All files with their checksums.
        is_full: Whether optimizer and progress are in it, so that a run can resume.
        seconds: When it was written, since 1970.
        unwanted: Number of the inode if the host wanted it deleted, which waits for newer good ones; else 0.
        expected: Of a pending one.
        version: Of the format.
    """

    verdict: Literal["good", "bad", "pending"]
    step: int = -1
    reasons: tuple[str, ...] = ()
    files: tuple[GuardedFile, ...] = ()
    is_full: bool = True
    seconds: float = 0.0
    unwanted: int = 0
    expected: Expected | None = None
    version: int = _VERSION


def guard_path(checkpoint: Path, *, inside: bool | None = None) -> Path:
    """Where the guard file of a checkpoint is.

    Beside it (`last.ckpt.guard.json`). Accelerate's `total_limit` takes all that it finds beside its folders for
    checkpoints: of those, and of transformers', it is inside (`stabilizer.guard.json`).

    Args:
        checkpoint: A file or a folder.
        inside: Which of both; by default where there is one, else as the folder looks.

    Example:
        >>> guard_path(Path("runs/last.ckpt")).as_posix()
        'runs/last.ckpt.guard.json'
    """
    within, beside = checkpoint / _INSIDE, checkpoint.with_name(checkpoint.name + SUFFIX)
    if inside is None:
        inside = checkpoint.is_dir() and (
            within.exists()
            or (not beside.exists() and any((checkpoint / name).is_file() for name in (FIRST_STATES, TRAINER_STATE)))
        )
    return within if inside else beside


def write_guard(path: Path, guard: Guard, *, durable: bool = True) -> None:
    """Write a guard file: whole or not at all.

    Args:
        path: From `guard_path`.
        guard: What it says.
        durable: Wait until it is on the disk.

    Raises:
        OSError: If it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(json.dumps(_plain(guard), indent=None if guard.expected else 1, allow_nan=False))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    if durable:
        _sync_folder(path.parent)


def read_guard(checkpoint: Path) -> Guard | None:
    """Read the guard file of a checkpoint.

    Args:
        checkpoint: A file or a folder.

    Returns:
        What it says; `None` if there is none.

    Raises:
        ValueError: If it is not one that was written here; says what is wrong with it.
        OSError: If it cannot be read.
    """
    path = guard_path(checkpoint)
    if not os.path.lexists(path):
        return None
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is no regular file")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: no guard file is so large")
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_once, parse_constant=_refuse)
        guard = from_plain(Guard, found, path="guard")
        _check(guard, checkpoint)
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(f"{path} is no guard file: {str(error) or type(error).__name__:.200}") from None
    return guard


def remove_guard(checkpoint: Path) -> None:
    """Remove the guard file that stands beside a checkpoint which is gone.

    Args:
        checkpoint: A file or a folder.
    """
    with contextlib.suppress(OSError):
        guard_path(checkpoint, inside=False).unlink()


def _plain(guard: Guard) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(dataclasses.replace(guard, expected=None))
    return {**plain, "expected": None if guard.expected is None else _plain_expected(guard.expected)}


@functools.lru_cache(maxsize=2)
def _plain_expected(expected: Expected) -> Any:
    # A training step waits for this, and the model is the same from save to save.
    return to_plain(expected)


def _check(guard: Guard, checkpoint: Path) -> None:
    """Numbers that can be, and names that stay within the checkpoint."""
    numbers = [guard.unwanted, guard.step + 1, *(file.size for file in guard.files)]
    if guard.expected is not None:
        numbers += [guard.expected.num_optimizers, guard.expected.num_processes]
        numbers += [size for weight in guard.expected.weights for size in weight.shape]
    wrong = [number for number in numbers if not 0 <= number < _MAX_NUMBER]
    if guard.version != _VERSION:
        raise ValueError(f"guard.version={guard.version}: expected {_VERSION}")
    if wrong or not math.isfinite(guard.seconds):
        raise ValueError(f"number {wrong[0] if wrong else guard.seconds!r:.40} is out of range")
    names = [file.name for file in guard.files]
    if guard.verdict == "good" and not names:
        raise ValueError("a good checkpoint without files")
    if len(set(names)) != len(names):
        raise ValueError("a file is there twice")
    for name in names:
        parts = PurePosixPath(name).parts
        is_plain = bool(parts) and not name.startswith("/") and ".." not in parts and not set(name) & set("\\\0:")
        if not is_plain or (not checkpoint.is_dir() and name != checkpoint.name):
            raise ValueError(f"file {name!r:.80} is not within the checkpoint")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"number {constant}")


def _sync_folder(folder: Path) -> None:
    # Else the new name may be lost with the power; where folders cannot be opened, it stays at that.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
