"""How many tokens or samples a batch has, on the device, for weighted means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["IGNORED_LABEL", "count"]

#: What `torch.nn.functional.cross_entropy` leaves out by default, and what transformers fills labels with.
IGNORED_LABEL = -100


def count(batch: Any, kind: str) -> Tensor | int:
    """Count what the mean loss of a batch is a mean of.

    Args:
        batch: A tensor, or tensors in mappings, sequences and objects with attributes.
        kind: "tokens": labels that are not -100, else the attention mask's ones, else the elements of the first whole
            numbers with two dimensions; "samples": length of the first tensor; "auto": tokens if there are labels for
            every position, else samples. Labels that repeat `input_ids` are shifted by the model (a causal language
            model of transformers), so that the first of a row has no loss and does not count.

    Returns:
        The number; a tensor of shape () where it must be counted on the device.

    Raises:
        ValueError: If the batch has nothing to count.

    Example:
        >>> count({"labels": torch.tensor([[-100, 7, 8], [-100, -100, 9]])}, "auto")
        tensor(3)
        >>> count([torch.zeros(4, 2), torch.zeros(4)], "auto")
        4
    """
    labels = _entry(batch, "labels")
    if kind != "samples" and labels is not None and (labels.dim() > 1 or kind == "tokens"):
        return _count_labels(labels, _entry(batch, "input_ids"))
    tensors = list(_tensors(batch))
    if kind == "tokens":
        mask = _entry(batch, "attention_mask")
        if mask is not None:
            return mask.sum()
        for tensor in tensors:
            if tensor.dim() > 1 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
                return tensor.numel()
        raise ValueError(
            f'weight="tokens": the batch ({_describe(batch)}) has neither labels nor whole numbers to count'
        )
    for tensor in tensors:
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise ValueError(f"weight={kind!r}: the batch ({_describe(batch)}) has no tensor whose samples could be counted")


def _count_labels(labels: Tensor, input_ids: Tensor | None) -> Tensor:
    is_counted = labels != IGNORED_LABEL
    total = is_counted.sum()
    if input_ids is None or input_ids.shape != labels.shape or labels.dim() < 2:
        return total
    # Asked on the device: the host must not wait for it.
    is_copy = ((labels == input_ids) | ~is_counted).all()
    return total - is_copy * is_counted[..., 0].sum()


def _entry(batch: Any, name: str) -> Tensor | None:
    found = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
    return found if isinstance(found, Tensor) else None


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
    elif hasattr(batch, "__dict__"):
        yield from (value for value in vars(batch).values() if isinstance(value, Tensor))


def _describe(batch: Any) -> str:
    return f"a mapping with {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
