"""Rows and positions of the units at the gate, and what of a batch has a value for each of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["INPUT_NAMES", "Grid", "find_grid", "last_part", "named"]

#: What the tokens that a model reads are called.
INPUT_NAMES = ("input_ids", "inputs", "input", "ids", "idx", "tokens", "token_ids", "x")


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where the units are.

    Attributes:
        num_rows: How many rows there are.
        num_positions: How many positions a row has; `None` where units are samples.
        is_flat: Whether the gate numbers the tokens of all rows in one dimension.
    """

    num_rows: int
    num_positions: int | None
    is_flat: bool = False

    def place(self, unit: tuple[int, int | None]) -> tuple[int, int | None]:
        """Row and position of a unit.

        Args:
            unit: As the gate gives it.
        """
        if self.is_flat and self.num_positions and unit[1] is None:
            return unit[0] // self.num_positions, unit[0] % self.num_positions
        return unit

    def fitted(self, found: Tensor) -> Tensor | None:
        """A tensor with a value for every unit.

        Args:
            found: Shape (rows, positions); of one position less, which belong to the first ones; or flat.

        Returns:
            Shape (rows, positions), or one position less; `None` if the shape is another.
        """
        if self.num_positions is None:
            return None
        if found.dim() == 1 and (self.is_flat or self.num_rows == 1):
            wanted = self.num_rows * self.num_positions
            return found.reshape(self.num_rows, -1) if found.numel() == wanted else None
        if found.dim() == 2 and len(found) == self.num_rows:
            return found if found.shape[1] in (self.num_positions, self.num_positions - 1) else None
        return None


def find_grid(entries: Mapping[str, Tensor], unit_shape: Sequence[int]) -> Grid:
    """Find rows and positions.

    Args:
        entries: Tensors of the batch by dotted keys.
        unit_shape: Leading dimensions of the gated tensor: (rows, positions), (samples,), or (tokens,) where the rows
            were put one after another; then the batch's tokens, all or without the last of each row, tell the rows.

    Example:
        >>> find_grid({"input_ids": torch.zeros(4, 8, dtype=torch.long)}, (28,))
        Grid(num_rows=4, num_positions=7, is_flat=True)
    """
    if len(unit_shape) > 1:
        return Grid(unit_shape[0], unit_shape[1])
    num_units = unit_shape[0] if unit_shape else 1
    shapes = [tensor.shape for tensor in entries.values() if is_whole(tensor) and tensor.dim() == 2]
    if any(len(found) == num_units for found in entries.values() if found.dim() > 1):
        return Grid(num_units, None)
    for missing in (0, 1):
        for rows, positions in shapes:
            if positions > missing and rows * (positions - missing) == num_units:
                return Grid(rows, positions - missing, is_flat=True)
    # Other names may be those of one number a sample.
    flat = [found for found in named(entries, ("input_ids", "token_ids", "tokens")) if is_whole(found)]
    if any(found.dim() == 1 and len(found) == num_units for found in flat):
        return Grid(1, num_units, is_flat=True)
    return Grid(num_units, None)


def is_whole(found: Tensor) -> bool:
    """Whether a tensor holds whole numbers.

    Args:
        found: Any tensor.
    """
    return not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)


def last_part(key: str) -> str:
    """What follows the last dot of a key.

    Args:
        key: Dotted.
    """
    return key.rpartition(".")[2]


def named(entries: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    """Tensors with one of some names.

    Args:
        entries: Tensors by dotted keys.
        names: Regular expressions for the last part of a key.

    Returns:
        In the order of the names.
    """
    patterns = [re.compile(name) for name in names]
    return [found for pattern in patterns for key, found in entries.items() if pattern.fullmatch(last_part(key))]
