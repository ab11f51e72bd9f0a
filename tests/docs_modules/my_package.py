"""What the pages call the reader's own package."""

from __future__ import annotations

import torch
from torch import Tensor

from stabilizer.thresholds import ThresholdRule


class MyRule(ThresholdRule):
    """A multiple of the largest norm so far."""

    warmup_steps = 1

    def __init__(self, *, factor: float = 2.0) -> None:
        self.factor = factor

    def allocate(self, num_layers: int) -> None:
        self.add_state("largest", torch.zeros(num_layers, dtype=self.dtype))

    def thresholds(self, norms: Tensor) -> Tensor:
        return torch.where(self.is_warm, self.factor * self.largest, torch.inf).float()

    def enter(self, norms: Tensor, accepted: Tensor) -> None:
        self.largest.copy_(torch.where(accepted, torch.maximum(self.largest, norms), self.largest))
