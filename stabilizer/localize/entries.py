"""A batch's tensors by dotted keys: containers of any kind and depth, and what is to be left out of them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["batch_of", "is_redacted", "nested", "tensor_entries", "unknown_keys"]

_MAX_DEPTH = 8


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What of a step function's arguments is the batch.

    Args:
        args: Positional arguments, without the module itself.
        kwargs: Keyword arguments.

    Returns:
        The only argument that holds tensors, a tuple of several, the keyword arguments if no other holds any, or both
        as a dictionary with the keys "args" and "kwargs".

    Example:
        >>> batch_of(({"x": torch.ones(2)}, 17), {})
        {'x': tensor([1., 1.])}
    """
    held = [value for value in args if _has_tensor(value)]
    if _has_tensor(dict(kwargs)):
        return {"args": tuple(args), "kwargs": dict(kwargs)} if held else dict(kwargs)
    return held[0] if len(held) == 1 else tuple(held)


def tensor_entries(batch: Any, *, redact: Sequence[str] = ()) -> dict[str, Tensor]:
    """Tensors of a batch by dotted keys.

    Args:
        batch: Tensors in mappings, sequences, dataclasses and objects with attributes.
        redact: Keys to leave out, see `is_redacted`.

    Returns:
        In the batch's order; the key of a batch that is one tensor is "batch".

    Example:
        >>> list(tensor_entries({"text": {"ids": torch.ones(1), "user": torch.ones(1)}}, redact=["user"]))
        ['text.ids']
    """
    found: dict[str, Tensor] = {}
    for path, tensor in _walk(batch, (), 0):
        key = ".".join(path) or "batch"
        if not is_redacted(key, redact):
            while key in found:  # a key may hold a dot
                key += "_"
            found[key] = tensor
    return found


def is_redacted(key: str, redact: Sequence[str]) -> bool:
    """Whether a key is to be left out.

    Args:
        key: Dotted.
        redact: Keys, or parts of them between dots: "user" leaves out "user", "meta.user" and all below it.

    Example:
        >>> is_redacted("meta.user.id", ["user"]), is_redacted("meta.users", ["user"])
        (True, False)
    """
    return any(f".{part}." in f".{key}." for part in redact)


def unknown_keys(batch: Any, redact: Sequence[str]) -> list[str]:
    """Keys to leave out that a batch does not have.

    Args:
        batch: See `tensor_entries`.
        redact: The keys.
    """
    keys = tensor_entries(batch)
    return [part for part in redact if not any(is_redacted(key, [part]) for key in keys)]


def nested(entries: Mapping[str, Tensor]) -> Any:
    """Put tensors with dotted keys back into containers.

    Args:
        entries: Of `tensor_entries`.

    Returns:
        Dictionaries, and tuples where the keys are 0, 1, ...: a list or an object of the batch is one of these.

    Example:
        >>> nested({"x.ids": torch.ones(1), "x.pair.0": torch.ones(1), "x.pair.1": torch.ones(1)})
        {'x': {'ids': tensor([1.]), 'pair': (tensor([1.]), tensor([1.]))}}
    """
    if list(entries) == ["batch"]:
        return entries["batch"]
    tree: dict[str, Any] = {}
    for key, tensor in entries.items():
        *parents, last = key.split(".")
        place = tree
        for part in parents:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):  # a key held a dot: what is above it is a tensor
                place, last = tree, key
                break
        place[last] = tensor
    return _with_tuples(tree)


def _with_tuples(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_tuples(value) for key, value in tree.items()}
    is_sequence = sorted(values) == sorted(map(str, range(len(values))))
    return tuple(values[str(number)] for number in range(len(values))) if is_sequence and values else values


def _has_tensor(value: Any) -> bool:
    return next(_walk(value, (), 0), None) is not None


def _walk(value: Any, path: tuple[str, ...], depth: int) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth < _MAX_DEPTH:  # a container may hold itself
        for name, item in _items(value):
            yield from _walk(item, (*path, name), depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif hasattr(value, "_fields") and isinstance(value, tuple):
        yield from zip(typing.cast(Any, value)._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(number), item) for number, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif not callable(value):  # a module, a function or a class is no batch
        yield from getattr(value, "__dict__", {}).items()
