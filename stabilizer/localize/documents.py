"""Which document of a packed row a position is in."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from stabilizer.localize.grid import Grid, is_whole, named

__all__ = ["document_places"]

_NUMBERS = ("seq_idx", "(document|doc|segment|sequence|sample)_(ids?|idx|index)")
_STARTS = ("cu_?seq_?len(s|gths)?(_q|_k|_kv)?",)
_POSITIONS = ("position_ids",)


def document_places(entries: Mapping[str, Tensor], grid: Grid, row: int) -> list[tuple[int, int]] | None:
    """Find document and position in it, for every position of a row.

    Args:
        entries: Tensors of the batch by dotted keys: `position_ids` that begin again at 0; `seq_idx`, `document_ids`
            and the like, which change from one document to the next; or `cu_seqlens`, the start of every document.
        grid: Where the units are.
        row: The row.

    Returns:
        Both from 0; `None` where the batch is not packed.

    Example:
        >>> import torch
        >>> document_places({"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, Grid(1, 5), 0)
        [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    """
    readers: list[tuple[tuple[str, ...], Callable[..., list[tuple[int, int]] | None]]] = [
        (_STARTS, _from_starts),
        (_NUMBERS, _from_numbers),
        (_POSITIONS, _from_positions),
    ]
    for names, read in readers:
        for found in named(entries, names):
            places = None
            with contextlib.suppress(ValueError, IndexError, RuntimeError):  # of a shape that does not fit
                places = read(found, entries, grid, row) if is_whole(found) else None
            if places is not None:
                return places
    return None


def _from_positions(found: Tensor, entries: Mapping[str, Tensor], grid: Grid, row: int) -> list[tuple[int, int]] | None:
    found = _whole_rows(found, grid)
    is_start = found == 0
    is_start[:, 0] = True
    masks = [mask for mask in named(entries, ("attention_mask",)) if mask.shape == found.shape]
    # Padding has positions too, often 0.
    starts = is_start & masks[0].bool() if masks else is_start
    if (starts.sum(1) <= 1).all():
        return None
    return _counted(starts[row].tolist())


def _from_numbers(found: Tensor, entries: Mapping[str, Tensor], grid: Grid, row: int) -> list[tuple[int, int]] | None:
    found = _whole_rows(found, grid)
    return _counted([True, *(found[row, 1:] != found[row, :-1]).tolist()])


def _from_starts(found: Tensor, entries: Mapping[str, Tensor], grid: Grid, row: int) -> list[tuple[int, int]] | None:
    length = grid.num_positions
    if length is None or found.dim() not in (1, 2):
        return None
    # One list for the rows one after another, or one a row.
    num_rows = grid.num_rows if found.dim() == 1 else 1
    starts = found.tolist() if found.dim() == 1 else found[row].tolist()
    is_rising = all(low <= high for low, high in itertools.pairwise(starts))
    if len(starts) < 2 or starts[0] != 0 or not is_rising:
        return None
    # Rows may have one token more than units; a single one may end with padding.
    strides = [stride for stride in (length, length + 1) if num_rows * stride == starts[-1]]
    if not strides and not (num_rows == 1 and starts[-1] < length):
        return None
    first = row * (strides or [length])[0] if num_rows > 1 else 0
    own = [(bisect.bisect_right(starts, first + position) - 1, first + position) for position in range(length)]
    return [(document - own[0][0], place - starts[document]) for document, place in own]


def _whole_rows(found: Tensor, grid: Grid) -> Tensor:
    """Rows of all positions; one more is allowed, which has no unit where the model's inputs are without the last."""
    found = found.detach().cpu()
    if found.dim() == 1:
        found = found.reshape(grid.num_rows, -1)
    if found.dim() != 2 or grid.num_positions is None or found.shape[1] - grid.num_positions not in (0, 1):
        raise ValueError(f"positions of shape {tuple(found.shape)} do not fit {grid}")
    # Positions are often the same for all rows.
    return found[:, : grid.num_positions].expand(grid.num_rows, -1)


def _counted(is_start: Sequence[bool]) -> list[tuple[int, int]]:
    places, document, position = [], -1, 0
    for starts in is_start:
        document, position = (document + 1, 0) if starts or document < 0 else (document, position + 1)
        places.append((document, position))
    return places
