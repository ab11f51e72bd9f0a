"""States of callbacks: compared bit for bit, and copied in the middle of a run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks import StabilizerCallback, StepContext

__all__ = ["Copier", "same"]


class Copier(StabilizerCallback):
    """Pickles and copies another callback in the middle of a run; keeps the states of both copies beside its own.

    Args:
        target: The other one.
    """

    def __init__(self, target: StabilizerCallback) -> None:
        super().__init__(strict=True)
        self.target = target
        self.states: list[tuple[Any, Any, Any]] = []

    def on_step_end(self, context: StepContext) -> None:
        """Copy in both ways."""
        copies = copy.deepcopy(self.target), pickle.loads(pickle.dumps(self.target))
        first, second = (made.state_dict() for made in copies)
        self.states.append((self.target.state_dict(), first, second))


def same(first: Any, second: Any) -> bool:
    """Whether two states are equal, bit for bit.

    Args:
        first: Plain types and tensors.
        second: Likewise.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        is_alike = first.dtype == second.dtype and first.shape == second.shape
        return is_alike and torch.equal(first.isnan(), second.isnan()) and torch.equal(_finite(first), _finite(second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def _finite(value: Tensor) -> Tensor:
    return value.nan_to_num(0.0, torch.inf, -torch.inf) if value.is_floating_point() else value
