"""Names under which a policy's rollouts and its training are logged; `stabilizer.tags` has all names."""

from __future__ import annotations

__all__ = ["POLICY", "POLICY_SIGNALS", "POLICY_SLOPES", "ROLLOUT", "ROLLOUT_STATISTICS"]

# The name of a statistic follows.
ROLLOUT = "rollout"
ROLLOUT_STATISTICS = (
    "num_tokens",
    "num_sequences",
    "num_nonfinite",
    "min_ratio",
    "max_ratio",
    "mean_ratio",
    "std_ratio",
    "mean_log_ratio",
    "std_log_ratio",
    "min_log_ratio",
    "max_log_ratio",
    "max_abs_log_ratio",
    "effective_sample_size",
    "sequence_effective_sample_size",
    "share_below",
    "share_above",
    "share_outside",
    "share_beyond_factor_2",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "chi_square",
    "sequence_chi_square",
    "train_log_perplexity",
    "rollout_log_perplexity",
    "log_perplexity_gap",
    "abs_log_perplexity_gap",
    "min_log_perplexity_gap",
    "max_log_perplexity_gap",
    "max_abs_delta_p",
)
# The name of a signal follows; of a slope the length of its window too: `of_window`.
POLICY = "policy"
POLICY_SIGNALS = (
    "entropy",
    "kl_ref",
    "reward",
    "heldout_reward",
    "reward_gap",
    "zero_variance_groups",
    "mid_pass_groups",
    "policy_lag",
    "max_policy_lag",
    "completion_length",
    "max_completion_length",
    "clipped",
    "truncated",
    "behaviour_is_old",
    "num_nonfinite",
)
POLICY_SLOPES = (
    "entropy_slope",
    "entropy_slope_error",
    "kl_ref_slope",
    "kl_ref_slope_error",
    "reward_slope",
    "reward_slope_error",
)
