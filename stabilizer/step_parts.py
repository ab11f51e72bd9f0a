"""What a step's gradient is made of: one part a micro-batch and data-parallel rank, summed over ranks as numbers.

All that a noise scale needs of the parts are the squares of their norms and how many samples each of them is of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stabilizer.averaging import Averaging
from stabilizer.noise.estimates import PartWeights
from stabilizer.reduction import accumulation_dtype
from stabilizer.tally import MicroBatchLoss, as_number

__all__ = ["ONE_PART", "PartReduction", "StepParts"]

ONE_PART = (
    "one process with one micro-batch a step has no smaller batch to compare with; accumulate gradients over at least "
    "2 micro-batches, or train on several ranks"
)

# How many, how many of unknown norm or size, then of sizes b and losses l: sums of 1/b, b, b^2; l, l^2; l/b, (l/b)^2;
# and how many ranks have any.
_NUM_NUMBERS = 10


class StepParts:
    """The parts of one step over all ranks.

    Args:
        squares: Sums over parts of the square of each part's share in the step's gradient, by unit of the store, shape
            (units,).
        numbers: See `PartReduction`.
        whole: Squares of the norms of the step's own gradient, by unit, shape (units,).
        has_sizes: Whether this rank knows how many samples its parts are of; else each counts as one.
        reason: Why this rank does not know its parts; `None` if it does.

    Attributes:
        squares: As given.
        whole: As given.
        has_sizes: As given.
        reason: As given.
    """

    def __init__(
        self, squares: Tensor, numbers: Tensor, *, whole: Tensor, has_sizes: bool = True, reason: str | None = None
    ) -> None:
        self.squares, self.whole = squares, whole
        self.has_sizes, self.reason = has_sizes, reason
        self._numbers = numbers

    @property
    def num_parts(self) -> Tensor:
        """How many there are, shape ()."""
        return self._numbers[0]

    @property
    def num_ranks(self) -> Tensor:
        """How many data-parallel ranks they are on, shape ()."""
        return self._numbers[9]

    @property
    def is_known(self) -> Tensor:
        """Whether every part's norm and size is known, shape (), bool."""
        return self._numbers[1] == 0

    @property
    def size(self) -> Tensor:
        """Samples (or tokens) of all parts together, shape ()."""
        return self._numbers[3]

    def weights(self, *, is_sum: Tensor) -> PartWeights:
        """What parts weigh.

        Args:
            is_sum: Whether each part's loss is a sum over its samples (or divided by a number that is the same for all
                parts), shape (), bool; else it is their mean.
        """
        num, _, inverses, sizes, squares = self._numbers[:5].unbind()
        return PartWeights(
            torch.where(is_sum, sizes, num), torch.where(is_sum, squares, num), torch.where(is_sum, sizes, inverses)
        )

    def spreads(self) -> Tensor:
        """How far the parts' losses are from each other, as means and as sums: squares of coefficients of variation.

        Returns:
            Shape (2,): of l, and of l / b. Parts of one size spread alike; NaN where losses are not known.
        """
        num, means, mean_squares, sums, sum_squares = (self._numbers[0], *self._numbers[5:9].unbind())
        return torch.stack([num * mean_squares / means.square(), num * sum_squares / sums.square()]) - 1


