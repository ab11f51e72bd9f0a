"""How the gradients of the ranks become the step's: how many data-parallel ranks there are, and what is divided by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from stabilizer.fsdp import fsdp2_groups
from stabilizer.localize.tensor_group import tensor_group
from stabilizer.reduction import world_size
from stabilizer.sensors import Sensors

__all__ = ["Averaging", "averaging_of"]


@dataclasses.dataclass(frozen=True)
class Averaging:
    """How ranks' gradients become the step's.

    Attributes:
        divisor: What their sum is divided by.
        num_shares: How many ranks hold pieces of one and the same gradient (tensor parallelism); 1 elsewhere.
        reason: Why it is not known; `None` if it is.

    Example:
        >>> Averaging(divisor=4.0, num_shares=2).reason is None
        True
    """

    divisor: float
    num_shares: int = 1
    reason: str | None = None


def averaging_of(model: nn.Module, sensors: Sensors) -> Averaging:
    """How a model's gradients are averaged.

    DDP, FSDP1 and FSDP2 divide by the number of data-parallel ranks, unless FSDP2 was told another number
    (`set_gradient_divide_factor`). A loop that reduces gradients by itself is taken to average them.

    Args:
        model: As it trains, wrapped or not; it has run a forward pass.
        sensors: On it.
    """
    num_shares = max(1, len(tensor_group(sensors).ranks))
    usual = world_size() / num_shares
    divisors = set(_fsdp2_divisors(model, usual))
    if len(divisors) > 1:
        return Averaging(usual, num_shares, f"FSDP2 units divide gradients by different numbers ({sorted(divisors)})")
    return Averaging(divisors.pop() if divisors else usual, num_shares)


def _fsdp2_divisors(model: nn.Module, usual: float) -> Iterator[float]:
    for group in fsdp2_groups(model.modules()):
        factor: Any = getattr(group, "gradient_divide_factor", None)
        yield usual if factor is None else float(factor)
