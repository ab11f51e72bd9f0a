"""Oracle of the loss detectors: float64, every history kept whole and sorted anew at each step.

It knows nothing of the package. Written after docs/callbacks/loss_mean_var.md, as slowly as it reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["Found", "detections", "mad_sigma", "tail_quantile"]


@dataclasses.dataclass(frozen=True)
class Found:
    """What is found at a step."""

    kind: str
    step: int
    value: float
    median: float
    sigma: float
    score: float
    limit: float
    first_step: int


def mad_sigma(values: Sequence[float]) -> float:
    """Median absolute deviation as a standard deviation; a higher quantile of the deviations where it is 0.

    Args:
        values: At least one.

    Example:
        >>> round(mad_sigma([1.0, 2.0, 3.0]), 4)
        1.4826
    """
    deviations = np.sort(np.abs(np.asarray(values) - np.median(values)))
    for share, normal in ((0.5, 0.674490), (0.75, 1.150349), (0.9, 1.644854)):
        found = float(deviations[int(len(deviations) * share)])
        if found > 0:
            return found / normal
    return 0.0


def tail_quantile(scores: Sequence[float], share: float) -> float:
    """The score that a share of all exceed; the moment estimator, drawn towards a prior as by 150 scores.

    Args:
        scores: Those of 0.5 or more are known by the lower end of their bin, 2 % wide.
        share: Of all scores.

    Example:
        >>> tail_quantile([0.1] * 100 + [0.7] * 3, 0.05)
        inf
    """
    bins = np.floor(np.log(np.maximum(scores, 0.5) / 0.5) / 0.02)
    bins = np.sort(np.clip(bins, 0, 499)[np.asarray(scores) >= 0.5])[::-1]
    wanted = share * len(scores)
    if wanted >= max(10, len(bins)):
        return 0.5
    if wanted >= 10:
        return 0.5 * math.exp(0.02 * bins[math.ceil(wanted) - 1])
    if len(bins) < 5:
        return math.inf

    def excess(num: float) -> tuple[float, np.ndarray]:
        start = bins[math.ceil(num) - 1]
        return start, 0.02 * (bins[bins >= start] + 0.5 - start)

    num_body = min(max(0.05 * len(scores), 5), len(bins))
    sizes = 0.5 * np.exp(0.02 * (bins + 0.5))
    large = sizes[bins >= bins[math.ceil(num_body) - 1]]
    body = sizes[bins >= bins[math.ceil(min(max(0.2 * len(scores), num_body), len(bins))) - 1]]
    prior = min(max(2.6 * (math.log(large.mean() / body.mean()) - 0.375), 0), 0.45)
    start, tail = excess(min(num_body, 200))
    moment_1, moment_2, num = tail.mean(), (tail**2).mean(), len(tail)
    gamma = max(moment_1 + 1 - 0.5 / max(1 - moment_1**2 / moment_2, 1e-3), -0.5)
    gamma = (num * gamma + 150 * prior) / (num + 150)
    ratio = num / wanted
    growth = (ratio**gamma - 1) / gamma if abs(gamma) > 1e-9 else math.log(ratio)
    return float(0.5 * math.exp(0.02 * start) * (1 + moment_1 * (1 - min(gamma, 0)) * growth))


def detections(  # noqa: C901 - one run, one text: nothing is shared with what it checks
    losses: Sequence[float],
    *,
    window: int = 1000,
    short: int = 100,
    warmup: int = 100,
    target: float = 0.2,
    limits: tuple[float, float] = (4.0, 40.0),
    slack: float = 1.0,
    drift_limit: float = 12.0,
    variance_limit: float = 2.5,
    accept: int = 32,
) -> list[Found]:
    """All that is found in a run, step by step.

    Args:
        losses: Of the steps 0, 1, ...; fewer than 20,000.
        window: Of what losses scatter by.
        short: Of where they are.
        warmup: Losses before the first detection.
        target: Of 10,000 steps over the limit of one.
        limits: Smallest and largest of one step.
        slack: Of a drift.
        drift_limit: Of its sum.
        variance_limit: Of the ratio.
        accept: Steps of a jump.
    """
    levels: list[float] = []
    residuals: list[float] = []
    differences: list[float] = []
    seen: list[float] = []
    recorded: list[float] = []
    unbiased: list[float] = []
    tail5: list[tuple[int, float]] = []
    one, two, four = limits[1], 2.75, 2.5
    before: float | None = None
    calm, restless, elevated = short, 0, 0
    total, total_start, over, over_start, looks = 0.0, 0, 0, 0, 0
    result: list[Found] = []

    for step, x in enumerate(losses):
        if not math.isfinite(x):
            continue
        is_warm = len(seen) >= warmup
        seen.append(x)
        if len(residuals) < 20:
            if len(levels) >= 20:
                residuals.append(x - float(np.median(levels[-short:])))
            levels.append(x)
            if before is not None:
                differences.append(abs(x - before))
            before, looks = x, looks + 1
            continue

        usual, newest = float(np.median(levels[-short:])), float(np.median(levels[-min(20, short) :]))
        sigma = max(mad_sigma(residuals[-window:]), 1e-4 * abs(usual), 1e-30)
        centre = newest if newest < usual - sigma else usual
        lagged = levels[-window:][:-short][-2 * short :]
        reference = float(np.median(levels[-window:]))
        if len(lagged) >= short:
            reference = min(reference, float(np.median(lagged)))
        lag = max(-float(np.median(residuals[-window:])), 0)
        z = (x - centre) / sigma

        # The jump.
        jump = None
        is_lasting = False
        if is_warm:
            tail5 = [*tail5, (step, z)][-5:]
            elevated = elevated + 1 if z > four else max(elevated - 2, 0)
            high = [(s, score) for s, score in tail5 if score > four]
            is_lasting = len(high) >= 4
            if z > one:
                jump = Found("jump", step, x, centre, sigma, z, one, step)
            elif len(tail5) >= 2 and min(tail5[-1][1], tail5[-2][1]) > two:
                jump = Found("jump", step, x, centre, sigma, min(z, tail5[-2][1]), two, tail5[-2][0])
            elif is_lasting and z > four:
                fourth = sorted((score for _, score in high), reverse=True)[3]
                jump = Found("jump", step, x, centre, sigma, fourth, four, high[0][0])
        is_outlier = is_warm and z > one

        # Its limits.
        unbiased.append(z + lag / sigma)
        if not jump or (calm >= short and z + lag / sigma <= 1.5 * one):
            recorded.append(z + lag / sigma)
        if calm >= short:
            restless = 0
        calm = 0 if jump else calm + 1
        restless += 1
        is_crowded = restless > 4 * short
        if is_crowded:
            recorded, restless = unbiased[-256:], 0
        if recorded and (is_crowded or len(unbiased) % 100 == 0 or len(seen) == warmup):
            num = len(recorded)
            one = min(tail_quantile(recorded, target / 1e4), 10 + num / 8)
            one = min(max(one, limits[0] + 400 / num), limits[1])
            two = min(max(tail_quantile(recorded, 0.003), 2.75), one)
            four = min(max(tail_quantile(recorded, 0.05), 2.5), one)

        # The drift.
        drift = None
        if is_warm and is_lasting:
            total = 0.0
        elif is_warm and not is_outlier:
            if total == 0:
                total_start = step
            total = max(0.0, total + min(max((x - reference) / sigma, -3), 3) - slack)
            if total > drift_limit:
                drift = Found("drift", step, x, reference, sigma, total, drift_limit, total_start)

        residuals.append(x - centre)
        if not is_outlier:
            levels.append(x)

        # The variance.
        variance = None
        if before is not None and not is_outlier:
            differences.append(abs(x - before))
        before, looks = None if is_outlier else x, looks + 1
        if is_warm and looks % 5 == 0 and len(differences) >= short:
            ratio = (_middle(differences[-short:]) / max(_middle(differences[-window:]), 0.1 * sigma)) ** 2
            if ratio > variance_limit:
                over_start = step if over == 0 else over_start
                over += 5
                variance = Found("variance", step, x, centre, sigma, ratio, variance_limit, over_start)
            else:
                over = 0

        # What lasts is accepted.
        if elevated >= accept or drift:
            levels = seen[-accept:]
            middle = float(np.median(levels))
            residuals = residuals[-window:][:-accept] + [value - middle for value in levels]
            tail5, elevated, total = [], 0, 0.0
        if over >= 2 * accept:
            residuals, differences, over = residuals[-short:], differences[-short:], 0
        result += [found for found in (jump, drift, variance) if found is not None]
    return result


def _middle(values: Sequence[float]) -> float:
    cut = len(values) // 4
    return float(np.mean(np.sort(values)[cut : len(values) - cut]))
