"""The published way to the token behind a gradient spike: what the search of the package is compared with.

Our own plain version of GradLoc (Tencent Hunyuan): forward and backward are run again with edited loss masks, first for
each micro-batch, then for halves of the ranks, then for halves of the tokens, and once more for each micro-batch to
rebuild the gradient without the token.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Located", "PublishedSearch", "num_published_passes"]


@dataclasses.dataclass(frozen=True)
class Located:
    """What the search has found.

    Attributes:
        micro_batch: Its number in the step.
        rank: Whose part of it.
        token: Flat number in that part.
        num_passes: Forwards and backwards of one micro-batch on all ranks.
        seconds: Wall-clock time.
    """

    micro_batch: int
    rank: int
    token: int
    num_passes: int
    seconds: float


def num_published_passes(num_micro_batches: int, num_ranks: int, num_tokens: int) -> int:
    """How many passes the published search takes.

    Args:
        num_micro_batches: Of a step.
        num_ranks: Of the run.
        num_tokens: Of one rank's part of a micro-batch.

    Example:
        >>> num_published_passes(4, 2, 4 * 512)
        32
    """
    return 2 * num_micro_batches + 2 * _num_levels(num_ranks) + 2 * _num_levels(num_tokens)


class PublishedSearch:
    """Bisects by edited loss masks: micro-batch, rank, token.

    Both halves are run every time, and the search goes on with the one of the larger norm: it follows one micro-batch,
    one rank and one token. Of numbers that are no powers of two some halves are empty and run all the same, since every
    rank has to take part in as many passes.

    Args:
        run: Forward and backward of one micro-batch on all ranks. Takes its number, and which tokens count in the loss,
            shape (ranks, tokens), bool; returns the norm of the reduced gradient.
        num_micro_batches: Of a step.
        num_ranks: Of the run.
        num_tokens: Of one rank's part of a micro-batch.

    Example:
        >>> def run(micro_batch, mask):
        ...     return 100.0 if micro_batch == 2 and mask[1, 5] else 1.0
        >>> located = PublishedSearch(run, num_micro_batches=4, num_ranks=2, num_tokens=8).search()
        >>> located.micro_batch, located.rank, located.token, located.num_passes
        (2, 1, 5, 16)
    """

    def __init__(
        self, run: Callable[[int, Tensor], float], *, num_micro_batches: int, num_ranks: int, num_tokens: int
    ) -> None:
        self._run = run
        self._num_micro_batches, self._shape = num_micro_batches, (num_ranks, num_tokens)
        self._num_passes = 0

    def search(self) -> Located:
        """Search a step whose norm is too large, and rebuild its gradient.

        Returns:
            What was found, in `num_published_passes` passes.
        """
        self._num_passes, start = 0, time.perf_counter()
        everything = self._mask(slice(None), slice(None))
        norms = [self._pass(micro_batch, everything) for micro_batch in range(self._num_micro_batches)]
        # A norm that is not finite is the largest.
        worst = max(range(len(norms)), key=lambda number: _rank_of(norms[number]))
        num_ranks, num_tokens = self._shape
        rank = self._halve(worst, num_ranks, lambda part: self._mask(part, slice(None)))
        token = self._halve(worst, num_tokens, lambda part: self._mask(slice(rank, rank + 1), part))
        for micro_batch in range(self._num_micro_batches):
            kept = everything.clone()
            kept[rank, token] = micro_batch != worst
            self._pass(micro_batch, kept)
        return Located(worst, rank, token, self._num_passes, time.perf_counter() - start)

    def _halve(self, micro_batch: int, num: int, mask_of: Callable[[slice], Tensor]) -> int:
        low, size = 0, 1 << _num_levels(num)
        while size > 1:
            size //= 2
            halves = [self._pass(micro_batch, mask_of(slice(start, start + size))) for start in (low, low + size)]
            low += size * (_rank_of(halves[1]) > _rank_of(halves[0]))
        return low

    def _mask(self, ranks: slice, tokens: slice) -> Tensor:
        mask = torch.zeros(self._shape, dtype=torch.bool)
        mask[ranks, tokens] = True
        return mask

    def _pass(self, micro_batch: int, mask: Tensor) -> float:
        self._num_passes += 1
        return self._run(micro_batch, mask)


def _num_levels(num: int) -> int:
    return math.ceil(math.log2(num))


def _rank_of(norm: float) -> float:
    return norm if math.isfinite(norm) else math.inf
