"""Importance ratios between the policy in training and the one that generated: raw statistics, and what bounds them.

Pure functions on log-probs of shape (B, T) and a mask. Everywhere a log-ratio is log pi_train - log pi_rollout.

Example:
    >>> import torch
    >>> from stabilizer import rollout
    >>> train, mask = torch.tensor([[-0.5, -1.2, -9.0]]), torch.ones(1, 3)
    >>> log_ratios = rollout.token_log_ratios(train, logp_rollout=torch.tensor([[-0.6, -1.0, -1.0]]), mask=mask)
    >>> rollout.TokenClip(mode="icepop")(log_ratios, mask=mask).weights
    tensor([[1.1052, 0.8187, 0.0000]])
"""

from stabilizer.rollout.clipped import Clipped
from stabilizer.rollout.divergence import entropy, kl_divergence, kl_estimates
from stabilizer.rollout.dual_clip import DualClipLoss, dual_clip_loss
from stabilizer.rollout.masks import divergence_mask, normalized_weights, off_policy_mask, veto_mask
from stabilizer.rollout.mismatch import MismatchSums, mismatch_statistics, mismatch_sums, rollout_mismatch
from stabilizer.rollout.ratios import (
    importance_ratios,
    sequence_log_ratios_mean,
    sequence_log_ratios_sum,
    token_log_ratios,
)
from stabilizer.rollout.seq_clip import SeqClip
from stabilizer.rollout.statistics import MismatchStatistics
from stabilizer.rollout.token_clip import TokenClip

__all__ = [
    "Clipped",
    "DualClipLoss",
    "MismatchStatistics",
    "MismatchSums",
    "SeqClip",
    "TokenClip",
    "divergence_mask",
    "dual_clip_loss",
    "entropy",
    "importance_ratios",
    "kl_divergence",
    "kl_estimates",
    "mismatch_statistics",
    "mismatch_sums",
    "normalized_weights",
    "off_policy_mask",
    "rollout_mismatch",
    "sequence_log_ratios_mean",
    "sequence_log_ratios_sum",
    "token_log_ratios",
    "veto_mask",
]
