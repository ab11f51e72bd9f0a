"""Pickles read as data: nothing that a file names is imported, called or built."""

from __future__ import annotations

import functools
import io
import pickle
import reprlib
import struct
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import torch

__all__ = ["Record", "SavedTensor", "read_pickle"]

_MAX_OBJECTS = 20_000_000
_MAX_DEPTH = 100
_MAX_DIMS = 64
# Bytes that make one object each: an empty list, a mark, an entry of the memo, a call, and so on.
_MAKERS = {
    **dict.fromkeys((pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.BINPERSID), 1),
    **dict.fromkeys((pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.PUT, pickle.PERSID), 1),
    # A record takes as much as ten of the others.
    **dict.fromkeys((pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ), 10),
}
_TUPLES = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.FROZENSET)

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

    def __repr__(self) -> str:
        # Without its items: through what they share, a text may be endless.
        return f"<{self.name}>"

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
        ValueError: If it is not whole, or made to take all memory.

    Example:
        >>> import pathlib
        >>> read_pickle(io.BytesIO(pickle.dumps({"where": pathlib.PurePosixPath("a/b")})))["where"].args[0]
        ('a', 'b')
    """
    try:
        # Of bytes in memory a length that is not true takes no more than there is.
        return _Unpickler(io.BytesIO(file.read())).load()
    except Exception as error:  # any: the bytes may be anything
        raise ValueError(f"its pickle is not whole ({type(error).__name__}: {error})"[:300]) from None


_Python: Any = pickle._Unpickler


class _Unpickler(_Python):  # type: ignore[misc]
    """The one in Python, whose memo is a dict: in C it is an array as long as the largest number that a file names."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")
        # Classes and functions of this one file: whatever it does to them ends with it.
        self._classes: dict[tuple[str, str], Any] = {}
        self._num_objects = 0
        # Of tuples with tuples in them: depth, and elements at all depths. They stay alive, so that an id is one tuple.
        self._nested: dict[int, tuple[Any, int, int]] = {}

    def count(self, number: int) -> None:
        """Note that something was made."""
        self._num_objects += number
        if self._num_objects > _MAX_OBJECTS:
            raise ValueError(f"more than {_MAX_OBJECTS} objects")

    def see_tuple(self, made: tuple[Any, ...] | frozenset[Any]) -> None:
        """Bound its depth: as a key it is hashed, by a recursion in C that has no limit but the stack."""
        self.count(1)
        inner = [one for one in made if type(one) in (tuple, frozenset)]
        if not inner:
            return
        known = [self._nested.get(id(one), (one, 1, len(one))) for one in inner]
        depth, size = 1 + max(depth for _, depth, _ in known), len(made) + sum(size for *_, size in known)
        if depth > _MAX_DEPTH or size > _MAX_OBJECTS:
            raise ValueError(f"tuples nested more than {_MAX_DEPTH} deep, or with more than {_MAX_OBJECTS} elements")
        self._nested[id(made)] = (made, depth, size)

    def get_extension(self, code: int) -> None:
        """Nothing that this process has registered."""
        raise ValueError(f"extension {code}")

    def load_bytearray8(self) -> None:
        """The original takes the memory before it looks whether the bytes are there."""
        [size] = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))

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
            raise ValueError(f"storage {reprlib.repr(pid):.80}")
        if not isinstance(key, str | int):
            raise ValueError("storage without a name")
        return _Storage(str(key), dtype, size * dtype.itemsize)


def _after(code: bytes, act: Callable[[_Unpickler], None]) -> None:
    original = _Python.dispatch[code[0]]

    def load(self: _Unpickler) -> None:
        original(self)
        act(self)

    _Unpickler.dispatch[code[0]] = load


_Unpickler.dispatch = {**_Python.dispatch, pickle.BYTEARRAY8[0]: _Unpickler.load_bytearray8}
for _code, _number in _MAKERS.items():
    _after(_code, functools.partial(_Unpickler.count, number=_number))
for _code in _TUPLES:
    _after(_code, lambda self: self.see_tuple(self.stack[-1]))


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments)


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(value) is int and 0 <= value < 2**60 for value in values):
        raise ValueError(f"shape or stride {reprlib.repr(values):.80}")
    if len(values) > _MAX_DIMS:
        raise ValueError(f"shape or stride of {len(values)} dimensions")
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


def _as_size(*values: Any) -> tuple[Any, ...]:
    return _whole_numbers(values[0] if len(values) == 1 and isinstance(values[0], list | tuple) else values)


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch", "Size"): _as_size,
}
