"""Which elements of a step's gradients are not finite: counted by parameter, for steps that have some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stabilizer.norms import count_nan, count_nonfinite
from stabilizer.reduction import Reducer

__all__ = ["BadParameter", "nonfinite_parameters"]


class BadParameter(NamedTuple):
    """A parameter whose gradient has elements that are not finite.

    Attributes:
        name: Its clean name.
        num_nan: How many elements are NaN.
        num_inf: How many are infinite.
    """

    name: str
    num_nan: int
    num_inf: int


def nonfinite_parameters(
    gradients: Sequence[Tensor | None],
    *,
    weights: Sequence[float],
    positions: Sequence[int],
    names: Sequence[str],
    reducer: Reducer,
) -> list[BadParameter]:
    """Count elements that are not finite, by parameter, over all ranks. A collective, and the host waits.

    Args:
        gradients: This rank's elements.
        weights: Ownership weight of each.
        positions: Of each among the parameters of all ranks.
        names: Of the parameters of all ranks, in the model's order.
        reducer: Reaches the other ranks.

    Returns:
        Those that have any, in the order of a backward pass (the model's, from its end): a value that is not finite
        spreads that way, so the first one is nearest to where it was born.
    """
    device = reducer.device
    counts = torch.zeros(2, len(names), dtype=torch.float64, device="cpu")
    try:
        nan = count_nan(gradients, device=device).cpu()
        bad = count_nonfinite(gradients, device=device).cpu()
        factor = torch.tensor(list(weights), dtype=torch.float64)
        counts[:, list(positions)] = torch.stack([nan * factor, (bad - nan) * factor])
    except Exception:
        counts.fill_(0.0)  # the other ranks wait; they name what they see
    total = reducer.sum(counts.reshape(-1).to(device)).cpu().reshape(2, -1).round()
    found = [
        BadParameter(name, int(num_nan), int(num_inf))
        for name, num_nan, num_inf in zip(names, *total.tolist(), strict=True)
        if num_nan or num_inf
    ]
    return found[::-1]
