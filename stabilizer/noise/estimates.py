"""What one step says: unbiased estimates of the squared norm of the true gradient, and of the samples' variance."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from stabilizer.reduction import accumulation_dtype

__all__ = ["Estimate", "PartWeights", "Reduction", "noise_estimate", "noise_estimate_equal", "part_weights"]

Reduction: TypeAlias = Literal["mean", "sum"]

# Below this share the parts are one part and a trace of others (or of rounding, where weights came in float32).
_SMALLEST_SPLIT = 1e-6


class Estimate(NamedTuple):
    """What one step says, of any shape (such as one entry a layer); NaN where it says nothing.

    Attributes:
        grad_sq: Unbiased estimate of |G|^2, G the expected gradient of the step; of one step it is often negative.
        trace: Unbiased estimate of tr(Sigma), Sigma the covariance of one sample's gradient, in the same units.
    """

    grad_sq: Tensor
    trace: Tensor


class PartWeights(NamedTuple):
    """What `noise_estimate` must know of the parts of a step; adds up over micro-batches and ranks, field by field.

    Attributes:
        weight_sum: Sum of u, the parts' weights.
        weight_squares: Sum of u^2.
        weight_squares_per_size: Sum of u^2 / b, b the parts' sizes.
    """

    weight_sum: Tensor
    weight_squares: Tensor
    weight_squares_per_size: Tensor

    @property
    def batch(self) -> Tensor:
        """How many samples, equally weighted, would make a gradient as noisy: all of them if the weights are fair."""
        return self.weight_sum.square() / self.weight_squares_per_size


def part_weights(sizes: Tensor, *, reduction: Reduction) -> PartWeights:
    """The weights of the parts of a step, from their sizes.

    Args:
        sizes: How many samples (or tokens) each part has, shape (parts,); a part without any does not count.
        reduction: "mean" if the loss is a mean over each part, and the step takes all parts alike; "sum" if it is a sum
            over each part, or a mean over all samples of the step (a part then weighs as much as it has samples).

    Returns:
        Sums over the parts, shape (), float64 where the device has it.

    Raises:
        ValueError: If the reduction is neither.

    Example:
        >>> weights = part_weights(torch.tensor([1, 3]), reduction="mean")
        >>> weights.batch  # fewer than 4: half of the gradient is one sample's
        tensor(3., dtype=torch.float64)
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: expected 'mean' or 'sum'")
    sizes = sizes.to(accumulation_dtype(sizes.device))
    weights = (sizes > 0).to(sizes.dtype) if reduction == "mean" else sizes
    squares = weights.square()
    return PartWeights(weights.sum(), squares.sum(), (squares / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)).sum())


def noise_estimate(
    small: Tensor,
    big: Tensor,
    *,
    weight_sum: Tensor | float,
    weight_squares: Tensor | float,
    weight_squares_per_size: Tensor | float,
) -> Estimate:
    """Estimates of one step from the norms of its parts and of their sum.

    A part is one micro-batch of one rank. The step's gradient is the sum of c = kappa u g over the parts, where g is
    the mean of the gradients of a part's b samples, u its weight, and kappa what everything is multiplied by (divided
    by the number of ranks, of micro-batches, of tokens; it need not be known). Then

        E[sum |c|^2] = kappa^2 (|G|^2 sum u^2   + tr(Sigma) sum u^2/b)
        E[|sum c|^2] = kappa^2 (|G|^2 (sum u)^2 + tr(Sigma) sum u^2/b)

    which is solved for both. All parts in one, or none: there is no second batch size, and both are NaN.

    From: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1, where all parts are
    equal; parts of any size and weight follow from the same two expectations.

    Args:
        small: Sum of the squared norms |c|^2 of the parts, before they are added up; any shape.
        big: Squared norm of the step's gradient, not clipped; the same shape.
        weight_sum: Sum of u; these three as of `part_weights`, numbers or tensors of shape ().
        weight_squares: Sum of u^2.
        weight_squares_per_size: Sum of u^2 / b.

    Returns:
        Of the step's own gradient, whose expectation is kappa sum(u) G: that is |G|^2 for a mean, B^2 |G|^2 for a sum
        of B samples. The ratio is the same. Float64 where the device has it.

    Example:
        >>> parts = torch.tensor([[3.0, 1.0], [1.0, 1.0]])  # mean gradients of 2 samples and of 6
        >>> step = (parts * torch.tensor([[2.0], [6.0]]) / 8)  # a mean over all 8 samples
        >>> small, big = step.square().sum(), step.sum(0).square().sum()
        >>> estimate = noise_estimate(small, big, **part_weights(torch.tensor([2, 6]), reduction="sum")._asdict())
        >>> estimate.grad_sq  # the only pair: their inner product
        tensor(4., dtype=torch.float64)
    """
    dtype = accumulation_dtype(big.device)
    small, big = small.to(dtype), big.to(dtype)
    total, squares, per_size = (
        value.to(dtype) if isinstance(value, Tensor) else big.new_full((), value)
        for value in (weight_sum, weight_squares, weight_squares_per_size)
    )
    total_squared = total.square()
    pairs = total_squared - squares
    # Not `<=`: weights that are no numbers say nothing either.
    pairs = pairs.masked_fill(~(pairs > _SMALLEST_SPLIT * total_squared), torch.nan)
    grad_sq = (big - small) * total_squared / pairs
    trace = (small * total_squared - big * squares) / pairs * (total_squared / per_size)
    return Estimate(grad_sq, trace)


def noise_estimate_equal(sq_small: Tensor, sq_big: Tensor, *, b_small: float, b_big: float) -> Estimate:
    """Estimates of one step from squared norms at two batch sizes, as in the paper.

    From: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1.

    Args:
        sq_small: Squared norm of a mean gradient of `b_small` samples, or the mean of several such; any shape.
        sq_big: Squared norm of the mean gradient of `b_big` samples; the same shape.
        b_small: Samples of each part.
        b_big: Samples of the step.

    Returns:
        Of the mean gradient, float64 where the device has it; NaN if the sizes are the same.

    Raises:
        ValueError: If a size is not above 0, or a part has more samples than the step.

    Example:
        >>> noise_estimate_equal(torch.tensor(13.5), torch.tensor(2.5625), b_small=8, b_big=64)
        Estimate(grad_sq=tensor(1., dtype=torch.float64), trace=tensor(100., dtype=torch.float64))
    """
    if not 0 < b_small <= b_big:
        raise ValueError(f"b_small={b_small!r}, b_big={b_big!r}: expected 0 < b_small <= b_big")
    num_parts = b_big / b_small
    return noise_estimate(
        sq_small / num_parts,
        sq_big,
        weight_sum=num_parts,
        weight_squares=num_parts,
        weight_squares_per_size=num_parts / b_small,
    )
