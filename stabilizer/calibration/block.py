"""The YAML that `load_callbacks` takes, with the thresholds in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer.calibration.computing import SeriesThreshold

__all__ = ["block"]


def block(
    total: SeriesThreshold | None,
    layers: Sequence[SeriesThreshold],
    *,
    calibrated_for: Mapping[str, Any],
    granularity: str | Mapping[str, str] = "block",
    comments: Sequence[str] = (),
) -> str:
    """Write the block.

    Args:
        total: Of `adaptive_clip`; `None` leaves that out.
        layers: Of `layer_clip`; none leaves that out.
        calibrated_for: What the run was like: `num_params`, `world_size`, `accumulation`, `batch`, `precision`; `None`
            for what is not known. A later run that differs is warned.
        granularity: What a layer was in that run.
        comments: Lines for the head of the file.

    Returns:
        YAML.
    """
    lines = [f"# {line}" for comment in comments for line in comment.splitlines()]
    if total is not None:
        lines += ["adaptive_clip:", f"  rule: {_fixed(total, calibrated_for)}"]
    if layers:
        # One rule speaks for all of a file: the total's, where there is one.
        spoken = None if total is not None else calibrated_for
        lines += ["layer_clip:", f"  granularity: {_plain(granularity)}", "  rule: robust_log", "  rules:"]
        lines += [f"    {_plain(layer.name)}: {_fixed(layer, spoken)}" for layer in layers]
    return "\n".join(lines) + "\n"


def _fixed(found: SeriesThreshold, calibrated_for: Mapping[str, Any] | None) -> str:
    told = "" if calibrated_for is None else f", calibrated_for: {_plain(dict(calibrated_for))}"
    number = repr(found.threshold)
    if "e" in number and "." not in number:
        number = number.replace("e", ".0e")  # without the point it is text to many readers of YAML
    return f"{{name: fixed, threshold: {number}{told}}}"


def _plain(value: Any) -> str:
    """Text in quotes, so that a layer called "1e3" and a precision called "no" stay text; JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
