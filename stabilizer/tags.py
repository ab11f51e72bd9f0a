"""Names under which values are logged. A new one is added here, and nowhere else is one spelled out."""

from __future__ import annotations

__all__ = [
    "ALARM",
    "ALARM_TEXT",
    "ALL_TAGS",
    "CLIP_LAYER_COEFFICIENT",
    "CLIP_LAYER_RATE",
    "CLIP_LAYER_THRESHOLD",
    "CLIP_TOTAL_COEFFICIENT",
    "CLIP_TOTAL_RATE",
    "CLIP_TOTAL_THRESHOLD",
    "FINDING",
    "FINDING_TEXT",
    "GNS_ADVICE",
    "GNS_GRAD_SQ",
    "GNS_LAYER",
    "GNS_NOISE_SCALE",
    "GNS_RATIO_TO_BATCH",
    "GNS_RELIABLE",
    "GNS_STDERR",
    "GNS_TRACE",
    "GRADLOC_INCIDENT",
    "GRADLOC_INCIDENTS",
    "GRADLOC_PASSES",
    "GRADLOC_PICTURES",
    "GRADLOC_SECONDS",
    "GRAD_NORM_HEATMAP",
    "GRAD_NORM_LAYER",
    "GRAD_NORM_LAYER_AFTER",
    "GRAD_NORM_MAX_ABS",
    "GRAD_NORM_NONFINITE",
    "GRAD_NORM_TOTAL",
    "GRAD_NORM_TOTAL_AFTER",
    "LOSS_MAX",
    "LOSS_MAX_RANK",
    "LOSS_MEAN",
    "LOSS_MIN",
    "LOSS_NONFINITE",
    "LOSS_SLOPE",
    "LOSS_SLOPE_ERROR",
    "LOSS_STD",
    "POLICY",
    "POLICY_SIGNALS",
    "POLICY_SLOPES",
    "ROLLOUT",
    "ROLLOUT_STATISTICS",
    "RUN",
    "RUN_FIELDS",
    "SKIP_CONSECUTIVE",
    "SKIP_COUNT",
    "SKIP_OVERFLOWS",
    "WARNING_LEVEL",
    "WARNING_TEXT",
    "of_window",
    "prefix",
]

GRAD_NORM_TOTAL = "grad_norm/total"
GRAD_NORM_TOTAL_AFTER = "grad_norm/total_after"
GRAD_NORM_NONFINITE = "grad_norm/nonfinite"
GRAD_NORM_LAYER = "grad_norm/layer"
GRAD_NORM_LAYER_AFTER = "grad_norm/layer_after"
GRAD_NORM_MAX_ABS = "grad_norm/max_abs"
GRAD_NORM_HEATMAP = "grad_norm/heatmap"
# The length of a window follows: `of_window`.
LOSS_MEAN = "loss/mean"
LOSS_STD = "loss/std"
LOSS_SLOPE = "loss/slope"
LOSS_SLOPE_ERROR = "loss/slope_error"
LOSS_MIN = "loss/min"
LOSS_MAX = "loss/max"
LOSS_MAX_RANK = "loss/max_rank"
LOSS_NONFINITE = "loss/nonfinite"
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
# The kind of alarm follows; and what it says.
ALARM = "alarm"
ALARM_TEXT = "alarm/text"
CLIP_LAYER_COEFFICIENT = "clip/layer_coefficient"
CLIP_LAYER_RATE = "clip/layer_rate"
CLIP_LAYER_THRESHOLD = "clip/layer_threshold"
CLIP_TOTAL_COEFFICIENT = "clip/total_coefficient"
CLIP_TOTAL_RATE = "clip/total_rate"
CLIP_TOTAL_THRESHOLD = "clip/total_threshold"
SKIP_CONSECUTIVE = "skip/consecutive"
SKIP_COUNT = "skip/count"
SKIP_OVERFLOWS = "skip/overflows"
# The kind of finding follows; 0 is none, 1 "info", 2 "warning", 3 "alarm".
FINDING = "finding"
# A text.
FINDING_TEXT = "finding/text"
GRADLOC_INCIDENTS = "gradloc/incidents"
GRADLOC_PASSES = "gradloc/passes"
GRADLOC_SECONDS = "gradloc/seconds"
# A text, and pictures by name.
GRADLOC_INCIDENT = "gradloc/incident"
GRADLOC_PICTURES = "gradloc"
GNS_NOISE_SCALE = "gns/noise_scale"
GNS_GRAD_SQ = "gns/grad_sq"
GNS_TRACE = "gns/trace"
GNS_STDERR = "gns/stderr"
GNS_RATIO_TO_BATCH = "gns/ratio_to_batch"
GNS_RELIABLE = "gns/reliable"
GNS_LAYER = "gns/layer"
# A text.
GNS_ADVICE = "gns/advice"
WARNING_LEVEL = "warning/level"
# A text.
WARNING_TEXT = "warning/text"
# A text, not a number: what the run is like, in JSON, and what a threshold's `calibrated_for` may hold of it.
RUN = "stabilizer/run"
RUN_FIELDS = ("num_params", "world_size", "accumulation", "batch", "precision")

ALL_TAGS = frozenset(
    {
        GRAD_NORM_TOTAL,
        GRAD_NORM_TOTAL_AFTER,
        GRAD_NORM_NONFINITE,
        GRAD_NORM_LAYER,
        GRAD_NORM_LAYER_AFTER,
        GRAD_NORM_MAX_ABS,
        GRAD_NORM_HEATMAP,
        LOSS_MEAN,
        LOSS_STD,
        LOSS_SLOPE,
        LOSS_SLOPE_ERROR,
        LOSS_MIN,
        LOSS_MAX,
        LOSS_MAX_RANK,
        LOSS_NONFINITE,
        ALARM,
        CLIP_LAYER_COEFFICIENT,
        CLIP_LAYER_RATE,
        CLIP_LAYER_THRESHOLD,
        CLIP_TOTAL_COEFFICIENT,
        CLIP_TOTAL_RATE,
        CLIP_TOTAL_THRESHOLD,
        SKIP_CONSECUTIVE,
        SKIP_COUNT,
        SKIP_OVERFLOWS,
        FINDING,
        GRADLOC_INCIDENTS,
        GRADLOC_PASSES,
        GRADLOC_SECONDS,
        GNS_NOISE_SCALE,
        GNS_GRAD_SQ,
        GNS_TRACE,
        GNS_STDERR,
        GNS_RATIO_TO_BATCH,
        GNS_RELIABLE,
        GNS_LAYER,
        WARNING_LEVEL,
        *(f"{ROLLOUT}/{name}" for name in ROLLOUT_STATISTICS),
        *(f"{POLICY}/{name}" for name in (*POLICY_SIGNALS, *POLICY_SLOPES)),
    }
)


def of_window(tag: str, window: int) -> str:
    """The tag of a window.

    Args:
        tag: Of a statistic over windows.
        window: Length in steps.

    Example:
        >>> of_window(LOSS_MEAN, 100)
        'loss/mean_100'
    """
    return f"{tag}_{window}"


def prefix(name: str, optimizer_index: int) -> str:
    """What stands before a tag.

    Args:
        name: Of the callback, possibly empty.
        optimizer_index: Position of the optimizer; the first has no prefix.

    Returns:
        Empty, or text that ends with a slash.

    Example:
        >>> prefix("student", 1) + GRAD_NORM_TOTAL
        'student/opt1/grad_norm/total'
    """
    return (f"{name}/" if name else "") + (f"opt{optimizer_index}/" if optimizer_index else "")
