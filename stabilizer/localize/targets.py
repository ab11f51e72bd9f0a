"""Which token the loss at a position is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stabilizer.batches import IGNORED_LABEL
from stabilizer.localize.grid import INPUT_NAMES, Grid, is_whole, last_part, named

__all__ = ["TargetRow", "target_row"]

_LABEL_NAMES = ("shift_labels", "labels?", "lm_labels", "targets?", "target_ids", "y")
_RESPONSE_NAMES = ("(completion|response|action|output)_(ids|tokens)", "responses", "completions")


@dataclasses.dataclass(frozen=True)
class TargetRow:
    """The tokens of one row.

    Attributes:
        targets: By position: the token that the loss there is about; `None` where there is none.
        shown: What to show around a position: one more than there are positions, `shown[p + 1]` belongs to position p.
        is_next: Whether that is the token which the model reads at p + 1, not at p.
    """

    targets: list[int | None]
    shown: list[int | None]
    is_next: bool = True


def target_row(entries: Mapping[str, Tensor], grid: Grid, row: int) -> TargetRow | None:
    """Find the tokens of a row.

    Args:
        entries: Tensors of the batch by dotted keys: labels; tokens that the model reads; or two tensors of whole
            numbers without names, which are inputs and targets.
        grid: Where the units are.
        row: The row.

    Returns:
        Labels as they are given, if they are others than the inputs. Labels that repeat the inputs (most of those that
        are not -100 do), and inputs alone: the next token, since the model shifts them. `None` if the batch has no
        tokens of a shape that fits.

    Example:
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> target_row({"input_ids": ids, "labels": ids}, Grid(1, 3), 0).targets
        [6, 7, None]
        >>> target_row({"0": ids, "1": torch.tensor([[6, 7, 8]])}, Grid(1, 3), 0).targets
        [6, 7, 8]
    """
    length = grid.num_positions
    if length is None:
        return None
    inputs, labels = _inputs_and_labels(entries, grid)
    if inputs is None or inputs.shape[1] != length:
        # The tokens after a prompt, gated alone; each is what its own position is about.
        for found in _whole(named(entries, _RESPONSE_NAMES), grid):
            if found.shape[1] == length:
                return dataclasses.replace(_row(_values(found[row]), first=None), is_next=False)
    if labels is None:
        return None if inputs is None else _shifted(inputs[row], length)
    if labels.shape[1] == length + 1:  # shifted before the gate
        return _shifted(labels[row] if inputs is None else _or_else(labels[row], inputs[row]), length)
    if inputs is None:
        # Without the tokens nothing says what the labels repeat; embeddings are what transformers shifts labels for.
        has_embeddings = any(last_part(key) == "inputs_embeds" for key in entries)
        return _shifted(labels[row], length) if has_embeddings else _row(_values(labels[row]), first=None)
    return _labelled(inputs, labels, row)


def _labelled(inputs: Tensor, labels: Tensor, row: int) -> TargetRow:
    length = labels.shape[1]
    if inputs.shape[1] != length:
        return _row(_values(labels[row]), first=None)
    # By majority: a label that somebody spoiled may be what the spike is about.
    same = _share(labels, inputs)
    if same > 0.5 and same >= _share(labels[:, :-1], inputs[:, 1:]):
        return _shifted(_or_else(labels[row], inputs[row]), length, first=int(inputs[row, 0]))
    targets = _values(labels[row])
    if _share(labels[:, :-1], inputs[:, 1:]) > 0.5:  # shifted by the user
        around = _shifted(inputs[row], length)
        return _row(targets, first=around.shown[0], instead=around.targets)
    return dataclasses.replace(_row(targets, first=None, instead=_values(inputs[row])), is_next=False)


def _share(labels: Tensor, inputs: Tensor) -> float:
    """How many of the labels that count are the inputs."""
    is_counted = labels != IGNORED_LABEL
    num_counted = int(is_counted.sum())
    return int(((labels == inputs) & is_counted).sum()) / num_counted if num_counted else 1.0


def _inputs_and_labels(entries: Mapping[str, Tensor], grid: Grid) -> tuple[Tensor | None, Tensor | None]:
    inputs = _whole(named(entries, INPUT_NAMES), grid)
    labels = _whole(named(entries, _LABEL_NAMES), grid)
    if not inputs and not labels:
        unnamed = _whole([found for key, found in entries.items() if _has_no_name(key)], grid)
        if len(unnamed) > 2:  # masks look like tokens
            unnamed = [found for found in unnamed if int(found.max()) > 1]
        inputs, labels = unnamed[:1], unnamed[1:2]
    return (inputs[0] if inputs else None), (labels[0] if labels else None)


def _has_no_name(key: str) -> bool:
    return last_part(key).isdigit() or key == "batch"


def _whole(found: Sequence[Tensor], grid: Grid) -> list[Tensor]:
    """Those that may be tokens of the rows: as many as there are positions, or one more."""
    fitting = []
    for tensor in found:
        if not is_whole(tensor) or grid.num_positions is None:
            continue
        if tensor.dim() == 1 and tensor.numel() == grid.num_rows * grid.num_positions and grid.num_rows == 1:
            tensor = tensor.reshape(1, -1)
        if tensor.dim() == 2 and len(tensor) == grid.num_rows and tensor.shape[1] - grid.num_positions in (0, 1):
            fitting.append(tensor.detach().cpu())
    return fitting


def _values(row: Tensor) -> list[int | None]:
    return [None if value == IGNORED_LABEL else int(value) for value in row.tolist()]


def _or_else(labels: Tensor, inputs: Tensor) -> Tensor:
    return torch.where(labels == IGNORED_LABEL, inputs, labels) if labels.shape == inputs.shape else labels


def _shifted(row: Tensor, length: int, *, first: int | None = None) -> TargetRow:
    values = _values(row)
    return _row([*values[1:], None][:length], first=values[0] if first is None else first)


def _row(targets: list[int | None], *, first: int | None, instead: Sequence[int | None] | None = None) -> TargetRow:
    around = targets if instead is None else [b if a is None else a for a, b in zip(targets, instead, strict=True)]
    return TargetRow(targets, [first, *around])
