"""What clips and skips are counted with: on the device, in place, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.late import HostCopy

__all__ = ["WINDOW", "ClipRates", "SkipCounter"]

#: Steps over which a share of clipped steps is taken.
WINDOW = 1000
_INTERVAL = 16


class ClipRates:
    """How often each layer was clipped in its last 1,000 steps.

    Args:
        num_layers: How many there are.
        device: Where the flags are.

    Attributes:
        counts: Clipped steps in the window, shape (layers,), int32.
        num_steps: Steps seen.
        first_steps: How many steps had been seen when each layer came, shape (layers,), int32.

    Example:
        >>> rates = ClipRates(1, device=torch.device("cpu"))
        >>> for is_clipped in (True, False, False, True):
        ...     rates.update(torch.tensor([is_clipped]))
        >>> rates.shares
        tensor([0.5000])
    """

    def __init__(self, num_layers: int, *, device: torch.device) -> None:
        self._ring = torch.zeros(WINDOW, num_layers, dtype=torch.bool, device=device)
        self.counts = torch.zeros(num_layers, dtype=torch.int32, device=device)
        self.first_steps = torch.zeros(num_layers, dtype=torch.int32, device=device)
        self.num_steps = 0

    @property
    def shares(self) -> Tensor:
        """Share of clipped steps, shape (layers,), float32; 0 before the first step."""
        num_steps = (self.num_steps - self.first_steps).clamp(1, WINDOW)
        return self.counts.to(torch.float32) / num_steps

    def update(self, flags: Tensor) -> None:
        """Take a step.

        Args:
            flags: Which layers were clipped, shape (layers,), bool.
        """
        row = self._ring[self.num_steps % WINDOW]
        self.counts += flags.to(torch.int32) - row.to(torch.int32)
        row.copy_(flags)
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU clones."""
        first_steps = self.first_steps.cpu().clone()
        return {"ring": self._ring.cpu().clone(), "num_steps": self.num_steps, "first_steps": first_steps}

    def load_state_dict(self, state: Mapping[str, Any], columns: list[int | None]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
            columns: For every layer its column in the state, `None` for a new one.
        """
        self.num_steps = int(state["num_steps"])
        for column, source in enumerate(columns):
            self._ring[:, column] = False if source is None else state["ring"][:, source].to(self._ring.device)
            self.first_steps[column] = self.num_steps if source is None else int(state["first_steps"][source])
        self.counts.copy_(self._ring.sum(0))


class SkipCounter:
    """How many steps were skipped, in all and in a row.

    Args:
        device: Where the flags are.

    Attributes:
        count: In all, shape (), int64.
        consecutive: In a row up to the last step, shape (), int64.
        overflows: Steps that a gradient scaler left out, shape (), int64.
        longest: Longest row since the host read it, shape (), int64.
    """

    def __init__(self, *, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.consecutive, self.overflows, self.longest = (self.count.clone() for _ in range(3))
        self._noted: HostCopy | None = None

    def update(self, skipped: Tensor, overflowed: Tensor) -> None:
        """Take a step.

        Args:
            skipped: Whether it was skipped, shape (), bool.
            overflowed: Whether a scaler left it out, shape (), bool; this ends no row and adds to none.
        """
        self.count += skipped
        self.overflows += overflowed
        self.consecutive += skipped
        self.consecutive *= skipped | overflowed
        torch.maximum(self.longest, self.consecutive, out=self.longest)

    def in_a_row(self, step: int) -> int:
        """Most steps skipped in a row of late, as far as the host may know without waiting for the device.

        Args:
            step: The step at hand, the same on every rank: on an accelerator a count is read 16 steps after it was
                taken, by all ranks at the same step.
        """
        if self.consecutive.device.type == "cpu":
            return int(self.consecutive)
        if step % _INTERVAL:
            return 0
        before, self._noted = self._noted, HostCopy(self.longest)
        self.longest.zero_()
        return 0 if before is None else int(before.read())

    def state_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return {name: int(getattr(self, name)) for name in ("count", "consecutive", "overflows")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        for name, value in state.items():
            getattr(self, name).fill_(value)
