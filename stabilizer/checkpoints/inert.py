"""Pickles read as data: nothing that a file names is imported, called or built."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import torch

__all__ = ["Record", "SavedTensor", "read_pickle"]

# `torch.save` names a storage's type by its class.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}


class SavedTensor(NamedTuple):
    """A tensor as a file describes it: a view of a storage.

    Attributes:
        key: Of the storage.
        dtype: Of the elements.
        num_bytes: Size of the storage.
        offset: First element.
        shape: Of the view.
        stride: In elements.
    """

    key: str
    dtype: torch.dtype
    num_bytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Record(dict[Any, Any]):
    """What stands in for an object: the arguments and the state that a file gives it, and its items if it has any."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        """Keep the arguments."""
        record = super().__new__(cls)
        record.args, record.state, record.values_in_order = (args, kwargs), None, []
        return record

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.args: tuple[Any, ...]
        self.state: Any
        self.values_in_order: list[Any]

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def append(self, value: Any) -> None:
        """Keep an element of what was a list."""
        self.values_in_order.append(value)

    def extend(self, values: Any) -> None:
        """Keep elements of what was a list."""
        self.values_in_order.extend(values)

    def __hash__(self) -> int:  # type: ignore[override]
        # It may be a key, where only its identity counts.
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def field(self, name: str) -> Any:
        """A field of what was a dataclass; `None` if there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype
    num_bytes: int


def read_pickle(file: IO[bytes]) -> Any:
    """Read a pickle: plain values as they are, tensors of `torch.save` as `SavedTensor`, all else as `Record`.

    Args:
        file: At the start of the pickle.

    Raises:
        ValueError: If it is not whole.

    Example:
        >>> import io, pathlib
        >>> read_pickle(io.BytesIO(pickle.dumps({"where": pathlib.PurePosixPath("a/b")})))["where"].args[0]
        ('a', 'b')
    """
    try:
        return _Unpickler(file).load()
    except Exception as error:  # any: the bytes may be anything
        raise ValueError(f"its pickle is not whole ({type(error).__name__}: {error})"[:300]) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")
        # Classes and functions of this one file: whatever it does to them ends with it.
        self._classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch.storage" and name in ("UntypedStorage", "TypedStorage", "_UntypedStorage"):
            return torch.uint8
        if (module, name) not in self._classes:
            function = _FUNCTIONS.get((module, name))
            made = type("Record", (Record,), {"name": f"{module}.{name}"}) if function is None else _once(function)
            self._classes[module, name] = made
        return self._classes[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, size = pid[:5]
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(size) is not int or not 0 <= size < 2**60:
            raise ValueError(f"storage {pid!r:.80}")
        return _Storage(str(key), dtype, size * dtype.itemsize)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments)


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(value) is int and 0 <= value < 2**60 for value in values):
        raise ValueError(f"shape or stride {values!r:.80}")
    return tuple(values)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> SavedTensor:
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
    shape, stride = _whole_numbers(shape), _whole_numbers(stride)
    [offset] = _whole_numbers([offset])
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 not in shape and (offset + last + 1) * dtype.itemsize > storage.num_bytes:
        raise ValueError(f"tensor of shape {shape} is larger than its storage")
    return SavedTensor(storage.key, dtype, storage.num_bytes, offset, shape, stride)


def _first(value: Any, *_: Any) -> Any:
    return value


def _as_tuple(*values: Any) -> tuple[Any, ...]:
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], list | tuple) else values


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch", "Size"): _as_tuple,
}
