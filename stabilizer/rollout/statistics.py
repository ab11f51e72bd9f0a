"""What is said about the ratios of some tokens."""

from __future__ import annotations

import dataclasses

from torch import Tensor

__all__ = ["MismatchStatistics"]


@dataclasses.dataclass(frozen=True, eq=False)
class MismatchStatistics:
    """Raw statistics of r = pi_train / pi_rollout, before any clip: of shape (), float64 where the device has it.

    A standard deviation is that of all tokens (divided by n). "Sequence" means the product of a sequence's ratios; each
    sequence counts once there, and each token once elsewhere. A ratio counts as exp(300) at most (exp(35) where a
    device has float32 only); log-ratios are exact. Everything but the counts is NaN if there was no token.

    Attributes:
        num_tokens: Tokens that count and have two finite log-probs.
        num_sequences: Sequences with such a token.
        num_nonfinite: Tokens that were left out since a log-prob was not finite.
        min_ratio: Smallest r.
        max_ratio: Largest r.
        mean_ratio: Mean of r, 1 for tokens that pi_rollout has sampled and nobody has chosen from.
        std_ratio: Standard deviation of r.
        mean_log_ratio: Mean of log r: where it is far from 0 while the rest looks sound, all tokens are off alike.
        std_log_ratio: Standard deviation of log r.
        min_log_ratio: Smallest log r.
        max_log_ratio: Largest log r.
        max_abs_log_ratio: Largest |log r|.
        effective_sample_size: (sum r)^2 / (n sum r^2) over tokens, from 1/n to 1; 0 if every r has faded to 0.
        sequence_effective_sample_size: The same over sequences.
        share_below: Share of tokens with r below the bounds.
        share_above: Share of tokens with r above the bounds.
        share_outside: Both together.
        share_beyond_factor_2: Share of tokens with |log r| > log 2.
        kl_k1: Estimate k1 of KL(pi_rollout || pi_train), -mean(log r).
        kl_k2: Estimate k2, mean((log r)^2) / 2.
        kl_k3: Estimate k3, mean(r - 1 - log r).
        chi_square: Mean of r^2 over tokens, less 1.
        sequence_chi_square: Mean of r^2 over sequences, less 1.
        train_log_perplexity: Mean over sequences of -mean(log pi_train).
        rollout_log_perplexity: Mean over sequences of -mean(log pi_rollout).
        log_perplexity_gap: The first less the second; positive where training finds the text less likely.
        abs_log_perplexity_gap: Mean over sequences of the size of the gap.
        min_log_perplexity_gap: Smallest gap of a sequence.
        max_log_perplexity_gap: Largest gap of a sequence.
        max_abs_delta_p: Largest |pi_train - pi_rollout| of a token.

    Example:
        >>> len(dataclasses.fields(MismatchStatistics))
        30
    """

    num_tokens: Tensor
    num_sequences: Tensor
    num_nonfinite: Tensor
    min_ratio: Tensor
    max_ratio: Tensor
    mean_ratio: Tensor
    std_ratio: Tensor
    mean_log_ratio: Tensor
    std_log_ratio: Tensor
    min_log_ratio: Tensor
    max_log_ratio: Tensor
    max_abs_log_ratio: Tensor
    effective_sample_size: Tensor
    sequence_effective_sample_size: Tensor
    share_below: Tensor
    share_above: Tensor
    share_outside: Tensor
    share_beyond_factor_2: Tensor
    kl_k1: Tensor
    kl_k2: Tensor
    kl_k3: Tensor
    chi_square: Tensor
    sequence_chi_square: Tensor
    train_log_perplexity: Tensor
    rollout_log_perplexity: Tensor
    log_perplexity_gap: Tensor
    abs_log_perplexity_gap: Tensor
    min_log_perplexity_gap: Tensor
    max_log_perplexity_gap: Tensor
    max_abs_delta_p: Tensor

    def as_dict(self) -> dict[str, Tensor]:
        """All of it by name.

        Returns:
            Name -> tensor, in the order above.
        """
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
