"""Pictures of an incident: the norms before it, the tokens behind it, and where in the model the gradient grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.console import printable
from stabilizer.drawing import ACCENT, BLUE, MAP, drawable, new_figure
from stabilizer.localize.incident import FoundToken, Incident, Origin

__all__ = ["draw_history", "norm_history", "position_map", "top_tokens"]

_NORMS, _SPIKE, _THRESHOLD = BLUE, ACCENT, "#000000"
_SIZE = (8, 4)
# Fewer cells than the narrowest picture has pixels, so that none falls between two of them.
_MAX_NAMES, _MAX_CELLS = 24, 320


def norm_history(norms: Sequence[float], *, step: int, threshold: float, steps: Sequence[int] | None = None) -> Any:
    """The gradient norms up to a spike.

    Args:
        norms: In the order of the steps, the spike's among them or not.
        step: The step of the spike.
        threshold: What it was over.
        steps: Step of each norm; default those that end with the spike's.

    Returns:
        A matplotlib figure. Norms that are not finite are marked at its upper edge.
    """
    figure, axes = _figure()
    draw_history(axes, norms, step=step, threshold=threshold, steps=steps)
    axes.set_title(f"The gradient norm before and at step {step}: a quiet line and one peak is a bad batch")
    return figure


def draw_history(
    axes: Any, norms: Sequence[float], *, step: int, threshold: float, steps: Sequence[int] | None = None
) -> None:
    """Draw the gradient norms up to a spike into axes that are there.

    Args:
        axes: Of matplotlib.
        norms: In the order of the steps.
        step: The step of the spike.
        threshold: What it was over.
        steps: Step of each norm; default those that end with the spike's.
    """
    from matplotlib.ticker import MaxNLocator

    steps = list(range(step - len(norms) + 1, step + 1)) if steps is None else list(steps)
    points = list(zip(steps, norms, strict=True))
    drawn = [(x, y) for x, y in points if math.isfinite(y) and y > 0]
    before, spike = [[point for point in drawn if (point[0] == step) is is_spike] for is_spike in (False, True)]
    axes.plot(*_columns(before), ".-", color=_NORMS, markersize=4, linewidth=0.8)
    if spike:
        axes.plot(*_columns(spike), "o", color=_SPIKE, label=f"step {step}")
    lost = [(x, 1.0) for x, y in points if not math.isfinite(y)]
    if lost:
        # Placed by the height of the picture: there is no norm to place it by.
        upper = axes.get_xaxis_transform()
        axes.plot(*_columns(lost), "x", color=_SPIKE, clip_on=False, transform=upper, label="not finite")
    if math.isfinite(threshold) and threshold > 0:
        axes.axhline(threshold, color=_THRESHOLD, linestyle="--", label=f"threshold {threshold:.4g}")
    if drawn or threshold > 0:
        axes.set_yscale("log")
    first, last = min([step, *steps]), max([step, *steps])
    margin = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("gradient norm (L2, log scale)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="upper left")


def top_tokens(incident: Incident, *, num: int = 20) -> Any:
    """The gradient that arrives from each found token alone.

    Args:
        incident: What was found.
        num: Largest number of tokens.

    Returns:
        A matplotlib figure.
    """
    tokens = incident.tokens[:num]
    figure, axes = _figure(height=max(_SIZE[1], 1.4 + 0.22 * len(tokens)))
    places = range(len(tokens))
    norms = [token.grad_norm for token in tokens]
    finite = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    smallest, largest = (min(finite), max(finite)) if finite else (1.0, 1.0)
    widths = [norm if norm in finite else largest for norm in norms]
    axes.barh(places, widths, color=[_NORMS if norm in finite else "0.7" for norm in norms])
    # A bar on a log scale has no natural foot.
    axes.set_xscale("log")
    axes.set_xlim(smallest / 10, largest * 10)
    for place, token in zip(places, tokens, strict=True):
        share = "" if math.isnan(token.share) else f"  {100 * token.share:.1f} %"
        what = "" if token.grad_norm in finite else f"  {token.grad_norm}"
        axes.text(widths[place], place, what + share, va="center", fontsize=8)
    axes.set_yticks(places, [_label(token) for token in tokens], fontsize=8)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.invert_yaxis()
    axes.set_xlabel("norm of the gradient of this token alone (L2, log scale), and its share")
    more = f", the largest {len(tokens)} of {len(incident.tokens)}" if len(tokens) < len(incident.tokens) else ""
    axes.set_title(f"Tokens behind the spike at step {incident.step}{more}" if tokens else "No token was found")
    return figure


def position_map(gradients: Tensor, names: Sequence[str], origin: Origin | None = None) -> Any:
    """The gradient of the hidden states, layers x positions, in log colours.

    Args:
        gradients: Norms over the features, shape (points, positions), on the CPU.
        names: Of the points: "input", then each block.
        origin: Where the gradient begins to grow; it is marked.

    Returns:
        A matplotlib figure. The input is at its lower edge; what is zero is left grey, and what is not finite is red.
    """
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    every = -(-gradients.shape[1] // _MAX_CELLS)
    pieces = gradients.double().split(every, dim=1)
    values = torch.stack([piece.amax(1) for piece in pieces], dim=1).numpy()
    shown = np.ma.masked_where(~np.isfinite(values) | (values <= 0), values)
    figure, axes = _figure(height=max(_SIZE[1], min(10, 1.6 + 0.16 * len(names))))
    axes.set_facecolor("0.7")
    edges = (-0.5, every * len(pieces) - 0.5, -0.5, len(names) - 0.5)
    options: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "lower", "extent": edges}
    if shown.count():
        scale = LogNorm(shown.min(), max(shown.max(), shown.min() * 1.01))
        image = axes.imshow(shown, cmap=MAP, norm=scale, **options)
        figure.colorbar(image, ax=axes, label="norm of dL/dh (L2, log scale)")
    bad = ~np.isfinite(values)
    if bad.any():
        axes.imshow(np.ma.masked_where(~bad, bad), cmap="autumn", vmin=1, vmax=2, **options)
    step = max(1, -(-len(names) // _MAX_NAMES))
    shown_names = [name if len(name) <= 32 else f"...{name[-29:]}" for name in names[::step]]
    axes.set_yticks(range(0, len(names), step), shown_names, fontsize=8)
    axes.set_xlim(edges[:2])
    axes.set_ylim(edges[2:])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("position in the row")
    axes.set_ylabel("layer, from input to output")
    title = "The gradient at every layer's output: a bright column is one token"
    if origin is not None and origin.layer in names and origin.position is not None:
        point = list(names).index(origin.layer)
        axes.plot(origin.position, point, "s", markersize=12, markerfacecolor="none", color=_SPIKE, markeredgewidth=2)
        title += f";\nit grows in {origin.layer} at position {origin.position}"
    axes.set_title(drawable(title), fontsize=10, parse_math=False)
    return figure


def _figure(*, height: float = _SIZE[1]) -> tuple[Any, Any]:
    figure = new_figure(_SIZE[0], height)
    return figure, figure.subplots()


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _label(token: FoundToken) -> str:
    place = f"rank {token.rank}, micro {token.micro_batch}, row {token.row}"
    place += "" if token.position is None else f", pos {token.position}"
    return place if token.text is None else f"{place}  '{drawable(printable(token.text, limit=16))}'"
