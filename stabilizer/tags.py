"""Names under which values are logged. A new one is added here, and nowhere else is one spelled out."""

from __future__ import annotations

__all__ = [
    "ALL_TAGS",
    "GRAD_NORM_HEATMAP",
    "GRAD_NORM_LAYER",
    "GRAD_NORM_LAYER_AFTER",
    "GRAD_NORM_MAX_ABS",
    "GRAD_NORM_NONFINITE",
    "GRAD_NORM_TOTAL",
    "GRAD_NORM_TOTAL_AFTER",
    "prefix",
]

GRAD_NORM_TOTAL = "grad_norm/total"
GRAD_NORM_TOTAL_AFTER = "grad_norm/total_after"
GRAD_NORM_NONFINITE = "grad_norm/nonfinite"
GRAD_NORM_LAYER = "grad_norm/layer"
GRAD_NORM_LAYER_AFTER = "grad_norm/layer_after"
GRAD_NORM_MAX_ABS = "grad_norm/max_abs"
GRAD_NORM_HEATMAP = "grad_norm/heatmap"

ALL_TAGS = frozenset(
    {
        GRAD_NORM_TOTAL,
        GRAD_NORM_TOTAL_AFTER,
        GRAD_NORM_NONFINITE,
        GRAD_NORM_LAYER,
        GRAD_NORM_LAYER_AFTER,
        GRAD_NORM_MAX_ABS,
        GRAD_NORM_HEATMAP,
    }
)


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
