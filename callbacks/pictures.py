"""Pictures for the loggers, drawn on the host from copies that have arrived."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["can_draw", "norm_heatmap"]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def norm_heatmap(rows: Tensor, *, steps: Sequence[int], layer_names: Sequence[str]) -> Any:
    """Gradient norms, layers x steps, in log colours.

    Args:
        rows: Norms, shape (steps, layers), on the CPU.
        steps: Step of every row.
        layer_names: Name of every column.

    Returns:
        A matplotlib figure. Layers run from the input (top) to the output (bottom); zero and non-finite norms are left
        grey.
    """
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    values = _thinned(rows).T.double().numpy()
    shown = np.ma.masked_where(~np.isfinite(values) | (values <= 0), values)
    figure = Figure(figsize=(9, min(12, 1.6 + 0.18 * len(layer_names))), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.7")
    scale = LogNorm(shown.min(), max(shown.max(), shown.min() * 1.01)) if shown.count() else None
    edges = (steps[0] - 0.5, steps[-1] + 0.5, len(layer_names) - 0.5, -0.5)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis", norm=scale, extent=edges)
    every = max(1, -(-len(layer_names) // 60))
    axes.set_yticks(range(0, len(layer_names), every), [str(name) for name in layer_names[::every]], fontsize=8)
    axes.set_xlabel("optimizer step")
    axes.set_title("Gradient norm of every layer: a bright column is a spike, a bright row a layer apart", fontsize=11)
    if scale is not None:
        figure.colorbar(image, ax=axes, label="gradient norm")
    return figure


def _thinned(rows: Tensor, *, limit: int = 512) -> Tensor:
    """At most `limit` rows: the largest norm of every few steps, so that no spike falls between two pixels."""
    every = -(-len(rows) // limit)
    return torch.stack([piece.amax(0) for piece in rows.split(every)]) if every > 1 else rows
