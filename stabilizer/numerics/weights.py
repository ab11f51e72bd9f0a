"""Parameters and buffers that are not finite, or have an element out of all proportion: a flipped bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stabilizer.norms import count_nan, count_nonfinite, largest

__all__ = ["BadWeight", "any_nonfinite", "bad_weights"]

# The highest exponent bit of a float32 multiplies by 2^64 or 2^128; a large outlier of a trained model by 10^3.
_RATIO = 1e6
_LARGE = 1e4


@dataclasses.dataclass(frozen=True)
class BadWeight:
    """A parameter or buffer that cannot be as it should be.

    Attributes:
        name: Clean name.
        num_nan: How many elements are NaN.
        num_inf: How many are infinite.
        largest: Largest absolute value; infinite where there is NaN too.
    """

    name: str
    num_nan: int
    num_inf: int
    largest: float

    @property
    def is_finite(self) -> bool:
        """Whether it is finite, and only out of proportion."""
        return not (self.num_nan or self.num_inf)


@torch.no_grad()
def any_nonfinite(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Whether any element is not finite; no wait for the device.

    Args:
        tensors: Of any shape and dtype; of sharded ones this rank's part.
        device: Where the answer goes.

    Returns:
        Shape (), bool.

    Example:
        >>> any_nonfinite([torch.ones(2), torch.tensor([float("nan")])], device=torch.device("cpu"))
        tensor(True)
    """
    return torch.isinf(largest(tensors, device=device)).any()


@torch.no_grad()
def bad_weights(named: Sequence[tuple[str, Tensor]]) -> list[BadWeight]:
    """Which of them cannot be as they should be; the host waits.

    Args:
        named: Name and values, of sharded ones this rank's part.

    Returns:
        In the order of a backward pass: from the last one to the first.

    Example:
        >>> weight = torch.full((4, 4), 0.1)
        >>> weight[2, 3] = 1e36
        >>> [(bad.name, bad.is_finite) for bad in bad_weights([("up.weight", weight), ("down.weight", weight[:2])])]
        [('up.weight', True)]
    """
    named = [(name, values) for name, values in named if values.numel() and values.is_floating_point()]
    if not named:
        return []
    # No copy of anything: a large embedding hardly fits twice.
    device = named[0][1].device
    tops = largest([values for _, values in named], device=device)
    sums = [torch.linalg.vector_norm(values, ord=1, dtype=torch.float32).to(device) for _, values in named]
    found = []
    for (name, values), top, whole in zip(named, tops.tolist(), torch.stack(sums).tolist(), strict=True):
        if math.isinf(top):
            nan = int(count_nan([values], device=device))
            found.append(BadWeight(name, nan, int(count_nonfinite([values], device=device)) - nan, math.inf))
            continue
        others = max(whole - top, 0.0) / max(1, values.numel() - 1)
        # Of few elements one may well be the only one that is not 0.
        if top > _LARGE and values.numel() > 8 and others * _RATIO < top:
            found.append(BadWeight(name, 0, 0, top))
    return found[::-1]