class PartReduction:
    """Packs this rank's parts into numbers that are summed over ranks.

    Args:
        num_units: Of the store.

    Attributes:
        failure: What packing failed with; the step's parts are not known then, on no rank.
        reason: Why this rank does not know its parts; may be set before `pack`.

    Example:
        >>> reduction = PartReduction(1)
        >>> losses = [MicroBatchLoss(torch.tensor(2.0), (4.0,)), MicroBatchLoss(torch.tensor(2.0), (4.0,))]
        >>> squares = [torch.tensor([9.0]), torch.tensor([16.0])]
        >>> packed = reduction.pack(
        ...     squares, losses, column=0, averaging=Averaging(1.0), device=torch.device("cpu")
        ... )
        >>> parts = reduction.unpack(packed, whole=torch.tensor([49.0]))
        >>> float(parts.squares), float(parts.num_parts), float(parts.size), bool(parts.is_known)
        (25.0, 2.0, 8.0, True)
    """

    def __init__(self, num_units: int) -> None:
        self.num_numbers = num_units + _NUM_NUMBERS
        self._num_units = num_units
        self._has_sizes = True
        self.failure: Exception | None = None
        self.reason: str | None = None

    def pack(
        self,
        squares: Sequence[Tensor | None],
        losses: Sequence[MicroBatchLoss],
        *,
        column: int,
        averaging: Averaging | None,
        device: torch.device,
    ) -> Tensor:
        """This rank's part of the sums.

        Args:
            squares: Of every micro-batch, by unit of the store, shape (units,); `None` for one that no sensor saw.
            losses: Of the same micro-batches; none at all where nobody tells any, and each counts as one sample then.
            column: Which of their weights is their size.
            averaging: How ranks' gradients become the step's; `None` where there is nothing yet.
            device: Where the sums are wanted.

        Returns:
            Shape (n,), float64 where the device has it; n depends on the number of units alone.
        """
        packed = torch.zeros(self.num_numbers, dtype=accumulation_dtype(device), device=device)
        numbers = packed[self._num_units :]
        self._has_sizes = bool(losses)
        self.reason = self.reason or _problem(squares, losses, averaging)
        if averaging is None or self.reason is not None:
            numbers[1] = 1.0
            return packed
        try:
            # The other ranks wait in the collective: whatever happens here, this rank takes part with the same shape.
            for one in squares:
                packed[: self._num_units] += 0 if one is None else one.to(packed)
            packed[: self._num_units] /= averaging.divisor**2
            numbers.copy_(_numbers(len(squares), losses, column=column, like=packed) / averaging.num_shares)
        except Exception as error:
            self.failure = error
            packed = torch.zeros_like(packed)
            packed[self._num_units + 1] = 1.0
        return packed

    def unpack(self, sums: Tensor, *, whole: Tensor) -> StepParts:
        """Read the sums over all ranks.

        Args:
            sums: Of what `pack` gave.
            whole: See `StepParts`.
        """
        squares, numbers = sums.split([self._num_units, _NUM_NUMBERS])
        return StepParts(squares, numbers, whole=whole, has_sizes=self._has_sizes, reason=self.reason)


def _problem(
    squares: Sequence[Tensor | None], losses: Sequence[MicroBatchLoss], averaging: Averaging | None
) -> str | None:
    """Why the parts of this rank are not known."""
    if averaging is None or not squares:
        return "no micro-batch was told apart (a model that is compiled in place does not tell when it is called)"
    if any(one is None for one in squares):
        return (
            "the gradient of a micro-batch was not seen before it was reduced, or came without a forward of its own "
            "(of several optimizers only those that move after the same backward passes are looked at)"
        )
    if losses and len(losses) != len(squares):
        return f"{len(losses)} losses were seen for {len(squares)} micro-batches, so that their sizes are not known"
    return averaging.reason


def _numbers(num: int, losses: Sequence[MicroBatchLoss], *, column: int, like: Tensor) -> Tensor:
    """This rank's sums, shape (10,)."""
    if losses:
        sizes = torch.stack([as_number(piece.weights[column], like) for piece in losses])
        # What the parts' gradients are the gradients of.
        given = [piece.loss if piece.propagated is None else piece.propagated for piece in losses]
        values = torch.stack([as_number(loss, like) for loss in given])
    else:
        sizes = like.new_ones(num)
        values = like.new_full((num,), torch.nan)
    is_unknown = ~(sizes > 0) | ~torch.isfinite(sizes)
    per_size = values / sizes
    columns = [
        torch.ones_like(sizes),
        is_unknown.to(sizes.dtype),
        1 / sizes,
        sizes,
        sizes.square(),
        values,
        values.square(),
        per_size,
        per_size.square(),
    ]
    return torch.cat([torch.stack(columns).sum(1), like.new_ones(1)])
