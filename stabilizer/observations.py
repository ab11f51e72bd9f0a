"""What a reinforcement-learning loop tells of a step beside its loss: sums that add up over micro-batches and ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from stabilizer.reduction import accumulation_dtype, rank, world_size
from stabilizer.rollout.mismatch import BOUNDS, MismatchSums, mismatch_statistics
from stabilizer.rollout.statistics import MismatchStatistics

__all__ = ["MAXIMA", "MEANS", "OF_SEQUENCES", "OF_TOKENS", "ObservationSums", "StepObservations"]

#: A mean of these weighs by tokens.
OF_TOKENS = ("entropy", "kl_ref", "clipped")
#: And of these by sequences.
OF_SEQUENCES = ("truncated", "completion_length", "policy_lag", "reward", "heldout_reward", "behaviour_is_old")
#: What there is a mean of; the last two are shares of groups.
MEANS = (*OF_TOKENS, *OF_SEQUENCES, "zero_variance_groups", "mid_pass_groups")
#: What there is a largest value of.
MAXIMA = ("policy_lag", "completion_length")

_NUM_SUMS, _NUM_MAXIMA = (piece.numel() for piece in (MismatchSums.empty().sums, MismatchSums.empty().maxima))


@dataclasses.dataclass(frozen=True, eq=False)
class ObservationSums:
    """What was observed, added up. `a + b` is that of both; always of the same length.

    Attributes:
        sums: How often something was observed; the sums of `MismatchSums`; of every mean the sum, the weight, and how
            many values were not finite.
        maxima: Those of `MismatchSums`, and of `MAXIMA`; minus infinity for nothing.
    """

    sums: Tensor
    maxima: Tensor

    @classmethod
    def empty(cls, device: torch.device) -> ObservationSums:
        """Those of nothing.

        Args:
            device: Where they are wanted.
        """
        sums = torch.zeros(1 + _NUM_SUMS + 3 * len(MEANS), dtype=accumulation_dtype(device), device=device)
        return cls(sums, torch.full_like(sums[: _NUM_MAXIMA + len(MAXIMA)], -torch.inf))

    def __add__(self, other: ObservationSums) -> ObservationSums:
        return ObservationSums(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def to(self, device: torch.device) -> ObservationSums:
        """The same elsewhere; waits only where the host itself is to read it.

        Args:
            device: Where.
        """
        dtype, is_late = accumulation_dtype(device), device.type != "cpu"
        return ObservationSums(*(piece.to(device, dtype, non_blocking=is_late) for piece in (self.sums, self.maxima)))

    def packed(self) -> Tensor:
        """This rank's part of a sum over ranks: the maxima have a slot for every rank.

        Returns:
            Shape (n,), n depending on the number of ranks alone.
        """
        slots = self.sums.new_zeros(self.maxima.numel(), world_size())
        slots[:, rank()] = self.maxima
        return torch.cat([self.sums, slots.reshape(-1)])

    @classmethod
    def unpacked(cls, vector: Tensor) -> ObservationSums:
        """Those of all ranks.

        Args:
            vector: The sum over ranks of what `packed` gave.
        """
        num = 1 + _NUM_SUMS + 3 * len(MEANS)
        return cls(vector[:num], vector[num:].reshape(_NUM_MAXIMA + len(MAXIMA), -1).amax(-1))


class StepObservations:
    """What was observed in a step, over all micro-batches and ranks. What nobody reads is not computed.

    Args:
        sums: Of all of it.
        bounds: As of `MismatchSums`.

    Example:
        >>> seen = StepObservations(ObservationSums.empty(torch.device("cpu")))
        >>> seen.num_calls.item(), seen.means["entropy"].item()
        (0.0, nan)
    """

    def __init__(self, sums: ObservationSums, *, bounds: tuple[float, float] = BOUNDS) -> None:
        self.sums, self.bounds = sums, bounds

    @property
    def num_calls(self) -> Tensor:
        """How often something was observed, shape ()."""
        return self.sums.sums[0]

    @functools.cached_property
    def mismatch(self) -> MismatchStatistics:
        """Of the log-probs; NaN, but for the counts, where none was finite."""
        sums, maxima = self.sums.sums[1 : 1 + _NUM_SUMS], self.sums.maxima[:_NUM_MAXIMA]
        return mismatch_statistics(MismatchSums(sums, maxima, self.bounds))

    @functools.cached_property
    def means(self) -> Mapping[str, Tensor]:
        """Name -> mean, of shape (); NaN for what was not observed."""
        totals, weights, _ = self.sums.sums[1 + _NUM_SUMS :].reshape(-1, 3).unbind(-1)
        return dict(zip(MEANS, (totals / weights).unbind(), strict=True))

    @functools.cached_property
    def maxima(self) -> Mapping[str, Tensor]:
        """Name -> largest value, of shape (); NaN for what was not observed."""
        found = self.sums.maxima[_NUM_MAXIMA:]
        return dict(zip(MAXIMA, torch.where(found.isinf(), torch.nan, found).unbind(), strict=True))

    @property
    def num_nonfinite(self) -> Tensor:
        """Values of signals that were not finite and left out, shape (); log-probs are counted in `mismatch`."""
        return self.sums.sums[1 + _NUM_SUMS :].reshape(-1, 3)[:, 2].sum()
