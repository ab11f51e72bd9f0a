"""Clipping rules as they were published, with their faults: what the rules of the package are compared with.

Small versions after the papers, for a vector of runs at once; tests hold them against what the authors' code does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["AdaGC", "Array", "AutoClip", "ZClip"]

Array = npt.NDArray[np.float64]


class ZClip:
    """Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training" (2025), without its fixed maximum.

    Args:
        z: Score from which on a norm is a spike.
        alpha: Decay of mean and variance.
        warmup_steps: Norms that these start from.

    Example:
        >>> rule = ZClip(warmup_steps=2)
        >>> rule.start(1)
        >>> for norm in (1.0, 3.0):
        ...     rule.update(np.array([norm]))
        >>> rule.thresholds(np.array([102.0])).round(4)
        array([2.0625])
    """

    def __init__(self, *, z: float = 2.5, alpha: float = 0.97, warmup_steps: int = 25) -> None:
        self.z, self.alpha, self.warmup_steps = z, alpha, warmup_steps

    def start(self, num_runs: int) -> None:
        """Forget everything.

        Args:
            num_runs: Length of the vectors of norms.
        """
        self.first: list[Array] = []
        self.mean = self.variance = np.full(num_runs, np.nan)

    def thresholds(self, norms: Array) -> Array:
        """What these norms are held against, and clipped to.

        Args:
            norms: Shape (runs,).
        """
        if len(self.first) < self.warmup_steps:
            return np.full(norms.shape, np.inf)
        std = np.sqrt(self.variance)
        score = (norms - self.mean) / (std + 1e-6)
        with np.errstate(divide="ignore", invalid="ignore"):
            spike = self.mean + self.z**2 / score * std
        # No comparison with NaN is true: then nothing is clipped.
        return np.where(score > self.z, spike, np.where(np.isnan(score), np.inf, self.mean + self.z * (std + 1e-6)))

    def update(self, norms: Array) -> None:
        """Let norms enter, spikes as clipped.

        Args:
            norms: Shape (runs,).
        """
        if len(self.first) < self.warmup_steps:
            self.first.append(norms)
            self.mean, self.variance = np.mean(self.first, 0), np.var(self.first, 0)
            return
        values = np.where(norms > self.thresholds(norms), self.thresholds(norms), norms)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * values
        self.variance = self.alpha * self.variance + (1 - self.alpha) * (values - self.mean) ** 2


class AutoClip:
    """Seetharaman et al., "AutoClip: Adaptive Gradient Clipping for Source Separation Networks" (2020).

    The threshold is a percentile of all norms so far, that of the step at hand included.

    Args:
        percentile: From 0 to 100.

    Example:
        >>> rule = AutoClip(percentile=50)
        >>> rule.start(1)
        >>> rule.update(np.array([1.0]))
        >>> rule.thresholds(np.array([3.0]))
        array([2.])
    """

    def __init__(self, *, percentile: float = 10) -> None:
        self.percentile = percentile

    def start(self, num_runs: int) -> None:
        """Forget everything.

        Args:
            num_runs: Length of the vectors of norms.
        """
        self.history: list[Array] = []

    def thresholds(self, norms: Array) -> Array:
        """What these norms are held against, and clipped to.

        Args:
            norms: Shape (runs,).
        """
        found: Array = np.percentile([*self.history, norms], self.percentile, axis=0)
        return found

    def update(self, norms: Array) -> None:
        """Let norms enter, as they were before the clip.

        Args:
            norms: Shape (runs,).
        """
        self.history.append(norms)


class AdaGC:
    """Wang et al., "AdaGC: Improving Training Stability for Large Language Model Pretraining" (2025).

    Each tensor is held against a running mean of its own clipped norms. Before that, all together are clipped to
    `lambda_abs`, and the smallest clipped norm is what the mean starts from.

    Args:
        lambda_rel: A norm may be this many times its mean.
        lambda_abs: Largest norm of all tensors together, in the warm-up.
        beta: Decay of the mean.
        warmup_steps: From this step on, counted from 1, the mean counts.
        is_one_model: Whether the entries of a vector are tensors of one model, or a model each.

    Example:
        >>> rule = AdaGC(warmup_steps=2)
        >>> rule.start(1)
        >>> rule.update(np.array([0.5]))
        >>> rule.thresholds(np.array([3.0]))
        array([0.525])
    """

    def __init__(
        self,
        *,
        lambda_rel: float = 1.05,
        lambda_abs: float = 1.0,
        beta: float = 0.98,
        warmup_steps: int = 100,
        is_one_model: bool = False,
    ) -> None:
        self.lambda_rel, self.lambda_abs, self.beta = lambda_rel, lambda_abs, beta
        self.warmup_steps, self.is_one_model = warmup_steps, is_one_model

    def start(self, num_runs: int) -> None:
        """Forget everything.

        Args:
            num_runs: Length of the vectors of norms.
        """
        self.step = 1
        self.mean = np.full(num_runs, np.inf)

    def thresholds(self, norms: Array) -> Array:
        """What these norms are held against, and clipped to.

        Args:
            norms: Shape (runs,).
        """
        if self.step >= self.warmup_steps:
            found: Array = self.lambda_rel * np.maximum(self.mean, 1e-8)
            return found
        total = np.sqrt(np.sum(norms**2)) if self.is_one_model else norms
        scale = self.lambda_abs / (total + 1e-8)
        return np.where(scale < 1, norms * scale, np.inf)

    def update(self, norms: Array) -> None:
        """Let clipped norms enter.

        Args:
            norms: Shape (runs,).
        """
        # NaN stays NaN, as it does there.
        clipped = norms * np.minimum(self.thresholds(norms) / norms, 1)
        if self.step < self.warmup_steps:
            self.mean = np.minimum(self.mean, clipped)
        else:
            self.mean = self.beta * self.mean + (1 - self.beta) * clipped
        self.step += 1
