"""Copies of a batch's containers: what a step function pops, appends or assigns does not reach the other copy."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["copied", "tensors_of"]

# Handed on as they are: without content that a step function could take away.
_WHOLE = (
    Tensor,
    nn.Module,
    str,
    bytes,
    int,
    float,
    complex,
    type,
    range,
    torch.Size,
    torch.dtype,
    torch.device,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    Iterator,
)


def copied(value: Any, *, memo: dict[int, Any] | None = None) -> Any:
    """Copy containers, however nested; what they hold in the end stays the same object.

    Args:
        value: Dictionaries, lists, tuples (named ones too), sets, dataclasses and mappings are taken apart; of an
            object of another class `copy.copy` is asked, and it stays as it is where that fails.
        memo: What has been copied so far, by identity: one list in two places is one list in the copy.

    Returns:
        A copy of the same types.

    Example:
        >>> batch = {"ids": [1, 2], "mask": torch.ones(2)}
        >>> again = copied(batch)
        >>> batch["ids"].pop(), batch.pop("mask").shape
        (2, torch.Size([2]))
        >>> sorted(again), again["ids"]
        (['ids', 'mask'], [1, 2])
    """
    if isinstance(value, Tensor) and value.requires_grad:
        # A leaf of its own: a replay must neither add to the user's `.grad` nor go on into what comes before.
        return value.detach().requires_grad_()
    if value is None or isinstance(value, _WHOLE) or _is_array(value):
        return value
    memo = {} if memo is None else memo
    if id(value) not in memo:
        try:
            # The original is kept too: as long as it lives, no other object has its identity.
            memo[id(value)] = (value, _copied(value, memo))
        except Exception:
            # Locks, files, views of mappings, classes that refuse: nothing that a copy could be made of.
            memo[id(value)] = (value, value)
    return memo[id(value)][1]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, tuple):
        items = [copied(item, memo=memo) for item in value]
        if hasattr(value, "_make"):
            return value._make(items)
        return tuple(items) if type(value) is tuple else type(value)(items)
    new = copy.copy(value)
    # From here on a list that holds itself finds its copy.
    memo[id(value)] = (value, new)
    if isinstance(value, list):
        list.__setitem__(new, slice(None), [copied(item, memo=memo) for item in value])
    elif isinstance(value, MutableMapping):
        # What assigning is in a class of its own, only the class knows: no more of it than there must be.
        items = new.data if isinstance(value, UserDict) else new
        for key, item in list(value.items()):
            inner = copied(item, memo=memo)
            if inner is not item:
                items[key] = inner
    elif dataclasses.is_dataclass(value):
        for name in [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]:
            # Frozen ones too.
            object.__setattr__(new, name, copied(getattr(value, name), memo=memo))
    return new


def tensors_of(value: Any, *, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Find the tensors in a batch.

    Args:
        value: As of `copied`.
        name: Of the value itself.

    Yields:
        Dotted names (keys, numbers and attributes) and tensors; one tensor in two places comes once.

    Example:
        >>> [name for name, _ in tensors_of(({"ids": torch.zeros(2)}, [torch.ones(1)]))]
        ['0.ids', '1.0']
    """
    waiting: list[tuple[str, Any]] = [(name, value)]
    seen: set[int] = set()
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield name, value
        elif not isinstance(value, _WHOLE):
            items = [(f"{name}.{key}" if name else str(key), item) for key, item in _items(value)]
            # The last comes out first.
            waiting += reversed(items)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()


def _is_array(value: Any) -> bool:
    # Like a tensor: too large to copy, and nobody pops from it.
    return type(value).__module__ == "numpy"
