"""Pictures for the loggers, drawn on the host from copies that have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.drawing import ACCENT, BLUE, GREEN, MAP, can_draw, new_figure

__all__ = ["MARKS", "SkipRing", "can_draw", "norm_heatmap"]

#: What a map marks -> form and colour, no two of which are alike for anybody.
MARKS = {"incident": ("v", ACCENT), "alarm": ("D", BLUE), "skipped step": ("x", "#000000")}
_OTHER_MARK = ("o", GREEN)
_MAX_ROWS, _MAX_NAMES, _MAX_MARKS = 512, 60, 200


def norm_heatmap(
    rows: Tensor, *, steps: Sequence[int], layer_names: Sequence[str], marks: Mapping[str, Sequence[int]] | None = None
) -> Any:
    """Gradient norms, layers x steps, in log colours, with what happened at which step above them.

    Args:
        rows: Norms, shape (steps, layers), on the CPU.
        steps: Step of every row.
        layer_names: Name of every column.
        marks: Steps by what happened, such as the names in `MARKS`; what is outside of the map is left out.

    Returns:
        A matplotlib figure. Layers run from the input (top) to the output (bottom); zero and non-finite norms are left
        grey.
    """
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    values = _thinned(rows).T.double().numpy()
    shown = np.ma.masked_where(~np.isfinite(values) | (values <= 0), values)
    found = {name: _inside(marked, steps) for name, marked in (marks or {}).items()}
    found = {name: marked for name, marked in found.items() if marked}
    height = min(12, 1.6 + 0.18 * len(layer_names))
    figure = new_figure(9, height + 0.25 * len(found))
    upper, axes = _two_axes(figure, height, len(found))
    axes.set_facecolor("0.7")
    scale = LogNorm(shown.min(), max(shown.max(), shown.min() * 1.01)) if shown.count() else None
    edges = (steps[0] - 0.5, steps[-1] + 0.5, len(layer_names) - 0.5, -0.5)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=MAP, norm=scale, extent=edges)
    every = max(1, -(-len(layer_names) // _MAX_NAMES))
    names = [str(name) if len(str(name)) <= 40 else f"...{str(name)[-37:]}" for name in layer_names[::every]]
    axes.set_yticks(range(0, len(layer_names), every), names, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("layer, from input to output")
    title = "Gradient norm of every layer: a bright column is a spike, a bright row a layer apart"
    (axes if upper is None else upper).set_title(title, fontsize=11)
    if scale is not None:
        figure.colorbar(image, ax=axes, label="gradient norm (log scale)")
    if upper is not None:
        _mark(upper, found)
    return figure


def _two_axes(figure: Any, height: float, num_marks: int) -> tuple[Any, Any]:
    """A narrow one for marks above the map, if there are any."""
    if not num_marks:
        return None, figure.subplots()
    upper, axes = figure.subplots(2, sharex=True, height_ratios=[0.25 * num_marks, height - 1.2])
    return upper, axes


def _inside(marked: Sequence[int], steps: Sequence[int]) -> list[int]:
    """The last of the marks that are on the map; more would be one black bar."""
    return sorted({step for step in marked if steps[0] <= step <= steps[-1]})[-_MAX_MARKS:]


def _mark(axes: Any, found: Mapping[str, Sequence[int]]) -> None:
    for row, (name, steps) in enumerate(found.items()):
        form, colour = MARKS.get(name, _OTHER_MARK)
        axes.plot(steps, [row] * len(steps), form, color=colour, markersize=6, clip_on=False)
    axes.set_yticks(range(len(found)), [f"{name} ({len(steps)})" for name, steps in found.items()], fontsize=8)
    for label, name in zip(axes.get_yticklabels(), found, strict=True):
        label.set_color(MARKS.get(name, _OTHER_MARK)[1])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.tick_params(bottom=False, labelbottom=False, left=False)
    axes.grid(axis="x", color="0.85", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _thinned(rows: Tensor, *, limit: int = _MAX_ROWS) -> Tensor:
    """At most `limit` rows: the largest norm of every few steps, so that no spike falls between two pixels."""
    every = -(-len(rows) // limit)
    return torch.stack([piece.amax(0) for piece in rows.split(every)]) if every > 1 else rows


class SkipRing:
    """Which of the last steps the optimizer was kept from, on the device; nobody waits for it.

    Args:
        size: How many steps.
        device: Where the flags are.

    Example:
        >>> ring = SkipRing(4, device=torch.device("cpu"))
        >>> ring.see(5, torch.tensor(True))
        >>> ring.flags([4, 5]).tolist()
        [0.0, 1.0]
    """

    def __init__(self, size: int, *, device: torch.device) -> None:
        self._size = size
        self._steps = torch.full((size,), -1, dtype=torch.int64, device=device)

    def see(self, step: int, is_skipped: Tensor) -> None:
        """Take note of a step.

        Args:
            step: The optimizer step.
            is_skipped: Shape (), bool.
        """
        self._steps[step % self._size] = torch.where(is_skipped, step, -1)

    def flags(self, steps: Sequence[int]) -> Tensor:
        """1 for a step that was skipped, else 0.

        Args:
            steps: At most `size` of them.

        Returns:
            Shape (steps,), float32, on the device.
        """
        asked = torch.tensor(steps, dtype=torch.int64).to(self._steps.device, non_blocking=True)
        return (self._steps[asked % self._size] == asked).to(torch.float32)
