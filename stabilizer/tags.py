"""Names under which values are logged. A new one is added here, and nowhere else is one spelled out."""

from __future__ import annotations

from stabilizer.policy_tags import POLICY, POLICY_SIGNALS, POLICY_SLOPES, ROLLOUT, ROLLOUT_STATISTICS

__all__ = [
    "ALARM",
    "ALARM_TEXT",
    "ALL_TAGS",
    "CHECKPOINT_BAD",
    "CHECKPOINT_GOOD",
    "CHECKPOINT_TEXT",
    "CLIP_LAYER_COEFFICIENT",
    "CLIP_LAYER_RATE",
    "CLIP_LAYER_THRESHOLD",
    "CLIP_TOTAL_COEFFICIENT",
    "CLIP_TOTAL_RATE",
    "CLIP_TOTAL_THRESHOLD",
    "CONFIG",
    "DRILL_FAULTS",
    "FINDING",
    "FINDING_TEXT",
    "GNS_ADVICE",
    "GNS_GRAD_SQ",
    "GNS_LAYER",
    "GNS_LOWER",
    "GNS_NOISE_SCALE",
    "GNS_RATIO_TO_BATCH",
    "GNS_RELIABLE",
    "GNS_STDERR",
    "GNS_TRACE",
    "GNS_UPPER",
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
    "GROUPS",
    "LOSS_LOWER",
    "LOSS_MAX",
    "LOSS_MAX_RANK",
    "LOSS_MEAN",
    "LOSS_MIN",
    "LOSS_NONFINITE",
    "LOSS_SLOPE",
    "LOSS_SLOPE_ERROR",
    "LOSS_STD",
    "LOSS_UPPER",
    "OPTIMIZER_RMS",
    "OPTIMIZER_ROWS_NEVER",
    "OPTIMIZER_ROWS_SILENT",
    "OPTIMIZER_ROW_COUNT",
    "OPTIMIZER_ROW_NORM",
    "OPTIMIZER_ROW_STEP",
    "OPTIMIZER_SWALLOWED_GRADIENTS",
    "OPTIMIZER_SWALLOWED_UPDATES",
    "OPTIMIZER_UPDATE_NORM",
    "OPTIMIZER_UPDATE_RATIO",
    "POLICY",
    "POLICY_SIGNALS",
    "POLICY_SLOPES",
    "RECOVERY_RUNG",
    "RECOVERY_TEXT",
    "ROLLOUT",
    "ROLLOUT_STATISTICS",
    "RUN",
    "RUN_FIELDS",
    "SKIP_CONSECUTIVE",
    "SKIP_COUNT",
    "SKIP_OVERFLOWS",
    "UPDATE_CLIP_COEFFICIENT",
    "UPDATE_CLIP_RATE",
    "UPDATE_CLIP_RMS",
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
# One standard deviation below and above the mean.
LOSS_LOWER = "loss/lower"
LOSS_UPPER = "loss/upper"
LOSS_SLOPE = "loss/slope"
LOSS_SLOPE_ERROR = "loss/slope_error"
LOSS_MIN = "loss/min"
LOSS_MAX = "loss/max"
LOSS_MAX_RANK = "loss/max_rank"
LOSS_NONFINITE = "loss/nonfinite"
# The name of a layer follows, or of an embedding; of counts and norms the tenth of its rows too, the rarest first.
OPTIMIZER_ROWS_NEVER = "optimizer/rows_never"
OPTIMIZER_ROWS_SILENT = "optimizer/rows_silent"
OPTIMIZER_ROW_COUNT = "optimizer/row_count"
OPTIMIZER_ROW_NORM = "optimizer/row_norm"
OPTIMIZER_ROW_STEP = "optimizer/row_step"
OPTIMIZER_RMS = "optimizer/rms_g2_v"
OPTIMIZER_SWALLOWED_GRADIENTS = "optimizer/swallowed_gradients"
OPTIMIZER_SWALLOWED_UPDATES = "optimizer/swallowed_updates"
OPTIMIZER_UPDATE_NORM = "optimizer/update_norm"
OPTIMIZER_UPDATE_RATIO = "optimizer/update_ratio"
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
# How many checkpoints of this run were verified with which verdict, and what is wrong with a bad one.
CHECKPOINT_GOOD = "checkpoint/good"
CHECKPOINT_BAD = "checkpoint/bad"
CHECKPOINT_TEXT = "checkpoint/text"
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
NUMERICS_INCIDENTS = "numerics/incidents"
NUMERICS_LOSS_SCALE = "numerics/loss_scale"
# By type, in the order of `stabilizer.numerics.underflow.HALF_TYPES`.
NUMERICS_UNDERFLOW = ("numerics/underflow_fp16", "numerics/underflow_bf16")
# A text.
NUMERICS_TEXT = "numerics/text"
GNS_NOISE_SCALE = "gns/noise_scale"
GNS_GRAD_SQ = "gns/grad_sq"
GNS_TRACE = "gns/trace"
GNS_STDERR = "gns/stderr"
# One standard error below and above the noise scale.
GNS_LOWER = "gns/lower"
GNS_UPPER = "gns/upper"
GNS_RATIO_TO_BATCH = "gns/ratio_to_batch"
GNS_RELIABLE = "gns/reliable"
GNS_LAYER = "gns/layer"
# A text.
GNS_ADVICE = "gns/advice"
UPDATE_CLIP_COEFFICIENT = "update_clip/coefficient"
UPDATE_CLIP_RATE = "update_clip/rate"
UPDATE_CLIP_RMS = "update_clip/rms"
# How many faults a drill has put into the step.
DRILL_FAULTS = "drill/faults"
# Which rung was taken: 1 alarm, 2 skip, 3 lower_lr, 4 roll_back, 5 stop; 0 for trouble during a cooldown.
RECOVERY_RUNG = "recovery/rung"
# A text.
RECOVERY_TEXT = "recovery/text"
WARNING_LEVEL = "warning/level"
# A text.
WARNING_TEXT = "warning/text"
# A text, not a number: what the run is like, in JSON, and what a threshold's `calibrated_for` may hold of it.
RUN = "stabilizer/run"
RUN_FIELDS = ("num_params", "world_size", "accumulation", "batch", "precision")

# A text: all arguments of all callbacks, as YAML.
CONFIG = "stabilizer/config"

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
        LOSS_LOWER,
        LOSS_UPPER,
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
        CHECKPOINT_BAD,
        CHECKPOINT_GOOD,
        FINDING,
        GRADLOC_INCIDENTS,
        GRADLOC_PASSES,
        GRADLOC_SECONDS,
        NUMERICS_INCIDENTS,
        NUMERICS_LOSS_SCALE,
        *NUMERICS_UNDERFLOW,
        GNS_NOISE_SCALE,
        GNS_GRAD_SQ,
        GNS_TRACE,
        GNS_STDERR,
        GNS_LOWER,
        GNS_UPPER,
        GNS_RATIO_TO_BATCH,
        GNS_RELIABLE,
        GNS_LAYER,
        OPTIMIZER_ROWS_NEVER,
        OPTIMIZER_ROWS_SILENT,
        OPTIMIZER_ROW_COUNT,
        OPTIMIZER_ROW_NORM,
        OPTIMIZER_ROW_STEP,
        OPTIMIZER_RMS,
        OPTIMIZER_SWALLOWED_GRADIENTS,
        OPTIMIZER_SWALLOWED_UPDATES,
        OPTIMIZER_UPDATE_NORM,
        OPTIMIZER_UPDATE_RATIO,
        UPDATE_CLIP_COEFFICIENT,
        UPDATE_CLIP_RATE,
        UPDATE_CLIP_RMS,
        DRILL_FAULTS,
        RECOVERY_RUNG,
        WARNING_LEVEL,
        *(f"{ROLLOUT}/{name}" for name in ROLLOUT_STATISTICS),
        *(f"{POLICY}/{name}" for name in (*POLICY_SIGNALS, *POLICY_SLOPES)),
    }
)

_TEXTS = (
    ALARM_TEXT,
    CHECKPOINT_TEXT,
    CONFIG,
    FINDING_TEXT,
    GNS_ADVICE,
    GRADLOC_INCIDENT,
    NUMERICS_TEXT,
    RECOVERY_TEXT,
    RUN,
    WARNING_TEXT,
)
#: First parts of all names, numbers, pictures and texts; a callback's name and the optimizer's number stand before.
GROUPS = frozenset(tag.partition("/")[0] for tag in (*ALL_TAGS, *_TEXTS))


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
