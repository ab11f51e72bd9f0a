"""The default rule: the logarithm of a norm against a running level and width, both from norms that are no spikes."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from stabilizer.thresholds.arguments import check_number, check_whole
from stabilizer.thresholds.rule import ThresholdRule

__all__ = ["RobustLog"]

# Of the share of outliers: about the last so many norms, and what is too much among them. 30 of 100 is not.
_MEMORY = 256
_MAX_SHARE = 0.14
# How many deviations beyond the nearer quartile of the recent norms the level must be to have been left behind: 1.5
# from their median, if they are normal.
_MARGIN = 0.83
# Standard deviation over median absolute deviation of a normal distribution.
_NORMAL = 1.4826


class RobustLog(ThresholdRule):
    """A multiple of the running level, wide enough for how much the logarithm of the norm varies.

    The threshold of a layer is exp(level + max(k * width, ln min_ratio)): norms of one layer vary by a factor, about
    alike at any scale. The warm-up takes level and width from the median and the median absolute deviation (of the last
    `escape_after` norms, if the warm-up is longer), so that outliers in it do no harm. Afterwards a norm that is
    farther from the level than the threshold, above or below, is an outlier; the others move level and variance as
    exponential moving averages, and outliers never do. There are three ways out, for when the run has changed:

    - `escape_after` outliers in a row: level and width start anew from the median and deviation of these;
    - the level lies outside of the middle half of the last norms, hardly any of which is an outlier (a shift that is
      smaller than the reach, which would otherwise widen it for a hundred steps): the same;
    - more than 14 % of the last 256 norms or so are outliers: the width is doubled, once.

    A spike is cut to the threshold, 30 of them in 100 steps leave it where it is, and a layer that has once had a
    threshold is never without one.

    From: median and median absolute deviation for scale, Hampel, "The influence curve and its role in robust
    estimation" (1974); the rest is our own, measured in benchmarks/thresholds.py.

    Args:
        k: How many widths (standard deviations of the logarithm) above the level the threshold is.
        min_ratio: The threshold is at least this many times the level.
        sigma_min: Smallest width.
        decay: Of the running level and variance, a step.
        warmup_steps: Norms before the first threshold.
        escape_after: After so many outliers in a row the level is where they are.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> rule = RobustLog(warmup_steps=3)
        >>> rule.start(1, device="cpu")
        >>> for norm in (0.2, 0.21, 0.19):
        ...     rule.update(torch.tensor([norm]))
        >>> rule.thresholds(torch.tensor([53.7]))
        tensor([0.4000])
    """

    name: ClassVar[str] = "robust_log"
    keeps_outliers_apart: ClassVar[bool] = True

    running: Tensor
    recent: Tensor

    def __init__(
        self,
        k: float = 5.0,
        *,
        min_ratio: float = 2.0,
        sigma_min: float = 0.05,
        decay: float = 0.98,
        warmup_steps: int = 50,
        escape_after: int = 32,
    ) -> None:
        self.k = check_number("k", k, above=0)
        self.min_ratio = check_number("min_ratio", min_ratio, above=1)
        self.sigma_min = check_number("sigma_min", sigma_min, above=0)
        self.decay = check_number("decay", decay, above=0, below=1)
        self.warmup_steps = check_whole("warmup_steps", warmup_steps, low=2)
        self.escape_after = check_whole("escape_after", escape_after, low=2)

    def allocate(self, num_layers: int) -> None:
        """Make the running values and the recent logarithms.

        Args:
            num_layers: Length of the vectors of norms.
        """
        size = min(self.warmup_steps, self.escape_after)
        # Rows: level, variance, reach (all of logarithms), outliers in a row, share of the others. Five in one tensor
        # are written at once.
        self.add_state("running", torch.zeros(5, num_layers, dtype=self.dtype, device=self.device))
        # The newest last.
        self.add_state("recent", torch.zeros(size, num_layers, dtype=self.dtype, device=self.device))

    def thresholds(self, norms: Tensor) -> Tensor:
        """Level and reach, as a norm.

        Args:
            norms: Shape (layers,); what they are does not matter.

        Returns:
            Shape (layers,), float32; infinity during the warm-up.
        """
        level, _, reach, _, _ = self.running.unbind()
        return (level + reach).exp().masked_fill(self.num_accepted < self.warmup_steps, math.inf).float()

    @property
    def typical(self) -> Tensor:
        """The running level, a geometric mean that starts from a median; shape (layers,), float32."""
        return self.running[0].exp().masked_fill(~self.is_warm, math.nan).float()

    def enter(self, norms: Tensor, accepted: Tensor) -> None:
        """Let norms that are no outliers move level and width; start anew where outliers have become the rule.

        Args:
            norms: Shape (layers,).
            accepted: Whose norm may enter, shape (layers,).
        """
        logs = norms.log()
        recent = torch.cat([self.recent[1:], logs.unsqueeze(0)])
        level, variance, reach, in_row, usual_share = self.running.unbind()
        distance = logs - level
        is_usual = distance.abs() <= reach
        in_row = (in_row + 1).masked_fill(is_usual, 0)
        weight = is_usual.to(self.dtype)
        usual_share = usual_share.lerp(weight, 1 / _MEMORY)
        is_crowded = usual_share < 1 - _MAX_SHARE

        # Before the first threshold all of this is overwritten by what the end of the warm-up finds.
        is_first = self.num_accepted == self.warmup_steps - 1
        quartiles, centre, spread = _robust_statistics(recent)
        restarts = is_first | (in_row >= self.escape_after) | _has_moved(quartiles - level, spread, reach)
        moves = weight * (1 - self.decay)
        jumps = restarts | is_crowded
        width = torch.where(restarts, spread, reach * (2 / self.k))
        variance = torch.where(jumps, width.square(), variance.lerp(distance.square(), moves))
        running = [
            torch.where(restarts, centre, level.lerp(logs, moves)),
            variance,
            (variance.sqrt() * self.k).clamp(min=max(self.k * self.sigma_min, math.log(self.min_ratio))),
            in_row.masked_fill(restarts, 0),
            usual_share.masked_fill(jumps, 1),
        ]
        torch.where(accepted, recent, self.recent, out=self.recent)
        torch.where(accepted, torch.stack(running), self.running, out=self.running)


def _robust_statistics(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lower and upper quartile, shape (2, layers), median and deviation (from the median one) of each column."""
    num = len(values)
    quarter, middle = (num - 1) // 4, (num - 1) // 2
    ordered = values.sort(0).values
    centre = ordered[middle]
    deviation = (values - centre).abs().sort(0).values[num // 2]
    return ordered[quarter : num - quarter : num - 1 - 2 * quarter], centre, deviation * _NORMAL


def _has_moved(quartiles: Tensor, spread: Tensor, reach: Tensor) -> Tensor:
    """Whether the level, from which the quartiles are measured, lies well outside of them but within reach of both."""
    low, high = quartiles.unbind()
    nearest, farthest = torch.maximum(low, -high), torch.maximum(high, -low)
    # A quarter of spikes puts one quartile out of reach, and fewer do not move the quartiles far enough.
    return (nearest > _MARGIN * spread) & (farthest < reach)
