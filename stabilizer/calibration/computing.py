"""Thresholds from the distribution of recorded norms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from stabilizer.calibration.mistakes import CalibrationError

__all__ = [
    "DEFAULT_SHARE_SKIPPED",
    "DEFAULT_STEPS_SKIPPED",
    "MIN_POINTS",
    "MIN_RATIO",
    "SeriesThreshold",
    "calibrate_series",
    "num_skipped_steps",
    "quantile_of",
    "round_up",
]

#: Fewer norms than this say nothing of their largest ones.
MIN_POINTS = 100
#: A fixed threshold under this many medians clips steps that are none too large, which biases Adam's moments.
MIN_RATIO = 3.0
#: What is left out as warm-up unless the user says otherwise: this share of the steps, and at least as many steps.
DEFAULT_SHARE_SKIPPED, DEFAULT_STEPS_SKIPPED = 0.1, 100


@dataclasses.dataclass(frozen=True)
class SeriesThreshold:
    """A threshold, and the norms that it comes from. All norms in units of the gradient norm.

    Attributes:
        name: Of the layer, or "total".
        steps: Of the norms that count.
        norms: Those: finite, above zero, after the warm-up.
        warmup: The norms before them, by step.
        num_nonfinite: Left out as NaN or infinite.
        num_zero: Left out as zero or below.
        median: Of the norms.
        quantile: Of the norms, the chosen one.
        threshold: The larger of quantile x margin and 3 x median, rounded up to 4 digits.
        share_clipped: Share of the norms that are over the threshold.
    """

    name: str
    steps: list[int]
    norms: list[float]
    warmup: dict[int, float]
    num_nonfinite: int
    num_zero: int
    median: float
    quantile: float
    threshold: float
    share_clipped: float

    @property
    def k(self) -> float:
        """The threshold in medians."""
        return self.threshold / self.median


def num_skipped_steps(steps: Sequence[int]) -> int:
    """How many of the first steps are left out as warm-up by default: 10 % of the run, and at least 100.

    Args:
        steps: Recorded ones, in any order.

    Example:
        >>> num_skipped_steps(range(20_000)), num_skipped_steps(range(500))
        (2000, 100)
    """
    length = max(steps) - min(steps) + 1 if steps else 0
    return max(math.ceil(DEFAULT_SHARE_SKIPPED * length), DEFAULT_STEPS_SKIPPED)


def calibrate_series(
    name: str, series: Mapping[int, float], *, quantile: float, margin: float, first_step: int
) -> SeriesThreshold:
    """Compute a threshold: max(quantile x margin, 3 x median).

    A norm over it is rarer than all that the run had, by a margin. The second part keeps it from cutting into healthy
    steps where norms hardly vary: a fixed threshold under 3 times the median shrinks many steps a little, which biases
    both moments of Adam.

    Args:
        name: Of the layer, or "total".
        series: Norms by step.
        quantile: Between 0 and 1.
        margin: What the quantile is multiplied by.
        first_step: Earlier steps are the warm-up, which does not count.

    Returns:
        The threshold and where it comes from.

    Raises:
        CalibrationError: If fewer than 100 norms count, or they are all equal.

    Example:
        >>> found = calibrate_series(
        ...     "total", dict(enumerate([1.0, 2.0] * 100)), quantile=0.999, margin=2.0, first_step=0
        ... )
        >>> found.median, found.quantile, found.threshold, found.k
        (1.5, 2.0, 4.5, 3.0)
    """
    counted = {step: norm for step, norm in sorted(series.items()) if step >= first_step}
    good = {step: norm for step, norm in counted.items() if math.isfinite(norm) and norm > 0}
    num_nonfinite = sum(not math.isfinite(norm) for norm in counted.values())
    num_zero = len(counted) - len(good) - num_nonfinite
    if counted and num_zero == len(counted):
        raise CalibrationError(f"{name}: all {num_zero} norms are zero")
    if len(good) < MIN_POINTS:
        raise CalibrationError(
            f"{name}: {len(good)} norms from step {first_step} on, too few to tell their largest (at least "
            f"{MIN_POINTS}): record a longer run, or leave fewer steps out with --skip-steps"
            + (f"; {num_nonfinite} not finite and {num_zero} zeros do not count" if num_nonfinite + num_zero else "")
        )
    ordered = sorted(good.values())
    if ordered[0] == ordered[-1]:
        raise CalibrationError(f"{name}: all {len(ordered)} norms are {ordered[0]:.6g}: that is no gradient norm")
    median, high = quantile_of(ordered, 0.5), quantile_of(ordered, quantile)
    threshold = round_up(max(high * margin, MIN_RATIO * median))
    return SeriesThreshold(
        name=name,
        steps=list(good),
        norms=list(good.values()),
        warmup={step: norm for step, norm in sorted(series.items()) if step < first_step},
        num_nonfinite=num_nonfinite,
        num_zero=num_zero,
        median=median,
        quantile=high,
        threshold=threshold,
        share_clipped=sum(norm > threshold for norm in ordered) / len(ordered),
    )


def quantile_of(ordered: Sequence[float], share: float) -> float:
    """A quantile, between two values in proportion (Hyndman and Fan, 1996, definition 7; numpy's and torch's default).

    Args:
        ordered: The values, rising, at least one.
        share: Between 0 and 1.

    Example:
        >>> quantile_of([1.0, 2.0, 4.0], 0.75)
        3.0
    """
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def round_up(value: float, *, digits: int = 4) -> float:
    """The next number with few digits, for people to read; never a smaller one.

    Args:
        value: Above 0.
        digits: How many.

    Example:
        >>> round_up(3.14159), round_up(2.5)
        (3.142, 2.5)
    """
    exponent = math.floor(math.log10(value)) - digits + 1
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded < value:
        rounded = float(f"{rounded + 10.0**exponent:.{digits - 1}e}")
    return rounded
