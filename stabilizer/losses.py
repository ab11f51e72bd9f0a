"""The loss of one step: what its micro-batches add up to over all ranks, in the one collective of the norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from stabilizer.reduction import accumulation_dtype, rank, world_size
from stabilizer.tally import MicroBatchLoss, Weight, as_number

__all__ = [
    "LossExtremes",
    "LossReduction",
    "StepLoss",
    "means",
]

_MAX_HELD = 64


@dataclasses.dataclass(frozen=True, eq=False)
class LossExtremes:
    """What the micro-batches of all ranks have shown since the extremes were asked for the last time.

    Attributes:
        minimum: Smallest finite loss, shape ().
        maximum: Largest finite loss, shape ().
        max_rank: The rank that it came from, shape ().
        num_nonfinite: Losses that were not finite, by rank, shape (ranks,).
    """

    minimum: Tensor
    maximum: Tensor
    max_rank: Tensor
    num_nonfinite: Tensor


class StepLoss:
    """The loss of one step over all ranks and micro-batches. What nobody reads is not computed.

    Args:
        numbers: Weighted sum of the losses, sum of the weights, how many losses were not finite, and how many there
            were; shape (4,), float64.
        extremes: Only at the steps at which somebody asked for them.
    """

    def __init__(self, numbers: Tensor, extremes: LossExtremes | None = None) -> None:
        self.numbers = numbers
        self.extremes = extremes

    @property
    def mean(self) -> Tensor:
        """Weighted mean, shape (), float64; NaN if a loss was not finite, or if there was none."""
        return means(self.numbers)

    @property
    def weight(self) -> Tensor:
        """Sum of the weights (tokens or samples), shape ()."""
        return self.numbers[1]

    @property
    def num_nonfinite(self) -> Tensor:
        """How many losses were not finite, shape ()."""
        return self.numbers[2]

    @property
    def num_seen(self) -> Tensor:
        """How many losses there were, shape ()."""
        return self.numbers[3]


def means(numbers: Tensor) -> Tensor:
    """The means of steps.

    Args:
        numbers: Of steps, shape (..., 4), as of `StepLoss`.

    Returns:
        Shape (...); NaN for steps with a loss that was not finite.

    Example:
        >>> means(torch.tensor([[6.0, 3.0, 0.0, 2.0], [6.0, 3.0, 1.0, 2.0]]))
        tensor([2., nan])
    """
    return (numbers[..., 0] / numbers[..., 1]).masked_fill(numbers[..., 2] > 0, torch.nan)


class LossReduction:
    """Packs losses into numbers that are summed over ranks, and reads the sums.

    Args:
        weights: As of the tally.

    Attributes:
        failure: What packing failed with; the step then has no loss from this rank.

    Example:
        >>> reduction = LossReduction(["samples"])
        >>> pieces = [MicroBatchLoss(torch.tensor(2.0), (1.0,)), MicroBatchLoss(torch.tensor(5.0), (2.0,))]
        >>> sums = reduction.pack(pieces, device=torch.device("cpu"), with_extremes=False)
        >>> reduction.unpack(sums, with_extremes=False)[0].mean
        tensor(4., dtype=torch.float64)
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)
        self.failure: Exception | None = None
        # Losses since the last exchange of extremes, and those of the step at hand, which may turn out to be none.
        self._held: list[Tensor] = []
        self._latest: Tensor | None = None
        self._is_sent = False  # whether the extremes of all of them have been exchanged at the step at hand

    def pack(self, pieces: Sequence[MicroBatchLoss], *, device: torch.device, with_extremes: bool) -> Tensor:
        """This rank's part of the sums.

        Args:
            pieces: Losses of the step, possibly none.
            device: Where the sums are wanted.
            with_extremes: Whether extremes are exchanged at this step; the same on every rank.

        Returns:
            Shape (n,); n depends on the arguments and the number of ranks alone.
        """
        empty = torch.zeros(0, dtype=accumulation_dtype(device), device=device)
        numbers, extremes = empty.new_zeros(2 * len(self.weights) + 2), _nothing(empty)
        self._commit()
        try:
            # The other ranks wait in the collective: whatever happens here, this rank takes part with the same shape.
            if pieces:
                numbers = self._sums(pieces, empty)
            if with_extremes:
                latest = [] if self._latest is None else [self._latest]
                extremes, self._is_sent = _extremes(torch.cat([empty, *self._held, *latest])), True
        except Exception as error:
            self.failure, self._held, self._latest = error, [], None
        if not with_extremes:
            return numbers
        slots = empty.new_zeros(3, world_size())
        slots[:, rank()] = extremes
        return torch.cat([numbers, slots.reshape(-1)])

    def drop(self) -> None:
        """Forget the losses of the step at hand: its optimizer has not moved."""
        self._latest, self._is_sent = None, False

    def unpack(self, sums: Tensor, *, with_extremes: bool) -> list[StepLoss]:
        """Read the sums over all ranks.

        Args:
            sums: Of what `pack` gave.
            with_extremes: As of `pack`.

        Returns:
            One for every kind of weight.
        """
        extremes, num = None, len(self.weights)
        end = 2 * num + 2
        if with_extremes:
            low, high, count_by_rank = sums[end:].reshape(3, -1).unbind()
            extremes = LossExtremes(low.amin(), high.amax(), high.argmax(), count_by_rank)
        if num == 1:
            return [StepLoss(sums[:end], extremes)]
        columns = [torch.stack([sums[n], sums[num + n], sums[end - 2], sums[end - 1]]) for n in range(num)]
        return [StepLoss(column, extremes) for column in columns]

    def _sums(self, pieces: Sequence[MicroBatchLoss], empty: Tensor) -> Tensor:
        losses = torch.stack([as_number(piece.loss, empty) for piece in pieces])
        columns = zip(*(piece.weights for piece in pieces), strict=True)
        weights = torch.stack([torch.stack([as_number(weight, empty) for weight in column]) for column in columns])
        is_bad = ~torch.isfinite(losses)
        weighted = weights * losses.masked_fill(is_bad, 0.0)
        others = torch.stack([is_bad.to(losses.dtype), torch.ones_like(losses)])
        numbers = torch.cat([weighted, weights, others]).sum(1)
        self._latest = losses
        return numbers

    def _commit(self) -> None:
        """The step before was one."""
        if self._is_sent:
            self._held, self._latest, self._is_sent = [], None, False
        if self._latest is not None:
            self._held.append(self._latest)
            self._latest = None
        if len(self._held) == _MAX_HELD:
            self._held = [torch.cat(self._held)]


def _extremes(losses: Tensor) -> Tensor:
    """Smallest and largest finite loss (infinities if there is none) and how many are not finite, shape (3,)."""
    is_bad = ~torch.isfinite(losses)
    low, high, none = _nothing(losses).unbind()
    low = torch.cat([losses.masked_fill(is_bad, torch.inf), low.reshape(1)]).amin()
    high = torch.cat([losses.masked_fill(is_bad, -torch.inf), high.reshape(1)]).amax()
    return torch.stack([low, high, none + is_bad.sum()])


def _nothing(like: Tensor) -> Tensor:
    return torch.stack([like.new_full((), torch.inf), like.new_full((), -torch.inf), like.new_zeros(())])
