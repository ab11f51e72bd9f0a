"""A quantile of the last norms: AutoClip."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from stabilizer.thresholds.arguments import check_number, check_whole
from stabilizer.thresholds.rule import ThresholdRule

__all__ = ["Quantile"]


class Quantile(ThresholdRule):
    """A quantile of the last norms, linear between neighbours.

    From: Seetharaman, Wichern, Pardo, Le Roux, "AutoClip: Adaptive Gradient Clipping for Source Separation Networks"
    (2020). The paper's own setting is `Quantile(q=0.1, warmup_steps=1, include_current=True)` with a window as long as
    the run: it clips 9 steps in 10. The norms enter as they were before the clip, spikes too.

    Args:
        q: The quantile, from 0 to 1.
        window: How many norms are remembered.
        warmup_steps: Norms before the first threshold, at most `window`; with `include_current` that of the step at
            hand is one of them.
        include_current: Whether the quantile is one of the norm that it is held against, too.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> rule = Quantile(q=0.5, window=3, warmup_steps=1)
        >>> rule.start(1, device="cpu")
        >>> for norm in (9.0, 1.0, 2.0, 4.0):
        ...     rule.update(torch.tensor([norm]))
        >>> rule.thresholds(torch.tensor([9.0]))
        tensor([2.])
    """

    name: ClassVar[str] = "quantile"

    window_norms: Tensor

    def __init__(
        self, q: float = 0.99, *, window: int = 1000, warmup_steps: int = 50, include_current: bool = False
    ) -> None:
        self.q = check_number("q", q, low=0, high=1)
        self.window = check_whole("window", window, low=1)
        self.warmup_steps = check_whole("warmup_steps", warmup_steps, low=1)
        if self.warmup_steps > self.window:
            raise ValueError(f"warmup_steps={warmup_steps!r}: expected at most window, which is {window}")
        if not isinstance(include_current, bool):
            raise ValueError(f"include_current={include_current!r}: expected true or false")
        self.include_current = include_current

    def allocate(self, num_layers: int) -> None:
        """Make the window.

        Args:
            num_layers: Length of the vectors of norms.
        """
        # One row more: what is not accepted is written there, as ones.
        window = torch.ones(self.window + 1, num_layers, dtype=self.dtype, device=self.device)
        self.add_state("window_norms", window)
        self._slots = torch.arange(self.window, device=self.device).unsqueeze(1)

    @property
    def is_warm(self) -> Tensor:
        """Who has a threshold at the next norm that is finite and not 0, shape (layers,), bool."""
        return self.num_accepted + int(self.include_current) >= self.warmup_steps

    def thresholds(self, norms: Tensor) -> Tensor:
        """The quantile of the window.

        Args:
            norms: Shape (layers,); they matter with `include_current` only.

        Returns:
            Shape (layers,), float32; infinity during the warm-up.
        """
        window, num = self._window(norms)
        found = self._quantile(window, num, self.q)
        return torch.where(num >= self.warmup_steps, found, math.inf).float()

    @property
    def typical(self) -> Tensor:
        """The median of the window, shape (layers,), float32."""
        num = self.num_accepted.clamp(max=self.window)
        found = self._quantile(self.window_norms[:-1], num, 0.5)
        return torch.where(num > 0, found, math.nan).float()

    def enter(self, norms: Tensor, accepted: Tensor) -> None:
        """Write over the oldest norm.

        Args:
            norms: Shape (layers,).
            accepted: Whose norm may enter, shape (layers,).
        """
        slot = torch.where(accepted, self.num_accepted % self.window, self.window)
        self.window_norms.scatter_(0, slot.unsqueeze(0), norms.unsqueeze(0))

    def _window(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """The norms to take the quantile of, in the first places, and how many they are."""
        if not self.include_current:
            return self.window_norms[:-1], self.num_accepted.clamp(max=self.window)
        is_good = (norms > 0) & (norms < math.inf)
        slot = torch.where(is_good, self.num_accepted % self.window, self.window)
        current = torch.where(is_good, norms.to(self.dtype), 1)
        window = self.window_norms.scatter(0, slot.unsqueeze(0), current.unsqueeze(0))[:-1]
        return window, (self.num_accepted + is_good).clamp(max=self.window)

    def _quantile(self, window: Tensor, num: Tensor, q: float) -> Tensor:
        """Of the first `num` norms of each layer; the last of them, or infinity, if there is none."""
        ordered = window.masked_fill(self._slots >= num, math.inf).sort(0).values
        # In float32 a place among a hundred norms would be off by a millionth, and the next norm may be a spike.
        position = (num - 1).clamp(min=0).to(self.dtype) * q
        below = position.floor()
        rows = torch.stack([below, position.ceil()]).long()
        low, high = ordered.gather(0, rows).unbind()
        weight = position - below
        return torch.where(weight > 0, low + weight * (high - low), low)
