"""A multiple of the running mean."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from stabilizer.thresholds.arguments import check_number, check_whole
from stabilizer.thresholds.rule import ThresholdRule

__all__ = ["MeanMultiple"]


class MeanMultiple(ThresholdRule):
    """A multiple of the running mean of the norms that were not clipped.

    The warm-up takes a geometric mean, which one norm of a thousand times the usual moves by a seventh. A norm over the
    threshold does not enter; after `escape_after` of them in a row the mean starts anew from their own.

    Args:
        k: The multiple, from 3 to 10: below, healthy norms are clipped; above, little is left to clip.
        decay: Of the mean, a step.
        warmup_steps: Norms before the first threshold.
        escape_after: So many clipped norms in a row are no spikes but a new level.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> rule = MeanMultiple(k=4.0, warmup_steps=2)
        >>> rule.start(1, device="cpu")
        >>> for norm in (0.5, 0.5, 53.7):
        ...     rule.update(torch.tensor([norm]))
        >>> rule.thresholds(torch.tensor([53.7]))
        tensor([2.])
    """

    name: ClassVar[str] = "mean_multiple"
    keeps_outliers_apart: ClassVar[bool] = True

    mean: Tensor
    clipped_in_row: Tensor
    clipped_sum: Tensor

    def __init__(self, k: float = 5.0, *, decay: float = 0.98, warmup_steps: int = 50, escape_after: int = 32) -> None:
        self.k = check_number("k", k, low=3, high=10)
        self.decay = check_number("decay", decay, above=0, below=1)
        self.warmup_steps = check_whole("warmup_steps", warmup_steps, low=1)
        self.escape_after = check_whole("escape_after", escape_after, low=2)

    def allocate(self, num_layers: int) -> None:
        """Make the mean, and the sum and number of clipped norms in a row.

        Args:
            num_layers: Length of the vectors of norms.
        """
        # The mean is one of logarithms until the warm-up is over.
        self.add_state("mean", torch.zeros(num_layers, dtype=self.dtype, device=self.device))
        self.add_state("clipped_sum", torch.zeros(num_layers, dtype=self.dtype, device=self.device))
        self.add_state("clipped_in_row", torch.zeros(num_layers, dtype=torch.int64, device=self.device))

    def thresholds(self, norms: Tensor) -> Tensor:
        """The multiple of the mean.

        Args:
            norms: Shape (layers,); what they are does not matter.

        Returns:
            Shape (layers,), float32; infinity during the warm-up.
        """
        return torch.where(self.is_warm, self.k * self.mean, math.inf).float()

    @property
    def typical(self) -> Tensor:
        """The running mean, shape (layers,), float32."""
        return torch.where(self.is_warm, self.mean, math.nan).float()

    def enter(self, norms: Tensor, accepted: Tensor) -> None:
        """Move the mean by what is not clipped.

        Args:
            norms: Shape (layers,).
            accepted: Whose norm may enter, shape (layers,).
        """
        is_warm = self.is_warm
        count = self.num_accepted + 1
        warming = self.mean + (norms.log() - self.mean) / count
        warming = torch.where(count >= self.warmup_steps, warming.exp(), warming)
        is_clipped = is_warm & (norms > self.k * self.mean)
        in_row = torch.where(is_clipped, self.clipped_in_row + 1, 0)
        total = torch.where(is_clipped, self.clipped_sum + norms, 0)
        moved = torch.where(is_clipped, self.mean, self.decay * self.mean + (1 - self.decay) * norms)
        restarts = in_row >= self.escape_after
        mean = torch.where(is_warm, torch.where(restarts, total / self.escape_after, moved), warming)
        self.mean.copy_(torch.where(accepted, mean, self.mean))
        self.clipped_in_row.copy_(torch.where(accepted, torch.where(restarts, 0, in_row), self.clipped_in_row))
        self.clipped_sum.copy_(torch.where(accepted, torch.where(restarts, 0, total), self.clipped_sum))
