"""Oracles of the threshold rules: one layer, plain float64, every history kept whole.

They know nothing of the package. Each takes the norms of a run and gives the threshold that every one of them meets,
infinity where there is none. Norms that are not finite, or 0, are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["mean_multiple", "quantile", "robust_log", "second_moment", "zscore"]


def _is_good(norm: float) -> bool:
    return math.isfinite(norm) and norm > 0


def robust_log(
    norms: Sequence[float],
    *,
    k: float = 5.0,
    min_ratio: float = 2.0,
    sigma_min: float = 0.05,
    decay: float = 0.98,
    warmup_steps: int = 50,
    escape_after: int = 32,
) -> list[float]:
    """exp(level + max(k sigma, ln min_ratio)) of the logarithms, with the three ways out.

    Args:
        norms: Of the run.
        k: Deviations.
        min_ratio: Smallest multiple of the level.
        sigma_min: Smallest deviation.
        decay: Of level and variance.
        warmup_steps: Norms before the first threshold.
        escape_after: Outliers in a row.

    Example:
        >>> robust_log([1.0, 1.0, 1.0], warmup_steps=2)
        [inf, inf, 2.0]
    """
    size = min(warmup_steps, escape_after)
    logs: list[float] = []
    level, sigma, in_row, share = math.nan, math.nan, 0, 1.0
    result = []
    for norm in norms:
        reach = max(k * max(sigma, sigma_min), math.log(min_ratio))
        is_warm = len(logs) >= warmup_steps
        result.append(math.exp(level + reach) if is_warm else math.inf)
        if not _is_good(norm):
            continue
        x = math.log(norm)
        logs.append(x)
        last = sorted(logs[-size:])
        # Of the two middle ones the lower; of the middle deviations the upper.
        median = last[(len(last) - 1) // 2]
        mad = 1.4826 * sorted(abs(value - median) for value in last)[len(last) // 2]
        low, high = last[(len(last) - 1) // 4], last[len(last) - 1 - (len(last) - 1) // 4]
        if not is_warm:
            level, sigma, in_row, share = median, mad, 0, 1.0
            continue
        is_outlier = abs(x - level) > reach
        in_row = in_row + 1 if is_outlier else 0
        share += (float(not is_outlier) - share) / 256
        is_beside = low - level > 0.83 * mad or level - high > 0.83 * mad
        is_within = abs(low - level) < reach and abs(high - level) < reach
        if in_row >= escape_after or (is_beside and is_within):
            level, sigma, in_row, share = median, mad, 0, 1.0
            continue
        if not is_outlier:
            sigma = math.sqrt(decay * sigma**2 + (1 - decay) * (x - level) ** 2)
            level = decay * level + (1 - decay) * x
        if share < 1 - 0.14:
            sigma, share = 2 * reach / k, 1.0
    return result


def mean_multiple(
    norms: Sequence[float], *, k: float = 5.0, decay: float = 0.98, warmup_steps: int = 50, escape_after: int = 32
) -> list[float]:
    """A multiple of the running mean of the norms that were not clipped; from a geometric mean, or that of the clipped.

    Args:
        norms: Of the run.
        k: The multiple.
        decay: Of the mean.
        warmup_steps: Norms before the first threshold.
        escape_after: Clipped norms in a row.

    Example:
        >>> mean_multiple([1.0, 1.0, 1.0], warmup_steps=2)
        [inf, inf, 5.0]
    """
    first: list[float] = []
    clipped: list[float] = []
    mean = math.nan
    result = []
    for norm in norms:
        is_warm = len(first) == warmup_steps
        result.append(k * mean if is_warm else math.inf)
        if not _is_good(norm):
            continue
        if not is_warm:
            first.append(norm)
            mean = math.exp(sum(map(math.log, first)) / len(first))
        elif norm > k * mean:
            clipped.append(norm)
            if len(clipped) == escape_after:
                mean, clipped = sum(clipped) / escape_after, []
        else:
            mean, clipped = decay * mean + (1 - decay) * norm, []
    return result


def quantile(
    norms: Sequence[float], *, q: float = 0.9, window: int = 1000, warmup_steps: int = 50, include_current: bool = False
) -> list[float]:
    """The linear quantile of the last norms.

    Args:
        norms: Of the run.
        q: The quantile.
        window: How many.
        warmup_steps: Norms before the first threshold.
        include_current: Whether the norm at hand is one of them.

    Example:
        >>> quantile([1.0, 3.0, 9.0], q=0.5, warmup_steps=2)
        [inf, inf, 2.0]
    """
    history: list[float] = []
    result = []
    for norm in norms:
        values = [*history, norm] if include_current and _is_good(norm) else history
        values = values[-window:]
        result.append(float(np.quantile(values, q)) if len(values) >= warmup_steps else math.inf)
        if _is_good(norm):
            history.append(norm)
    return result


def zscore(norms: Sequence[float], *, z: float = 2.5, decay: float = 0.97, warmup_steps: int = 25) -> list[float]:
    """ZClip's: mean + z^2 / score deviations for a spike, else mean + z deviations; the clipped value enters.

    Args:
        norms: Of the run.
        z: Largest score.
        decay: Of mean and variance.
        warmup_steps: Norms before the first threshold.

    Example:
        >>> zscore([1.0, 3.0, 4.0], warmup_steps=2)[2]
        4.5000025
    """
    first: list[float] = []
    mean = variance = math.nan
    result = []
    for norm in norms:
        if len(first) < warmup_steps:
            result.append(math.inf)
            if _is_good(norm):
                first.append(norm)
                mean, variance = float(np.mean(first)), float(np.var(first))
            continue
        std = math.sqrt(variance)
        score = (norm - mean) / (std + 1e-6)
        is_spike = score > z
        result.append(mean + z**2 / score * std if is_spike else mean + z * (std + 1e-6))
        if _is_good(norm):
            value = result[-1] if is_spike else norm
            mean = decay * mean + (1 - decay) * value
            variance = decay * variance + (1 - decay) * (value - mean) ** 2
    return result


def second_moment(norms: Sequence[float], *, beta2: float) -> list[float]:
    """Adam's second moment, summed over all elements, after each step: v = beta2 v + (1 - beta2) |g|^2.

    It starts at the mean square of all but the last norm, where a long run has brought it.

    Args:
        norms: Of the gradients that the optimizer gets.
        beta2: Its decay.

    Example:
        >>> second_moment([1.0, 1.0, 3.0], beta2=0.5)
        [1.0, 1.0, 5.0]
    """
    v = float(np.mean(np.square(norms[:-1])))
    result = []
    for norm in norms:
        v = beta2 * v + (1 - beta2) * norm**2
        result.append(v)
    return result
