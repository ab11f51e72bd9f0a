"""Hidden states that go into blocks and come out of them, and one number for each row and position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.localize.masking import unit_norms

__all__ = ["Bad", "Hidden", "by_row", "first_bad", "hidden_of", "is_same", "last_bad"]

# Of keyword arguments and outputs: a mask may stand before them.
_KEYS = ("hidden_states", "last_hidden_state", "x")

#: Row, position (`None` if it cannot be told) and value of something that is not finite.
Bad = tuple[int, "int | None", float]


@dataclasses.dataclass(frozen=True, eq=False)
class Hidden:
    """A hidden state at one moment.

    Attributes:
        tensor: (rows, positions, features), or (rows, ...).
        version: Of its values: it may be changed in place later.
    """

    tensor: Tensor
    version: int

    @property
    def has_positions(self) -> bool:
        """Whether rows have positions."""
        return self.tensor.dim() == 3

    @property
    def dims(self) -> int:
        """How many dimensions are not features."""
        return 2 if self.has_positions else 1

    def largest(self) -> Tensor:
        """Largest absolute value, shape (rows, positions), float32; NaN where there is one."""
        return by_row(unit_norms(self.tensor.detach(), dims=self.dims, ord=torch.inf))


def hidden_of(value: Any) -> Hidden | None:
    """The hidden state among arguments or in an output.

    Args:
        value: A tensor, or containers of tensors.

    Returns:
        The first tensor of numbers with two dimensions or more, or the one under a name that hidden states have.
    """
    if isinstance(value, Tensor):
        is_hidden = value.is_floating_point() and value.dim() >= 2 and not value.is_inference()
        return Hidden(value, value._version) if is_hidden else None
    if isinstance(value, Mapping):
        named = [value[key] for key in _KEYS if key in value]
        parts = [*named, *value.values()]
    else:
        parts = list(value) if isinstance(value, (tuple, list)) else []
    return next((found for part in parts if (found := hidden_of(part)) is not None), None)


def is_same(one: Hidden, other: Hidden | None) -> bool:
    """Whether two hidden states are the same values in the same memory.

    Args:
        one: Now.
        other: Of before, still held.
    """
    if other is None or one.version != other.version:
        return False
    first, second = one.tensor, other.tensor
    if first is second:
        return True
    # Wrappers hand on views. Tensors of other classes may have no memory of their own.
    is_plain = type(first) is Tensor and type(second) is Tensor
    return (
        is_plain
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.data_ptr() == second.data_ptr()
        and first.dtype == second.dtype
    )


def by_row(norms: Tensor) -> Tensor:
    """Norms with a dimension of positions, shape (rows, positions).

    Args:
        norms: Shape (rows, positions) or (rows,).
    """
    return norms.flatten().unsqueeze(1) if norms.dim() < 2 else norms


def first_bad(norms: Tensor) -> Bad | None:
    """The first entry that is not finite, by rows; the host waits.

    Args:
        norms: Shape (rows, positions).

    Example:
        >>> first_bad(torch.tensor([[1.0, 2.0], [3.0, torch.inf]]))
        (1, 1, inf)
    """
    values = norms.cpu()
    places: list[list[int]] = (~torch.isfinite(values)).nonzero().tolist()
    return (places[0][0], places[0][1], float(values[tuple(places[0])])) if places else None


def last_bad(norms: Tensor) -> Bad | None:
    """The last entry that is not finite, of the first row that has one; the host waits.

    Args:
        norms: Shape (rows, positions).

    Returns:
        Without a position if the whole row is bad.

    Example:
        >>> last_bad(torch.tensor([[1.0, 2.0], [torch.inf, 3.0], [torch.inf, torch.inf]]))
        (1, 0, inf)
    """
    first = first_bad(norms)
    if first is None:
        return None
    values = norms[first[0]].cpu()
    is_bad = ~torch.isfinite(values)
    last = int(is_bad.nonzero().max())
    position = None if len(values) > 1 and bool(is_bad.all()) else last
    return first[0], position, float(values[last])
