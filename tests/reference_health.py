"""Oracle of layer health: the definitions of docs/callbacks/layer_health.md, in float64, loop by loop.

It knows nothing of the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["classify", "deep_over_shallow", "depth_line", "log_medians", "usual"]

Rows = npt.NDArray[np.float64]


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values if math.isfinite(value) and value > 0]


def log_medians(norms: Rows) -> list[float]:
    """Median of ln norm of every column, without zeros and what is not finite.

    Args:
        norms: By step and column.
    """
    return [float(np.median(logs)) if (logs := _logs(column)) else math.nan for column in norms.T.tolist()]


def depth_line(log_norms: Sequence[float]) -> tuple[float, float, float]:
    """Slope, R^2 and half-depth of ln norm against block number.

    Args:
        log_norms: One a block; NaN for a block without.
    """
    known = [(block, value) for block, value in enumerate(log_norms) if not math.isnan(value)]
    x, y = np.array(known).T
    slope, intercept = np.polyfit(x, y, 1)
    residual, total = ((y - slope * x - intercept) ** 2).sum(), ((y - y.mean()) ** 2).sum()
    return float(slope), float(1 - residual / total), math.log(2) / abs(float(slope))


def deep_over_shallow(norms: Rows) -> float:
    """Median over steps of (geometric mean of the last quarter of the blocks) / (that of the first two).

    Args:
        norms: By step and block.
    """
    num_deep = math.ceil(norms.shape[1] / 4)
    ratios = []
    for row in norms.tolist():
        deep, shallow = _logs(row[-num_deep:]), _logs(row[:2])
        if deep and shallow:
            ratios.append(np.mean(deep) - np.mean(shallow))
    return float(np.exp(np.median(ratios)))


def usual(norms: Rows) -> list[tuple[float, float]]:
    """Median of ln norm, and 1.4826 times the median absolute deviation from it, at least 0.05.

    Args:
        norms: By step and layer.
    """
    found = []
    for column in norms.T.tolist():
        logs = np.array(_logs(column))
        middle = float(np.median(logs))
        found.append((middle, max(0.05, 1.4826 * float(np.median(np.abs(logs - middle))))))
    return found


def classify(row: Sequence[float], usual: Sequence[tuple[float, float]], blocks: Sequence[int], **limits: Any) -> str:
    """What a step is: "" or "all", "shallow", "one", "some".

    Args:
        row: Norm of every layer.
        usual: Of every layer, as `usual` gives it.
        blocks: Block of every layer, -1 for none; layers before the first block are shallow.
        **limits: ratio, k and together_share.
    """
    far, raised, known = set(), set(), set()
    for layer, (norm, (middle, sigma)) in enumerate(zip(row, usual, strict=True)):
        if not (math.isfinite(norm) and norm > 0):
            continue
        known.add(layer)
        excess, limit = math.log(norm) - middle, max(math.log(limits["ratio"]), limits["k"] * sigma)
        if excess > limit:
            far.add(layer)
        if excess > limit / 2:
            raised.add(layer)
    first = next((layer for layer, block in enumerate(blocks) if block >= 0), 0)
    num_blocks = max(blocks) + 1
    before = set(range(first))
    shallow = before | {layer for layer, block in enumerate(blocks) if 0 <= block < math.ceil(num_blocks / 2)}
    outside = known - shallow
    if not far:
        return ""
    if len(known) > 1 and len(raised) >= limits["together_share"] * len(known):
        return "all"
    is_deep_calm = not far - shallow and outside and len(raised & outside) <= len(outside) / 4
    if is_deep_calm and (len(far) > 1 or far & before):
        return "shallow"
    return "one" if len(far) == 1 and len(raised) - 1 <= (len(known) - 1) / 4 else "some"
