"""Norms of the attention and the MLP part of every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stabilizer.localize.classify import part_of
from stabilizer.names import Granularity, layer_names
from stabilizer.norms import norms
from stabilizer.store import GradientStore

__all__ = ["part_norms"]

_PARTS = ("attention", "mlp")


@torch.no_grad()
def part_norms(
    store: GradientStore, *, layers: Sequence[str], granularity: Granularity, grad_scale: Tensor | None = None
) -> dict[str, dict[str, float]]:
    """Norms of the gradients as they are now; a collective, and a read of all gradients.

    Args:
        store: Holds the gradients.
        layers: Names of the layers.
        granularity: That gives these names.
        grad_scale: What the gradients are still multiplied by, shape ().

    Returns:
        By layer "attention_norm" and "mlp_norm", where it has such a part.
    """
    index = store.index
    numbers = {name: number for number, name in enumerate(layers)}
    squares = torch.zeros(len(layers), len(_PARTS), dtype=torch.float64)
    has_part = torch.zeros(len(layers), len(_PARTS), dtype=torch.float64)
    try:
        gradients = index.gradients()
        local = norms([None if one is None else index.local(one) for one in gradients], device=store.device).tolist()
        for position, (name, layer) in enumerate(zip(index.names, layer_names(index.names, granularity), strict=True)):
            part = part_of(name)
            if part is None or layer not in numbers:
                continue
            weight = index.weight(position, index.placements(position, gradients[position]))
            at = numbers[layer], _PARTS.index(part)
            squares[at] += weight * local[position] ** 2
            has_part[at] = 1.0
    except Exception:
        # The other ranks wait: take part, with numbers that are none.
        squares.fill_(torch.nan)
    both = store.reducer.sum(torch.stack([squares, has_part]).flatten().to(store.device)).cpu().view(2, -1, len(_PARTS))
    scale = 1.0 if grad_scale is None else float(grad_scale)
    found: dict[str, dict[str, float]] = {}
    for number, name in enumerate(layers):
        found[name] = {
            f"{part}_norm": float(both[0, number, column].sqrt()) / scale
            for column, part in enumerate(_PARTS)
            if both[1, number, column] > 0
        }
    return found
