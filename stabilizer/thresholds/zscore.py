"""A running mean and deviation of the norms, and how many deviations a norm may be above: ZClip."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from stabilizer.thresholds.arguments import check_number, check_whole, closest
from stabilizer.thresholds.rule import ThresholdRule

__all__ = ["ClipTo", "ZScore"]

#: What a spike is clipped to.
ClipTo = Literal["adaptive", "mean", "bound"]

_EPSILON = 1e-6


class ZScore(ThresholdRule):
    """Norms more than z deviations above the running mean are spikes.

    From: Kumar, Owen, Chowdhury, Güra, "ZClip: Adaptive Spike Mitigation for LLM Pre-Training" (2025). A spike of s
    deviations is clipped to mean + z^2 / s deviations: the higher it is, the closer to the mean. What enters for a
    spike is the clipped value. Unlike there, a norm that is not finite, or 0, leaves no trace.

    Mean and deviation start from those of the warm-up, which one outlier spoils, and a norm that stays two or three
    times higher is clipped for good: `robust_log` has neither fault.

    Args:
        z: How many deviations above the mean a norm may be.
        decay: Of mean and variance, a step.
        warmup_steps: Norms before the first threshold.
        clip_to: What a spike is clipped to: `"adaptive"` as above, `"mean"`, or `"bound"`, mean + z deviations.
        clip_factor: What a spike is clipped to is multiplied by this; with `"adaptive"` only.
        skip_spikes: Whether spikes leave mean and variance alone.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> rule = ZScore(warmup_steps=2)
        >>> rule.start(1, device="cpu")
        >>> for norm in (0.9, 1.1):
        ...     rule.update(torch.tensor([norm]))
        >>> rule.thresholds(torch.tensor([2.0])), rule.thresholds(torch.tensor([1.2]))
        (tensor([1.0625]), tensor([1.2500]))
    """

    name: ClassVar[str] = "zscore"

    mean: Tensor
    variance: Tensor

    def __init__(
        self,
        z: float = 2.5,
        *,
        decay: float = 0.97,
        warmup_steps: int = 25,
        clip_to: ClipTo = "adaptive",
        clip_factor: float = 1.0,
        skip_spikes: bool = False,
    ) -> None:
        self.k = self.z = check_number("z", z, above=0)
        self.decay = check_number("decay", decay, above=0, below=1)
        self.warmup_steps = check_whole("warmup_steps", warmup_steps, low=2)
        choices = get_args(ClipTo)
        if clip_to not in choices:
            raise ValueError(f"clip_to={clip_to!r}: expected one of {', '.join(choices)}{closest(clip_to, choices)}")
        self.clip_to = clip_to
        self.clip_factor = check_number("clip_factor", clip_factor, above=0)
        if not isinstance(skip_spikes, bool):
            raise ValueError(f"skip_spikes={skip_spikes!r}: expected true or false")
        self.skip_spikes = skip_spikes

    def allocate(self, num_layers: int) -> None:
        """Make mean and variance.

        Args:
            num_layers: Length of the vectors of norms.
        """
        self.add_state("mean", torch.zeros(num_layers, dtype=self.dtype, device=self.device))
        self.add_state("variance", torch.zeros(num_layers, dtype=self.dtype, device=self.device))

    def thresholds(self, norms: Tensor) -> Tensor:
        """What a spike is clipped to; mean + z deviations where there is none.

        Args:
            norms: Shape (layers,).

        Returns:
            Shape (layers,), float32; infinity during the warm-up.
        """
        _, target = self._spikes(norms.to(self.dtype))
        return torch.where(self.is_warm, target, math.inf).float()

    @property
    def typical(self) -> Tensor:
        """The running mean, shape (layers,), float32."""
        return torch.where(self.is_warm, self.mean, math.nan).float()

    def enter(self, norms: Tensor, accepted: Tensor) -> None:
        """Move mean and variance, by the clipped value of a spike.

        Args:
            norms: Shape (layers,).
            accepted: Whose norm may enter, shape (layers,).
        """
        is_warm = self.is_warm
        is_spike, target = self._spikes(norms)
        values = torch.where(is_warm & is_spike, target, norms)
        # The warm-up weighs all norms alike: a running mean and (population) variance, by Welford.
        step = torch.where(is_warm, 1 - self.decay, 1 / (self.num_accepted + 1).to(self.dtype))
        distance = values - self.mean
        mean = self.mean + step * distance
        after = values - mean
        # ZClip squares the distance from the mean that has just moved. In the warm-up, Welford: from both means.
        square = after * torch.where(is_warm, after, distance)
        variance = self.variance + step * (square - self.variance)
        moves = accepted & ~(is_warm & is_spike) if self.skip_spikes else accepted
        self.mean.copy_(torch.where(moves, mean, self.mean))
        self.variance.copy_(torch.where(moves, variance, self.variance))

    def _spikes(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        std = self.variance.sqrt()
        score = (norms - self.mean) / (std + _EPSILON)
        is_spike = score > self.z
        bound = self.mean + self.z * (std + _EPSILON)
        if self.clip_to == "mean":
            target = self.mean
        elif self.clip_to == "bound":
            target = self.mean + self.z * std
        else:
            target = self.clip_factor * (self.mean + self.z**2 / score * std)
        return is_spike, torch.where(is_spike, target, bound)
