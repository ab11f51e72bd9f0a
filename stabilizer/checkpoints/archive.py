"""Files of `torch.save`, read without loading them: structure, and every storage in pieces."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from stabilizer.checkpoints.finiteness import PIECE, Nonfinite, is_finite
from stabilizer.checkpoints.inert import Record, SavedTensor, read_pickle
from stabilizer.checkpoints.views import ViewCount

__all__ = ["Archive", "Slice", "named_tensors"]

_MAX_PICKLE = 1 << 30
_MAX_DEPTH = 1000
_MAX_NAME = 4096


class Slice(io.RawIOBase):
    """A part of a file, as a file.

    Args:
        file: Open for reading.
        start: First byte.
        length: In bytes.
    """

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a byte of the part."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        """Byte of the part."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Read on."""
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._start + self._at)
        found = self._file.read(wanted)
        view[: len(found)] = found
        self._at += len(found)
        return len(found)


class Archive:
    """A file of `torch.save` (the zip format of torch 1.6 and later); memory is bounded by one piece of a tensor.

    Args:
        file: Open for reading, seekable.

    Raises:
        ValueError: If it is not whole.

    Example:
        >>> file = io.BytesIO()
        >>> torch.save({"weight": torch.ones(2, 3)}, file)
        >>> archive = Archive(file)
        >>> archive.content["weight"].shape, archive.check({"weight": archive.content["weight"]})
        ((2, 3), {})
    """

    def __init__(self, file: IO[bytes]) -> None:
        try:
            self._zip = zipfile.ZipFile(file)
            infos = self._zip.infolist()
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
            raise ValueError(f"it is cut off, or no file of torch.save ({error})") from None
        self._records = {info.filename.partition("/")[2]: info for info in infos}
        pickled = self._records.get("data.pkl")
        if pickled is None or len(self._records) != len(infos) or any(info.compress_type for info in infos):
            raise ValueError("it is not as torch.save writes it")
        if pickled.file_size > _MAX_PICKLE:
            raise ValueError(f"its structure alone has {pickled.file_size} bytes")
        # torch.serialization.set_crc32_options(False) leaves all of them 0.
        self._has_sums = pickled.CRC != 0
        self.content = read_pickle(io.BytesIO(self._read(pickled)))
        if self._records.get("byteorder") is not None and self._read(self._records["byteorder"]) != b"little":
            raise ValueError("it was written on a big-endian machine")

    def check(self, tensors: dict[str, SavedTensor]) -> dict[str, Nonfinite]:
        """Read all elements of some tensors.

        Args:
            tensors: By name, of this file.

        Returns:
            The tensors that are not finite.

        Raises:
            ValueError: If a storage is not there, not whole, or not what its checksum says.
        """
        by_storage: dict[str, dict[str, SavedTensor]] = {}
        for name, tensor in tensors.items():
            by_storage.setdefault(tensor.key, {})[name] = tensor
        found = {}
        for key, views in by_storage.items():
            info = self._info(key, max(view.num_bytes for view in views.values()))
            dtypes = {view.dtype for view in views.values()}
            if not self._is_finite(info, dtypes.pop() if len(dtypes) == 1 else None):
                found.update(self._count(info, views))
        return found

    def _info(self, key: str, num_bytes: int) -> zipfile.ZipInfo:
        info = self._records.get(f"data/{key}")
        if info is None or info.file_size < num_bytes:
            raise ValueError(f"storage {key} has {0 if info is None else info.file_size} of {num_bytes} bytes")
        return info

    def _is_finite(self, info: zipfile.ZipInfo, dtype: torch.dtype | None) -> bool:
        """Whether a whole storage is; of several types, it has to be looked at view by view."""
        finite = dtype is not None
        for piece in self._stream(info):
            if finite and dtype is not None and piece.numel() >= dtype.itemsize:
                finite = is_finite(piece[: piece.numel() // dtype.itemsize * dtype.itemsize].view(dtype))
        return finite

    def _count(self, info: zipfile.ZipInfo, views: dict[str, SavedTensor]) -> dict[str, Nonfinite]:
        """Of the elements that tensors see: there may be others in a storage, never written to."""
        counts, start = {name: ViewCount(view) for name, view in views.items()}, 0
        for piece in self._stream(info):
            for count in counts.values():
                count.see(piece, start)
            start += len(piece)
        return {name: count.result for name, count in counts.items() if count.result.nan or count.result.inf}

    def _stream(self, info: zipfile.ZipInfo) -> Iterator[Tensor]:
        with self._open(info) as stream:
            left = info.file_size
            while left:
                buffer = bytearray(min(left, PIECE * 4))
                filled = _fill(stream, buffer)
                if filled < len(buffer):
                    raise ValueError(f"{info.filename} is cut off")
                left -= filled
                yield torch.frombuffer(buffer, dtype=torch.uint8)

    def _read(self, info: zipfile.ZipInfo) -> bytes:
        try:
            with self._open(info) as stream:
                return stream.read()
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"it is damaged ({error})") from None

    def _open(self, info: zipfile.ZipInfo) -> IO[bytes]:
        if not self._has_sums and hasattr(info, "CRC"):
            del info.CRC  # the reader compares what is there
        try:
            return self._zip.open(info)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise ValueError(f"it is damaged ({error})") from None


def named_tensors(content: Any, path: str = "") -> Iterator[tuple[str, SavedTensor | Tensor]]:
    """Find the tensors of what was read, by their places.

    Args:
        content: From a reader.
        path: What comes before the names.

    Yields:
        Name and tensor.

    Raises:
        ValueError: If it is nested too deep, or a name is too long.
    """
    # Names are put together where there is a tensor: the keys of all that is nested would be copied at each depth.
    left: list[tuple[_Place | None, Any]] = [(_Place(None, path, 0) if path else None, content)]
    seen: set[int] = set()
    while left:
        place, value = left.pop()
        if isinstance(value, SavedTensor | Tensor):
            yield _name(place), value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            # What refers to itself ends here.
            seen.add(id(value))
            depth = 1 if place is None else place.depth + 1
            if depth > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
            left += [
                (_Place(place, key, depth), item)
                for key, item in reversed(_items(value))
                if isinstance(item, SavedTensor | Tensor | dict | list | tuple)
            ]


class _Place(NamedTuple):
    outer: _Place | None
    key: Any
    depth: int


def _name(place: _Place | None) -> str:
    parts: list[str] = []
    while place is not None:
        parts.append(str(place.key))
        place = place.outer
    if sum(map(len, parts)) > _MAX_NAME:
        raise ValueError(f"a tensor's name has more than {_MAX_NAME} characters")
    return ".".join(reversed(parts))


def _items(value: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(value, Record):
        given, named = value.args
        return [*value.items(), *enumerate([*given, *named.values(), *value.values_in_order]), ("state", value.state)]
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def _fill(stream: IO[bytes], buffer: bytearray) -> int:
    view, filled = memoryview(buffer), 0
    try:
        while filled < len(buffer):
            found = stream.read(len(buffer) - filled)
            if not found:
                break
            view[filled : filled + len(found)] = found
            filled += len(found)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"it is damaged ({error})") from None
    return filled
