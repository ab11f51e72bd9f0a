"""Folders of torch.distributed.checkpoint: the `.metadata` read as data, and every piece of every tensor."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import IO, Any

from stabilizer.checkpoints.archive import Archive, Slice, named_tensors
from stabilizer.checkpoints.findings import Findings
from stabilizer.checkpoints.inert import Record, SavedTensor, read_pickle

__all__ = ["METADATA", "check_sharded"]

METADATA = ".metadata"
_MAX_METADATA = 2 << 30


def check_sharded(folder: Path, findings: Findings, *, label: str = "") -> None:
    """Check a folder that `torch.distributed.checkpoint.save` has written.

    Its `.metadata` is a pickle: it is read with stand-ins for everything that it names, and nothing is imported.

    Args:
        folder: With `.metadata`, which comes last: a save that broke off has none.
        findings: Takes what is wrong, and the shapes of the model.
        label: What comes before the names, for people.
    """
    path = folder / METADATA
    try:
        if path.stat().st_size > _MAX_METADATA:
            raise ValueError(f"{path.stat().st_size} bytes are too many")
        with path.open("rb") as file:
            metadata = read_pickle(file)
        tensors, storage = _field(metadata, "state_dict_metadata"), _field(metadata, "storage_data")
    except ValueError as error:
        findings.blame(f"{label}{METADATA}: {error}")
        return
    places: dict[str, list[Record]] = {}
    for index, info in storage.items():
        if isinstance(index, Record) and isinstance(info, Record):
            places.setdefault(str(index.field("fqn")), []).append(info)
    for name, described in tensors.items():
        size = described.field("size") if isinstance(described, Record) else None
        _see_model(str(name), size, findings)
        if name not in places:
            findings.blame(f"{label}{name}: no file has it")
    _Reader(folder, findings, label, tensors).read(places)


class _Reader:
    """Reads the pieces file by file."""

    def __init__(self, folder: Path, findings: Findings, label: str, tensors: dict[Any, Any]) -> None:
        self._folder, self._findings, self._label, self._tensors = folder, findings, label, tensors

    def read(self, places: dict[str, list[Record]]) -> None:
        by_file: dict[str, list[tuple[int, int, str]]] = {}
        for name, infos in places.items():
            for info in infos:
                file, offset, length = (info.field(key) for key in ("relative_path", "offset", "length"))
                if not _is_name(file) or type(offset) is not int or type(length) is not int or min(offset, length) < 0:
                    self._findings.blame(f"{self._label}{name}: {METADATA} names no place for it")
                elif not info.field("transform_descriptors"):  # compressed pieces have no check but their size
                    by_file.setdefault(file, []).append((offset, length, name))
        elements: dict[str, int] = {}
        for file, pieces in sorted(by_file.items()):
            try:
                with (self._folder / file).open("rb") as opened:
                    self._read_file(opened, file, sorted(pieces), elements)
            except OSError as error:
                self._findings.blame(f"{self._label}{file}: {error.strerror or error}")
        for name, found in elements.items():
            shape = self._shape(name)
            if shape is not None and math.prod(shape) > found:
                self._findings.blame(f"{self._label}{name}: {found} of {math.prod(shape)} elements are there")

    def _read_file(
        self, opened: IO[bytes], file: str, pieces: list[tuple[int, int, str]], elements: dict[str, int]
    ) -> None:
        size = opened.seek(0, 2)
        for offset, length, name in pieces:
            if offset + length > size:
                self._findings.blame(f"{self._label}{file} is cut off: {size} bytes, {name} ends at {offset + length}")
                return
            if self._shape(name) is None:
                continue  # an object, which nobody here unpickles
            try:
                elements[name] = elements.get(name, 0) + self._read_piece(Slice(opened, offset, length), name)
            except ValueError as error:
                self._findings.blame(f"{self._label}{file}, {name}: {error}")

    def _read_piece(self, piece: Slice, name: str) -> int:
        archive = Archive(piece)  # type: ignore[arg-type]
        tensors = {part: tensor for part, tensor in named_tensors(archive.content) if isinstance(tensor, SavedTensor)}
        for part, count in archive.check(tensors).items():
            model_name = _model_name(name)
            num_elements = math.prod(tensors[part].shape)
            self._findings.see_nonfinite(self._label + name, count, num_elements=num_elements, model_name=model_name)
        return sum(math.prod(tensor.shape) for tensor in tensors.values())

    def _shape(self, name: str) -> tuple[int, ...] | None:
        described = self._tensors.get(name)
        size = described.field("size") if isinstance(described, Record) else None
        return size if isinstance(size, tuple) and all(type(number) is int for number in size) else None


def _field(metadata: Any, name: str) -> dict[Any, Any]:
    found = metadata.field(name) if isinstance(metadata, Record) else None
    if not isinstance(found, dict):
        raise ValueError(f"it has no {name}")
    return found


def _is_name(file: Any) -> bool:
    """Whether it is the plain name of a file in the folder."""
    if not isinstance(file, str) or "\0" in file or file in ("..", "/", "//"):
        return False
    return PurePosixPath(file).parts == (file,)


def _model_name(name: str) -> str | None:
    """The model's part of a name: Lightning and Accelerate put the model below such a key."""
    first, _, rest = name.partition(".")
    return rest if first in ("state_dict", "model") else None


def _see_model(name: str, size: Any, findings: Findings) -> None:
    model_name = _model_name(name)
    if model_name is not None and isinstance(size, tuple):
        findings.see_shape(model_name, size)
