"""Frozen dataclasses as JSON that every parser reads, and back, by the types of their fields."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

__all__ = ["from_plain", "to_plain"]

_T = TypeVar("_T")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain(value: Any) -> Any:
    """Turn dataclasses into what JSON has; numbers that are not finite become "nan", "inf" and "-inf".

    Args:
        value: A dataclass of numbers, text, `None`, tuples and such dataclasses.

    Example:
        >>> to_plain((1.0, float("-inf"), None))
        [1.0, '-inf', None]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def from_plain(kind: type[_T], found: Any, *, path: str) -> _T:
    """Build a dataclass from what `to_plain` has made of one; keys that are not known are left out.

    Args:
        kind: The dataclass.
        found: From a JSON parser.
        path: What errors call it.

    Raises:
        ValueError: If a value is missing or of another type; the error says which.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{path}={found!r:.80}: expected an object")
    values = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if field.name in found:
            values[field.name] = _read(
                _hints(typing.cast(Any, kind))[field.name], found[field.name], f"{path}.{field.name}"
            )
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{path}.{field.name}: missing")
    return kind(**values)


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Any, found: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        value_kind = next(argument for argument in arguments if argument is not types.NoneType)
        return None if found is None else _read(value_kind, found, path)
    if dataclasses.is_dataclass(kind):
        return from_plain(typing.cast("type[Any]", kind), found, path=path)
    if origin is tuple:
        return _read_tuple(arguments, found, path)
    if kind is float:
        return _read_float(found, path)
    if found in arguments if origin is Literal else type(found) is kind:
        return found
    raise _wrong(path, found, kind)


def _read_tuple(kinds: tuple[Any, ...], found: Any, path: str) -> tuple[Any, ...]:
    if isinstance(found, list):
        if kinds[-1] is Ellipsis:
            kinds = (kinds[0],) * len(found)
        if len(kinds) == len(found):
            pairs = zip(kinds, found, strict=True)
            return tuple(_read(kind, item, f"{path}[{number}]") for number, (kind, item) in enumerate(pairs))
    raise _wrong(path, found, list)


def _read_float(found: Any, path: str) -> float:
    """Read by type alone: a token's text may be "nan" too, and stays text."""
    if isinstance(found, str) and found in _NOT_FINITE:
        return _NOT_FINITE[found]
    if isinstance(found, int | float) and not isinstance(found, bool):
        return float(found)
    raise _wrong(path, found, float)


def _wrong(path: str, found: Any, kind: Any) -> ValueError:
    return ValueError(f"{path}={found!r:.80}: expected {getattr(kind, '__name__', kind)}")
