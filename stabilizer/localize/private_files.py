"""Folders and files that only their owner reads, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["folder_size", "write_file", "write_folder"]

_UNFINISHED = ".part"


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder, at any depth; 0 if it does not exist.

    Args:
        folder: The folder.
    """
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone in the meantime
                total += (Path(parent) / name).lstat().st_size
    return total


def write_file(path: Path, content: bytes) -> None:
    """Write a file for its owner's eyes only, under another name until it is whole.

    Args:
        path: Of the file; a file that is there is replaced.
        content: All of it.

    Raises:
        OSError: If it cannot be written; then nothing is left of it.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_UNFINISHED}")
    try:
        # The mode from the start: nobody can read it in between.
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(content)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def write_folder(parent: Path, name: str, contents: Mapping[str, bytes]) -> Path:
    """Write a folder of files for its owner's eyes only, under another name until it is whole.

    Args:
        parent: Made if it does not exist, for the owner only as well.
        name: Of the folder; if there is one, `name_2` and so on: nothing is overwritten.
        contents: Files by name.

    Returns:
        The folder.

    Raises:
        OSError: If it cannot be written; then nothing is left of it.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = parent / f".{name}.{uuid.uuid4().hex[:8]}{_UNFINISHED}"
    try:
        unfinished.mkdir(mode=0o700)
        for file, content in contents.items():
            write_file(unfinished / file, content)
        return _renamed(unfinished, _free_names(parent, name))
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _renamed(unfinished: Path, names: Iterator[Path]) -> Path:
    for path in names:
        try:
            # Never onto a folder that is there, not even an empty one of another process.
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        if os.name == "nt":  # there a folder is never renamed onto another one
            path.rmdir()
        try:
            unfinished.rename(path)
        except OSError:
            path.rmdir()
            raise
        return path
    raise AssertionError("there is always another name")


def _free_names(parent: Path, name: str) -> Iterator[Path]:
    yield parent / name
    number = 2
    while True:
        yield parent / f"{name}_{number}"
        number += 1
