"""Data for trainings that get into trouble, the net that learns them, and how well it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["BATCH", "Line", "Loader", "Shuffled", "make_net", "test_loss"]

BATCH = 12


class Line(Dataset[tuple[Tensor, Tensor]]):
    """A smooth function of four numbers, with noise.

    Args:
        length: Number of samples.
        bad: Samples whose target is NaN.
    """

    def __init__(self, length: int, *, bad: Collection[int] = ()) -> None:
        generator = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(length, 4, generator=generator)
        noise = 0.3 * torch.randn(length, 1, generator=generator)
        self.targets = torch.tanh(self.inputs.sum(1, keepdim=True)) + noise
        self.targets[list(bad)] = math.nan

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample."""
        return self.inputs[index], self.targets[index]


class Shuffled(Sampler[int]):
    """Every rank's part of the samples, in another order each epoch (or always in the same one).

    Args:
        length: Number of samples.
        rank: This rank.
        num_ranks: Number of ranks.
        shuffles: Whether the order changes.
    """

    def __init__(self, length: int, *, rank: int = 0, num_ranks: int = 1, shuffles: bool = True) -> None:
        self.length, self.rank, self.num_ranks, self.shuffles, self.epoch = length, rank, num_ranks, shuffles, 0

    def set_epoch(self, epoch: int) -> None:
        """What hosts call."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of samples of this rank."""
        return self.length // self.num_ranks

    def __iter__(self) -> Iterator[int]:
        """Their numbers."""
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.length, generator=generator) if self.shuffles else torch.arange(self.length)
        return iter(order[self.rank :: self.num_ranks].tolist())


class Loader(DataLoader[Any]):
    """A loader that goes on from the middle of an epoch when it is given its state."""

    _num = _start = 0

    def __iter__(self) -> Iterator[Any]:
        """The batches from where the state says."""
        start, self._start = self._start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self._num = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"num": self._num % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self._start = state["num"]


def make_net() -> nn.Sequential:
    """4 -> 16 -> 1, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def test_loss(net: Callable[[Tensor], Tensor]) -> float:
    """The loss over samples that nobody trains on."""
    data = Line(512)
    with torch.no_grad():
        return float(nn.functional.mse_loss(net(data.inputs), data.targets))


test_loss.__test__ = False  # type: ignore[attr-defined]
