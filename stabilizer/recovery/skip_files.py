"""skip_list.json: a skip list that survives the run. What a file says is checked and never executed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stabilizer.recovery.skip_list import SkipEntry

__all__ = ["FILE_NAME", "load_skip_text", "read_skip_list", "write_skip_list"]

FILE_NAME = "skip_list.json"
_VERSION = 1
# No list that we write comes near these; what is larger is none of ours.
_MAX_BYTES = 64 * 2**20
_MAX_ENTRIES = 10_000
_MAX_NUMBER = 2**53
_MAX_RANKS = 2**20
_NUMBERS = ("first_step", "last_step", "epoch", "first_batch", "last_batch")
_UNKNOWN = ("epoch", "first_batch", "last_batch")


def write_skip_list(path: Path, entries: Sequence[SkipEntry]) -> None:
    """Write a list so that a reader finds the old one or the new one, whatever happens meanwhile.

    Args:
        path: Of the file; its folder is made.
        entries: Of the list.

    Raises:
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / FILE_NAME
        >>> write_skip_list(path, [SkipEntry(3, 4, epoch=0, first_batch=3, last_batch=4)])
        >>> read_skip_list(path)[0].last_batch
        4
    """
    found = [{**{name: getattr(one, name) for name in _NUMBERS}, **_rest(one)} for one in entries]
    text = json.dumps({"version": _VERSION, "entries": found}, indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def load_skip_text(path: Path) -> str | None:
    """The text of a file.

    Args:
        path: Of the file.

    Returns:
        `None` if there is no such file.

    Raises:
        ValueError: If it cannot be read, or is far too large.
    """
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise _error(path, "it is no file")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise _error(path, f"it has {size} bytes, and no skip list has more than {_MAX_BYTES}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _error(path, f"it cannot be read ({error})") from None
    except UnicodeDecodeError as error:
        raise _error(path, f"it is no text ({error.reason} at byte {error.start})") from None


def read_skip_list(path: Path, text: str | None = None) -> list[SkipEntry]:
    """Read a list.

    Args:
        path: Of the file, for messages.
        text: What is in it, if that is known already.

    Returns:
        Its entries; none if there is no file.

    Raises:
        ValueError: If it is no such list: names the file, what is wrong and the way out.
    """
    text = load_skip_text(path) if text is None else text
    if text is None:
        return []
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _error(path, "it is nested too deeply") from None
    except ValueError as error:
        raise _error(path, f"it is no JSON ({error})"[:300]) from None
    if not isinstance(found, dict):
        raise _error(path, f"it holds a {type(found).__name__}: expected an object")
    if found.get("version") != _VERSION or isinstance(found.get("version"), bool):
        raise _error(path, f"version={found.get('version')!r:.40}: expected {_VERSION}")
    entries = found.get("entries")
    if not isinstance(entries, list):
        raise _error(path, f"entries={entries!r:.40}: expected a list")
    if len(entries) > _MAX_ENTRIES:
        raise _error(path, f"it has {len(entries)} entries, and no skip list has more than {_MAX_ENTRIES}")
    return [_entry(path, number, one) for number, one in enumerate(entries)]


def _rest(entry: SkipEntry) -> dict[str, Any]:
    return {
        "num_ranks": entry.num_ranks,
        "sample_ids": [list(samples) for samples in entry.sample_ids],
        "reason": entry.reason,
    }


def _entry(path: Path, number: int, found: Any) -> SkipEntry:
    where = f"entries[{number}]"
    if not isinstance(found, dict):
        raise _error(path, f"{where}={found!r:.40}: expected an object")
    numbers = {}
    for name in _NUMBERS:
        low = -1 if name in _UNKNOWN else 0
        value = found.get(name, -1 if name in _UNKNOWN else None)
        numbers[name] = _whole(path, f"{where}.{name}", value, low=low, high=_MAX_NUMBER)
    for kind in ("step", "batch"):
        first, last = numbers[f"first_{kind}"], numbers[f"last_{kind}"]
        if last < first:
            raise _error(path, f"{where}: last_{kind}={last} comes before first_{kind}={first}")
    unknown = [name for name in _UNKNOWN if numbers[name] < 0]
    if unknown and len(unknown) < len(_UNKNOWN):
        raise _error(path, f"{where}: {unknown[0]} is missing where others of {', '.join(_UNKNOWN)} are there")
    numbers["num_ranks"] = _whole(path, f"{where}.num_ranks", found.get("num_ranks"), low=1, high=_MAX_RANKS)
    reason = found.get("reason", "")
    if not isinstance(reason, str):
        raise _error(path, f"{where}.reason={reason!r:.40}: expected text")
    return SkipEntry(**numbers, sample_ids=_samples(path, where, found.get("sample_ids", [])), reason=reason)


def _samples(path: Path, where: str, found: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(found, list) or not all(isinstance(samples, list) for samples in found):
        raise _error(path, f"{where}.sample_ids={found!r:.40}: expected a list of numbers for each rank")
    return tuple(
        tuple(_whole(path, f"{where}.sample_ids[{rank}]", one, low=0, high=_MAX_NUMBER) for one in samples)
        for rank, samples in enumerate(found)
    )


def _whole(path: Path, name: str, value: Any, *, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _error(path, f"{name}={value!r:.40}: expected a whole number from {low} to {high}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _error(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path}: {what}. It says which data the run is to leave out: mend it, or delete it to train on all of them"
    )
