"""What is not finite among the tensors of arguments and outputs, however these are nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["kinds_of", "tensors_in"]

_MAX_DEPTH = 8
_MAX_TENSORS = 256


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of numbers with a fraction, with the way to each.

    Args:
        value: A tensor, or lists, tuples, mappings, dataclasses and objects with fields that hold some.
        path: What the ways begin with.

    Yields:
        Way and tensor, at most 256; what has whole numbers or truth values only cannot be NaN.

    Example:
        >>> output = {"hidden": (torch.ones(2, dtype=torch.int64), torch.ones(2))}
        >>> [path for path, _ in tensors_in(output, "output")]
        ['output["hidden"][1]']
    """
    left = [_MAX_TENSORS]
    yield from _walk(value, path, 0, left)


def _walk(value: Any, path: str, depth: int, left: list[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if left[0] > 0 and (value.is_floating_point() or value.is_complex()):
            left[0] -= 1
            yield path, value
        return
    if depth >= _MAX_DEPTH or left[0] <= 0:
        return
    for step, item in _items(value):
        yield from _walk(item, path + step, depth + 1, left)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in list(value):
            yield (f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"), value[key]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value))


@torch.no_grad()
def kinds_of(tensor: Tensor) -> Tensor | None:
    """Whether a tensor has NaN, infinity, minus infinity.

    Args:
        tensor: With a fraction or complex, of any layout; of a DTensor this rank's part.

    Returns:
        Shape (3,), bool, where the tensor is; `None` for one that cannot be looked at.

    Example:
        >>> kinds_of(torch.tensor([1.0, float("inf")]))
        tensor([False,  True, False])
    """
    sharded: Any = tensor
    try:
        local: Tensor = sharded.to_local() if hasattr(tensor, "to_local") else tensor.detach()
        local = local if local.layout == torch.strided else local.coalesce().values()
        local = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
        if local.device.type == "meta":
            return None
        return torch.stack([torch.isnan(local).any(), torch.isposinf(local).any(), torch.isneginf(local).any()])
    except (RuntimeError, NotImplementedError, TypeError):  # nested, quantized, of a stranger's class
        return None
