"""Oracles of the gradient noise scale, in float64: written like the paper, per sample or per part.

They know nothing of the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "Truth",
    "every_draw",
    "part_means",
    "population_truth",
    "ratio_and_error",
    "sufficient_statistics",
    "two_mini_batches",
]

Array = npt.NDArray[np.float64]


class Truth(NamedTuple):
    """|G|^2 and tr(Sigma)."""

    grad_sq: float
    trace: float


def population_truth(gradients: Array) -> Truth:
    """Of samples that are drawn from a population with replacement.

    G is the mean of the population, Sigma its covariance: E[g] and E[(g - G)(g - G)^T].

    Args:
        gradients: One row a member, shape (members, dims).

    Example:
        >>> population_truth(np.array([[1.0, 0.0], [3.0, 2.0]]))
        Truth(grad_sq=5.0, trace=2.0)
    """
    mean = gradients.sum(0) / len(gradients)
    trace = sum(float(((gradient - mean) ** 2).sum()) for gradient in gradients) / len(gradients)
    return Truth(float((mean**2).sum()), trace)


def every_draw(gradients: Array, sizes: Sequence[int]) -> list[list[Array]]:
    """All draws of a step's samples, each as likely as the others: expectations are plain means over them.

    Args:
        gradients: The population, shape (members, dims).
        sizes: How many samples each part has.

    Returns:
        For every draw, the samples of each part, shape (size, dims).

    Example:
        >>> len(every_draw(np.eye(2), [1, 2]))
        8
    """
    ends = list(itertools.accumulate(sizes))
    draws = itertools.product(range(len(gradients)), repeat=ends[-1])
    return [[gradients[list(draw[end - size : end])] for size, end in zip(sizes, ends, strict=True)] for draw in draws]


def ratio_and_error(x: Array, y: Array, *, decay: float) -> tuple[float, float]:
    """Ratio of the weighted means of y and x, and its standard error by the delta method.

    With weights w = decay^age, mean(v) = sum(w v) / sum(w), and n = sum(w)^2 / sum(w^2) independent values, the
    covariance of two means is sum(w (u - mean u)(v - mean v)) / sum(w) / (n - 1); for r = mean(y) / mean(x)

        Var r = (Var y - 2 r Cov(x, y) + r^2 Var x) / mean(x)^2

    Args:
        x: Denominators, oldest first.
        y: Numerators.
        decay: Of the weights, a step.

    Example:
        >>> ratio_and_error(np.ones(4), np.array([1.0, 2.0, 3.0, 4.0]), decay=1.0)[0]
        2.5
    """
    weights = decay ** np.arange(len(x))[::-1].astype(np.float64)
    n = weights.sum() ** 2 / (weights**2).sum()
    mean_x, mean_y = (float((weights * v).sum() / weights.sum()) for v in (x, y))

    def covariance(u: Array, v: Array) -> float:
        return float((weights * u * v).sum() / weights.sum() / (n - 1))

    ratio, dx, dy = mean_y / mean_x, x - mean_x, y - mean_y
    variance = covariance(dy, dy) - 2 * ratio * covariance(dx, dy) + ratio**2 * covariance(dx, dx)
    return ratio, float(np.sqrt(variance)) / abs(mean_x)


def part_means(
    noise_scale: float, *, num_parts: int, size: int, dims: int, runs: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Small and big of steps whose gradient is a mean over equal parts, from vectors.

    The mean of a part's samples is N(G, Sigma / size): with |G| = 1 and Sigma = noise_scale / dims times the identity.

    Args:
        noise_scale: tr(Sigma) / |G|^2.
        num_parts: Parts of a step.
        size: Samples of a part.
        dims: Length of the vectors.
        runs: How many steps.
        rng: Draws.

    Returns:
        Sum of |g / parts|^2 over the parts, and |mean g|^2; shape (runs,).
    """
    small, big = np.empty(runs), np.empty(runs)
    for run in range(runs):
        parts = rng.standard_normal((num_parts, dims), dtype=np.float32)
        parts *= np.float32((noise_scale / dims / size) ** 0.5)
        parts += np.float32(dims**-0.5)
        parts /= np.float32(num_parts)
        total = parts.sum(0)
        small[run] = np.vdot(parts, parts)
        big[run] = np.vdot(total, total)
    return small, big


def sufficient_statistics(
    noise_scale: float, *, num_parts: int, size: int, dims: int, runs: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """The same, in distribution, without vectors.

    sum |g|^2 = n |mean g|^2 + sum |g - mean g|^2. The mean is N(G, s^2 I) with s^2 = tr(Sigma) / (dims n size), so
    |mean g|^2 is (|G| + s z)^2 + s^2 chi^2(dims - 1); the deviations are independent of it, and their sum of squares is
    n s^2 chi^2(dims (n - 1)).

    Args:
        noise_scale: tr(Sigma) / |G|^2, |G| = 1.
        num_parts: n.
        size: Samples of a part.
        dims: Length of the vectors.
        runs: How many steps.
        rng: Draws.

    Returns:
        As of `part_means`.
    """
    s_squared = noise_scale / (dims * num_parts * size)
    big = (1 + np.sqrt(s_squared) * rng.standard_normal(runs)) ** 2 + s_squared * rng.chisquare(dims - 1, runs)
    deviations = num_parts * s_squared * rng.chisquare(dims * (num_parts - 1), runs)
    return (num_parts * big + deviations) / num_parts**2, big


def two_mini_batches(
    noise_scale: float, *, batch: int, dims: int, runs: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """|g1 - g2|^2 and |g1 + g2|^2 of two independent gradients, each a mean over a batch; |G| = 1, isotropic noise.

    Args:
        noise_scale: tr(Sigma) / |G|^2.
        batch: Samples of each of the two.
        dims: Length of the vectors.
        runs: How many pairs.
        rng: Draws.

    Returns:
        Both of shape (runs,).
    """
    small, big = sufficient_statistics(noise_scale, num_parts=2, size=batch, dims=dims, runs=runs, rng=rng)
    # |g1|^2 + |g2|^2 = 4 small, |g1 + g2|^2 = 4 big, and both squares together are twice the first.
    return 8 * small - 4 * big, 4 * big
