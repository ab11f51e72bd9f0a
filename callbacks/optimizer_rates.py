"""Learning rates from step to step, on the host."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RateWatch"]


class RateWatch:
    """Compares every group's learning rate with that of the step before.

    Args:
        factor: How much larger a rate must be to be told of.

    Attributes:
        last: Rates of the step before; `None` where the host does not know it.

    Example:
        >>> watch = RateWatch(5.0)
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> watch.see(optimizer)
        >>> optimizer.param_groups[0]["lr"] = 1.0
        >>> watch.see(optimizer)
        (0.1, 1.0)
        >>> watch.see(optimizer)
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.last: list[float | None] = []

    def see(self, optimizer: torch.optim.Optimizer) -> tuple[float, float] | None:
        """Look at the rates of the step that comes next.

        Args:
            optimizer: Of torch.

        Returns:
            The rate before and now of the group that has risen most, if any has risen by the factor.
        """
        before, self.last = self.last, [_known(group.get("lr")) for group in optimizer.param_groups]
        if len(before) != len(self.last):
            return None
        risen = [(old, new) for old, new in zip(before, self.last, strict=True) if old and new and old > 0]
        found = max(risen, key=lambda pair: pair[1] / pair[0], default=(1.0, 0.0))
        return found if found[1] / found[0] >= self._factor else None


def _known(rate: float | Tensor | None) -> float | None:
    """A number that the host has; one on a device would have to be waited for."""
    if isinstance(rate, Tensor):
        return float(rate) if rate.device.type == "cpu" else None
    return None if rate is None else float(rate)
