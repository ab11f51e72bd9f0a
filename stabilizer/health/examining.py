"""From the history to numbers: all statistics of layer health, and how bad each finding is, in one vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stabilizer.health.explosions import CLASSES, explosions
from stabilizer.health.findings import KINDS
from stabilizer.health.history import HealthHistory
from stabilizer.health.layout import Layout
from stabilizer.health.limits import Limits
from stabilizer.health.series import drift, last_trends
from stabilizer.health.statistics import baseline, deep_to_shallow, depth_fit, log_norms, median
from stabilizer.reduction import accumulation_dtype
from stabilizer.segments import Segments

__all__ = ["Examiner", "examine", "reading_shapes"]


class Examiner:
    """Constants of a layout on a device, copied there once.

    Args:
        layout: The layers.
        device: Where the norms are.
    """

    def __init__(self, layout: Layout, *, device: torch.device) -> None:
        num_blocks = len(layout.blocks)
        ids = [num_blocks if block < 0 else block for block in layout.layer_blocks]
        self.blocks = Segments(ids, num_segments=num_blocks + 1, device=device)
        self.is_shallow = torch.tensor(layout.is_shallow, dtype=torch.bool, device=device)
        self.is_before = torch.tensor(layout.is_before, dtype=torch.bool, device=device)


def reading_shapes(layout: Layout, limits: Limits) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what `examine` gives, in its order.

    Args:
        layout: The layers.
        limits: Lengths of the windows.

    Returns:
        "levels": of every kind of finding: 0 for none, 1 "info", 2 "warning", 3 "alarm". "decay": slope, R^2 and half
        depth. "blocks": median ln norm of every block. "vanishing": ln of deep over shallow. "explosion_counts",
        "explosion_rows", "explosion_excess", "explosion_far": see `Explosions`. "parts": ln of attention over MLP of
        every block. "idle": steps without a gradient, by module. "drift": medians of ln total. "trends": slopes, then
        errors.
    """
    num_layers, num_blocks, num_classes = len(layout.layers), len(layout.blocks), len(CLASSES)
    return {
        "levels": (len(KINDS),),
        "decay": (3,),
        "blocks": (num_blocks,),
        "vanishing": (1,),
        "explosion_counts": (num_classes,),
        "explosion_rows": (num_classes,),
        "explosion_excess": (num_classes, num_layers + 2 * num_blocks),
        "explosion_far": (num_classes, num_layers),
        "parts": (num_blocks,),
        "idle": (len(layout.modules),),
        "drift": (limits.drift_windows,),
        "trends": (2, 2),
    }


@torch.no_grad()
def examine(history: HealthHistory, examiner: Examiner) -> dict[str, Tensor]:
    """Make numbers of the last steps; the host waits for nothing.

    Args:
        history: Flushed, and not empty; its new rows are held against the whole window.
        examiner: Of the same layout.

    Returns:
        As `reading_shapes` says. Statistics of fewer than half a window of norms are NaN, and no finding.
    """
    layout, limits = history.layout, history.limits
    num_layers, num_blocks, min_count = len(layout.layers), len(layout.blocks), (limits.window + 1) // 2
    logs = log_norms(history.norms)
    squares = history.norms[:, :num_layers].to(accumulation_dtype(history.device)).square()
    block_logs = log_norms(examiner.blocks.sum(squares.T)[:num_blocks].T.sqrt())
    blocks = _windowed(block_logs, min_count=min_count)
    fit = depth_fit(blocks)
    vanishing = _windowed(deep_to_shallow(block_logs).unsqueeze(1), min_count=min_count)
    found = explosions(
        logs[-history.num_new :],
        baseline(logs, min_count=min_count),
        is_shallow=examiner.is_shallow,
        is_before=examiner.is_before,
        ratio=limits.explosion_ratio,
        k=limits.explosion_k,
        together_share=limits.together_share,
    )
    pairs = logs[:, num_layers:].reshape(len(logs), num_blocks, 2)
    parts = _windowed(pairs[..., 0] - pairs[..., 1], min_count=min_count)
    totals = drift(history.totals, num_windows=limits.drift_windows)
    nothing = logs.new_full((2,), torch.nan)
    slopes, errors = (nothing, nothing) if history.losses is None else last_trends(history.losses)
    levels = {
        "exponential_decay": 2
        * ((fit.r_squared > limits.decay_r_squared) & (fit.half_depth < limits.decay_half_depth * num_blocks)),
        "vanishing": (vanishing.abs() > -math.log(limits.vanishing_warning)).any() * 2
        + (vanishing.abs() > -math.log(limits.vanishing_alarm)).any(),
        **{
            f"explosion_{name}": (found.counts[number] > 0) * (1 if name == "all" else 2)
            for number, name in enumerate(CLASSES)
        },
        "parts_apart": 2 * ((parts - median(parts.unsqueeze(1))).abs() > math.log(limits.parts_ratio)).any(),
        "no_gradient": 2 * (history.idle >= limits.window).any(),
        "total_drift": 2 * (totals.is_rising & (totals.medians[-1] - totals.medians[0] > math.log(limits.drift_ratio))),
        "loss_plateau": 1 * (slopes > -limits.plateau_errors * errors).all(),
    }
    return {
        "levels": torch.stack([levels[kind] for kind in KINDS]),
        "decay": torch.stack([fit.slope, fit.r_squared, fit.half_depth]),
        "blocks": blocks,
        "vanishing": vanishing,
        "explosion_counts": found.counts,
        "explosion_rows": found.rows,
        "explosion_excess": found.excess,
        "explosion_far": found.is_far,
        "parts": parts,
        "idle": history.idle,
        "drift": totals.medians,
        "trends": torch.stack([slopes, errors]),
    }


def _windowed(values: Tensor, *, min_count: int) -> Tensor:
    """Median of every column; NaN for one with too few numbers."""
    num = (~values.isnan()).sum(0)
    return torch.where(num >= min_count, median(values), torch.nan) if values.shape[1] else values.new_zeros(0)
