"""Tokens to leave out by other measures than bounds on a ratio, and weights over their mean."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from stabilizer.reduction import accumulation_dtype
from stabilizer.rollout.divergence import Estimator, kl_estimates
from stabilizer.rollout.ratios import as_bool, check_shape, sequence_log_ratios_mean, sequence_log_ratios_sum

__all__ = ["Level", "divergence_mask", "normalized_weights", "off_policy_mask", "veto_mask"]

Level = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


@torch.no_grad()
def veto_mask(log_ratios: Tensor, *, mask: Tensor, min_ratio: float = 1e-4) -> Tensor:
    """Leave out every sequence that has one token with a ratio below a limit.

    Args:
        log_ratios: log pi_train - log pi_rollout, shape (B, T).
        mask: Which tokens count, shape (B, T).
        min_ratio: The limit; a token right on it vetoes nothing.

    Returns:
        Tokens that still count, bool, shape (B, T).

    Raises:
        ValueError: If the shapes differ or are not (B, T).

    Example:
        >>> log_ratios = torch.tensor([[0.0, -12.0], [0.0, 12.0]])
        >>> veto_mask(log_ratios, mask=torch.ones(2, 2))
        tensor([[False, False],
                [ True,  True]])
    """
    check_shape(log_ratios, mask=mask)
    is_token = as_bool(mask)
    vetoes = is_token & (log_ratios < math.log(min_ratio))
    return is_token & ~vetoes.any(-1, keepdim=True)


@torch.no_grad()
def divergence_mask(
    log_ratios: Tensor, *, mask: Tensor, max_divergence: float, estimator: Estimator = "k3", level: Level = "token"
) -> Tensor:
    """Leave out tokens, or sequences, whose estimated divergence is over a limit: rejection as of verl's `rollout_rs`.

    Args:
        log_ratios: log pi_train - log pi_rollout, shape (B, T).
        mask: Which tokens count, shape (B, T).
        max_divergence: The limit; what is right on it stays.
        estimator: As of `kl_estimates`.
        level: Single tokens, or sequences by the sum, mean or maximum over their tokens.

    Returns:
        Tokens that still count, bool, shape (B, T). An estimate that is NaN is over any limit.

    Raises:
        ValueError: If the shapes differ or are not (B, T), or there is no such level or estimator.

    Example:
        >>> log_ratios = torch.tensor([[0.0, 0.9], [0.1, 0.1]])
        >>> divergence_mask(log_ratios, mask=torch.ones(2, 2), max_divergence=0.1, level="sequence_mean")
        tensor([[False, False],
                [ True,  True]])
    """
    is_token = as_bool(mask)
    estimates = kl_estimates(log_ratios, mask=is_token, estimator=estimator)
    if level == "token":
        return is_token & (estimates <= max_divergence)
    if level == "sequence_max":
        chosen = estimates.masked_fill(~is_token, -torch.inf)
        return is_token & (chosen <= max_divergence).all(-1, keepdim=True)
    if level not in get_args(Level):
        raise ValueError(f"level={level!r}: expected {', '.join(get_args(Level))}")
    aggregate = sequence_log_ratios_sum if level == "sequence_sum" else sequence_log_ratios_mean
    return is_token & (aggregate(estimates, mask=is_token).unsqueeze(-1) <= max_divergence)


@torch.no_grad()
def off_policy_mask(log_ratios: Tensor, *, mask: Tensor, advantages: Tensor, max_kl: float) -> Tensor:
    """Leave out sequences with a negative advantage that the current policy has moved away from.

    The off-policy sequence mask of DeepSeek-V3.2 (2025): such a sequence stays if the mean of log pi_rollout -
    log pi_train over its tokens, the estimate k1, is at most a limit. One with an advantage of 0 or more always stays.

    Args:
        log_ratios: log pi_train - log pi_rollout with the current policy in training, shape (B, T). A NaN, of a token
            that the engine gave no log-prob, is no evidence: it counts as 0.
        mask: Which tokens count, shape (B, T).
        advantages: Of sequences, shape (B,).
        max_kl: The limit.

    Returns:
        Tokens that still count, bool, shape (B, T).

    Raises:
        ValueError: If the shapes do not fit.

    Example:
        >>> log_ratios, advantages = torch.full((2, 3), -0.5), torch.tensor([1.0, -1.0])
        >>> off_policy_mask(log_ratios, mask=torch.ones(2, 3), advantages=advantages, max_kl=0.1)
        tensor([[ True,  True,  True],
                [False, False, False]])
    """
    if advantages.shape != log_ratios.shape[:1]:
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}: expected {tuple(log_ratios.shape[:1])}")
    is_token = as_bool(mask)
    # Only a NaN is replaced: an infinite log-ratio is evidence enough.
    known = log_ratios.masked_fill(log_ratios.isnan(), 0.0)
    drift = -sequence_log_ratios_mean(known, mask=is_token)
    return is_token & ((advantages >= 0) | (drift <= max_kl)).unsqueeze(-1)


@torch.no_grad()
def normalized_weights(weights: Tensor, *, mask: Tensor, over: Literal["tokens", "sequences"] = "tokens") -> Tensor:
    """Weights over their mean in this batch, so that a clip does not change the size of a step.

    Args:
        weights: As of a clip, shape (B, T).
        mask: Tokens whose weights make the mean: those before the clip, or those that it left, shape (B, T).
        over: Of all tokens alike, or of the means of sequences.

    Returns:
        Shape (B, T); 0 where the mask is 0. Weights that are all 0 stay 0.

    Raises:
        ValueError: If the shapes differ or are not (B, T), or there is no such `over`.

    Example:
        >>> normalized_weights(torch.tensor([[0.5, 1.5, 9.0]]), mask=torch.tensor([[1, 1, 0]]))
        tensor([[0.5000, 1.5000, 0.0000]])
    """
    check_shape(weights, mask=mask)
    is_token = as_bool(mask)
    chosen = torch.where(is_token, weights, 0.0)
    num_by_row = is_token.sum(-1)
    sums = chosen.sum(-1, dtype=accumulation_dtype(chosen.device))
    if over == "tokens":
        mean = sums.sum() / num_by_row.sum().clamp(min=1)
    elif over == "sequences":
        mean = (sums / num_by_row.clamp(min=1)).sum() / (num_by_row > 0).sum().clamp(min=1)
    else:
        raise ValueError(f"over={over!r}: expected tokens or sequences")
    return torch.where(mean > 0, chosen / mean, 0.0).to(chosen.dtype)
