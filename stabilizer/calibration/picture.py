"""The picture of a calibration: norms over the steps, their histogram, and the thresholds on both."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stabilizer.calibration.computing import SeriesThreshold
from stabilizer.calibration.running import Calibration

__all__ = ["can_draw", "draw"]

# Okabe and Ito's colours, which people with any colour vision tell apart; lines differ in their dashes as well.
_NORMS, _LEFT_OUT, _MEDIAN, _QUANTILE, _THRESHOLD = "#0072B2", "0.65", "#009E73", "#000000", "#D55E00"
_MAX_POINTS = 20_000
_MAX_NAMES = 40


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(found: Calibration, path: Path, *, quantile: float) -> None:
    """Draw and write the picture.

    Args:
        found: The thresholds.
        path: Of the PNG.
        quantile: Named in the legend.
    """
    from matplotlib.figure import Figure

    single = found.total or (found.layers[0] if len(found.layers) == 1 else None)
    layers = found.layers if found.total is not None or len(found.layers) > 1 else []
    heights = [4.2] * (single is not None) + [4.6] * bool(layers)
    figure = Figure(figsize=(11, sum(heights)), dpi=120, layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if single is not None:
        _draw_series(parts[0], single, quantile=quantile)
    if layers:
        _draw_layers(parts[-1], layers, quantile=quantile)
    figure.savefig(path, format="png")


def _draw_series(figure: Any, found: SeriesThreshold, *, quantile: float) -> None:
    what = "total gradient norm" if found.name == "total" else f"gradient norm of {found.name}"
    figure.suptitle(
        f"Clip {what} at {found.threshold:.4g} = {found.k:.3g} medians: "
        f"{100 * found.share_clipped:.3g} % of {len(found.norms)} recorded steps are over it"
    )
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    warmup = {step: norm for step, norm in found.warmup.items() if math.isfinite(norm) and norm > 0}
    if warmup:
        steps, norms = _thinned(list(warmup), list(warmup.values()))
        left.plot(steps, norms, ".", color=_LEFT_OUT, markersize=3, label="warm-up, left out")
    steps, norms = _thinned(found.steps, found.norms)
    left.plot(steps, norms, ".", color=_NORMS, markersize=3, label="recorded norm")
    left.set_yscale("log")
    left.set_xlabel("optimizer step")
    left.set_ylabel("gradient norm (L2, log scale)")
    right.hist(found.norms, bins=_log_bins(found.norms), orientation="horizontal", color=_NORMS)
    right.set_xscale("log")
    right.set_xlabel("number of steps (log scale)")
    for axes in (left, right):
        axes.axhline(found.median, color=_MEDIAN, linestyle="--", label=f"median {found.median:.4g}")
        axes.axhline(
            found.quantile, color=_QUANTILE, linestyle=":", label=f"{quantile:g} quantile {found.quantile:.4g}"
        )
        axes.axhline(found.threshold, color=_THRESHOLD, linewidth=2, label=f"threshold {found.threshold:.4g}")
    left.legend(fontsize=8, loc="best")


def _draw_layers(figure: Any, layers: Sequence[SeriesThreshold], *, quantile: float) -> None:
    figure.suptitle("Threshold of every layer, over the norms that it comes from")
    axes = figure.subplots()
    places = range(len(layers))
    axes.vlines(
        places,
        [layer.median for layer in layers],
        [layer.quantile for layer in layers],
        color=_NORMS,
        linewidth=2,
        label=f"median to {quantile:g} quantile",
    )
    axes.plot(places, [layer.median for layer in layers], "o", color=_MEDIAN, markersize=4, label="median")
    axes.plot(places, [layer.threshold for layer in layers], "_", color=_THRESHOLD, markersize=10, label="threshold")
    axes.set_yscale("log")
    axes.set_ylabel("gradient norm (L2, log scale)")
    axes.set_xlabel("layer, from input to output")
    every = max(1, -(-len(layers) // _MAX_NAMES))
    names = [layer.name for layer in layers[::every]]
    axes.set_xticks(range(0, len(layers), every), names, rotation=45, ha="right", fontsize=8)
    axes.legend(fontsize=8, loc="best")


def _log_bins(norms: Sequence[float], *, number: int = 50) -> list[float]:
    low, high = math.log(min(norms)), math.log(max(norms))
    inner = [math.exp(low + (high - low) * position / number) for position in range(1, number)]
    return [min(norms), *inner, max(norms)]


def _thinned(steps: Sequence[int], norms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Few enough points to draw: of every few steps the smallest and the largest norm."""
    every = -(-2 * len(steps) // _MAX_POINTS)
    if every <= 2:
        return list(steps), list(norms)
    kept: list[int] = []
    for start in range(0, len(norms), every):
        places = range(start, min(start + every, len(norms)))
        kept += sorted({min(places, key=norms.__getitem__), max(places, key=norms.__getitem__)})
    return [steps[place] for place in kept], [norms[place] for place in kept]
