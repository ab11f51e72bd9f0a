"""How far two policies are apart: estimates from the sampled tokens, and the exact numbers of whole distributions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stabilizer.rollout.ratios import MAX_LOG_RATIO, as_bool, check_shape

__all__ = ["Estimator", "entropy", "kl_divergence", "kl_estimates"]

Estimator = Literal["k1", "k2", "k3"]


def kl_estimates(log_ratios: Tensor, *, mask: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Estimates of KL(pi_rollout || pi_train) from tokens that pi_rollout has sampled.

    With r = pi_train / pi_rollout: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. The expectations of k1 and k3
    are the divergence itself; k3 is never negative. Schulman, "Approximating KL divergence" (2020).

    For the divergence of the current policy from a reference, give log_ratios = log pi_reference - log pi_current.

    Args:
        log_ratios: log pi_train - log pi_rollout, shape (B, T).
        mask: Which tokens count, shape (B, T).
        estimator: Which of the three.

    Returns:
        Shape (B, T); 0 where the mask is 0. k3 stops growing at a log-ratio of 80, and gets no gradient there.

    Raises:
        ValueError: If the shapes differ or are not (B, T), or there is no such estimator.

    Example:
        >>> kl_estimates(torch.tensor([[0.0, 0.5, -0.5]]), mask=torch.ones(1, 3))
        tensor([[0.0000, 0.1487, 0.1065]])
    """
    check_shape(log_ratios, mask=mask)
    chosen = torch.where(as_bool(mask), log_ratios, 0.0)
    if estimator == "k1":
        return -chosen
    if estimator == "k2":
        return chosen.square() / 2
    if estimator == "k3":
        limited = chosen.clamp(max=MAX_LOG_RATIO)
        # r - 1 - log r cancels where ratios are near 1, which most are.
        return limited.expm1() - limited
    raise ValueError(f"estimator={estimator!r}: expected k1, k2 or k3")


def kl_divergence(log_p: Tensor, *, log_q: Tensor) -> Tensor:
    """KL(p || q) of whole distributions, sum p (log p - log q), in nats.

    Args:
        log_p: Log-probs, shape (..., V); their exponentials add up to 1. Minus infinity is a probability of 0.
        log_q: Log-probs, shape (..., V).

    Returns:
        Shape (...); infinite where q is 0 and p is not.

    Example:
        >>> uniform = torch.tensor([0.5, 0.5]).log()
        >>> for p in ([0.8, 0.2], [0.95, 0.05]):
        ...     print(f"{kl_divergence(torch.tensor(p).log(), log_q=uniform):.2f}")
        0.19
        0.49
    """
    is_possible = log_p > -torch.inf
    difference = torch.where(is_possible, log_p, 0.0) - torch.where(is_possible, log_q, 0.0)
    return (log_p.exp() * difference).sum(-1)


def entropy(log_p: Tensor) -> Tensor:
    """-sum p log p of whole distributions, in nats.

    Args:
        log_p: Log-probs, shape (..., V); their exponentials add up to 1. Minus infinity is a probability of 0.

    Returns:
        Shape (...).

    Example:
        >>> print(f"{entropy(torch.tensor([0.8, 0.2]).log()):.2f}, {entropy(torch.tensor([0.95, 0.05]).log()):.2f}")
        0.50, 0.20
    """
    return -(log_p.exp() * torch.where(log_p > -torch.inf, log_p, 0.0)).sum(-1)
