"""What `stabilizer calibrate` prints and writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from stabilizer.calibration.block import block
from stabilizer.calibration.computing import SeriesThreshold
from stabilizer.calibration.mistakes import CalibrationError
from stabilizer.calibration.picture import can_draw, draw
from stabilizer.calibration.running import Calibration

__all__ = ["describe", "table", "write"]


def write(found: Calibration, *, out: Path, picture: Path, quantile: float, margin: float) -> None:
    """Print thresholds on stdout, and write them as YAML and as a picture.

    Args:
        found: The thresholds.
        out: The YAML file.
        picture: The PNG file; left out, with a line that says so, where matplotlib is missing.
        quantile: That they were computed with.
        margin: That they were computed with.

    Raises:
        CalibrationError: If a file cannot be written.
    """
    lines = describe(found, quantile=quantile, margin=margin)
    comments = ["Written by: stabilizer calibrate", *lines]
    if found.total is not None and found.layers:
        comments.append("calibrated_for is compared with the run that loads this file, once for all thresholds in it")
    text = block(
        found.total,
        found.layers,
        calibrated_for=found.calibrated_for,
        granularity=found.granularity,
        comments=comments,
    )
    _say("\n".join([*lines, "", table(found.series, quantile=quantile), "", _without_comments(text)]))
    try:
        for path in (out, picture):
            path.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        if can_draw():
            draw(found, picture, quantile=quantile)
    except OSError as error:
        raise CalibrationError(f"{error.filename} cannot be written ({error.strerror})") from error
    _say(f"Thresholds: {out}, for load_callbacks({str(out)!r})")
    missing = "none, matplotlib is missing (pip install 'torch-stabilizer[plots]')"
    _say(f"Picture: {picture if can_draw() else missing}")


def describe(found: Calibration, *, quantile: float, margin: float) -> list[str]:
    """Say where thresholds come from, line by line.

    Args:
        found: The thresholds.
        quantile: That they were computed with.
        margin: That they were computed with.
    """
    lines = [f"Run: {found.path}"]
    if found.others:
        number = len(found.others)
        others = "1 other run" if number == 1 else f"{number} other runs"
        lines.append(f"It is the newest that has gradient norms; {others} under this folder: give a run's own path")
    lines.append(
        f"Steps from {found.first_step} on count; the {found.num_skipped} before are warm-up (--skip-steps). "
        f"Threshold: max({quantile:g} quantile x {margin:g}, 3 x median)"
    )
    unknown = [field for field, value in found.calibrated_for.items() if value is None]
    if unknown:
        options = ", ".join(f"--{field.replace('_', '-')}" for field in unknown)
        lines.append(f"The log does not tell {', '.join(unknown)}: a later run is not compared by them ({options})")
    num_nonfinite = sum(series.num_nonfinite for series in found.series)
    num_zero = sum(series.num_zero for series in found.series)
    if num_nonfinite or num_zero:
        lines.append(f"Left out: {num_nonfinite} norms that are not finite and {num_zero} that are zero, of all series")
    return [*lines, *found.notes]


def table(series: Sequence[SeriesThreshold], *, quantile: float) -> str:
    """The thresholds as aligned text that nothing wraps.

    Args:
        series: Total and layers.
        quantile: Named in the head.
    """
    head = ("series", "n", "median", f"{quantile:g} quantile", "threshold", "k", "clipped")
    rows = [
        (
            one.name,
            str(len(one.norms)),
            f"{one.median:.4g}",
            f"{one.quantile:.4g}",
            f"{one.threshold:.4g}",
            f"{one.k:.2f}",
            f"{100 * one.share_clipped:.3g} %",
        )
        for one in series
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for name, *numbers in (head, *rows):
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"
