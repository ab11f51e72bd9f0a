"""From a folder of logs to thresholds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stabilizer import tags
from stabilizer.calibration.choosing import choose, newest_with_norms
from stabilizer.calibration.computing import SeriesThreshold, calibrate_series, num_skipped_steps
from stabilizer.calibration.logs import Run
from stabilizer.calibration.mistakes import CalibrationError

__all__ = ["Calibration", "calibrate_log"]

_GRANULARITIES = ("block", "module", "parameter")


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Thresholds of a run.

    Attributes:
        path: Of the run: its folder, or its CSV file.
        others: Of the folder's other runs.
        total: Threshold of the total; `None` if the log has none that may be used.
        layers: Thresholds of layers, in the order of the log.
        calibrated_for: What the run was like; `None` for what the log does not tell.
        granularity: What a layer was.
        first_step: Where the norms that count begin.
        num_skipped: Steps before it.
        notes: What was left out and why, in sentences.
    """

    path: Path
    others: list[Path]
    total: SeriesThreshold | None
    layers: list[SeriesThreshold]
    calibrated_for: dict[str, Any]
    granularity: str | dict[str, str]
    first_step: int
    num_skipped: int
    notes: list[str]

    @property
    def series(self) -> list[SeriesThreshold]:
        """The total, if there is one, and the layers."""
        return [*([] if self.total is None else [self.total]), *self.layers]


def calibrate_log(
    logdir: Path,
    *,
    tag: str | None = None,
    quantile: float = 0.999,
    margin: float = 1.5,
    skip_steps: int | None = None,
    layers: bool = True,
    granularity: str | None = None,
    known: Mapping[str, Any] | None = None,
) -> Calibration:
    """Compute thresholds from the norms of a recorded run; see `calibrate_series`.

    Args:
        logdir: A folder with event files of TensorBoard or CSV files at any depth (the newest run that has gradient
            norms is taken), or one such file.
        tag: Series to take for the total, or of a layer to take alone.
        quantile: Of the norms, above 0 and at most 1.
        margin: What the quantile is multiplied by, at least 1.
        skip_steps: Steps at the start that do not count; `None` is 10 % of the run and at least 100.
        layers: Whether layers get thresholds of their own.
        granularity: What a layer was; `None` is what the log says, else "block".
        known: What the run was like where the log does not tell; see `Calibration.calibrated_for`.

    Raises:
        CalibrationError: If the log or an argument gives no thresholds.
    """
    if not 0 < quantile <= 1:
        raise CalibrationError(f"--quantile={quantile}: expected a number above 0 and at most 1, such as 0.999")
    if not 1 <= margin < float("inf"):
        raise CalibrationError(f"--margin={margin}: expected a number of at least 1")
    if skip_steps is not None and skip_steps < 0:
        raise CalibrationError(f"--skip-steps={skip_steps}: expected 0 or more")
    run, others = newest_with_norms(logdir, tag=tag)
    chosen = choose(list(run.series), tag=tag, layers=layers)
    wanted = [*([chosen.total] if chosen.total is not None else []), *chosen.layers.values()]
    if not wanted:
        raise CalibrationError(f"{run.path}: {' '.join(chosen.notes) or 'layers alone, and --no-layers'}")
    series = run.facts.get("series")
    told = series.get(chosen.name) if isinstance(series, dict) else None
    told = told if isinstance(told, dict) else {}
    if told.get("norm_type", 2) != 2:
        raise CalibrationError(
            f"{run.path}: norm_type={told['norm_type']!r}: these are no L2 norms, which are what is clipped; record a "
            "run with norm_type=2"
        )
    steps = [step for name in wanted for step in (min(run.series[name]), max(run.series[name]))]
    skipped = num_skipped_steps(steps) if skip_steps is None else skip_steps
    options: dict[str, Any] = {"quantile": quantile, "margin": margin, "first_step": min(steps) + skipped}
    total = None if chosen.total is None else calibrate_series("total", run.series[chosen.total], **options)
    found, mistakes = _calibrate_layers(run, chosen.layers, options)
    if total is None and not found:
        raise next(iter(mistakes.values()))
    return Calibration(
        path=run.path,
        others=others,
        total=total,
        layers=found,
        calibrated_for=_calibrated_for(run.facts, known or {}),
        granularity=_granularity(told, granularity),
        first_step=options["first_step"],
        num_skipped=skipped,
        notes=[*chosen.notes, *_described(mistakes)],
    )


def _calibrate_layers(
    run: Run, layers: Mapping[str, str], options: Mapping[str, Any]
) -> tuple[list[SeriesThreshold], dict[str, CalibrationError]]:
    found, mistakes = [], {}
    for name, series in layers.items():
        try:
            found.append(calibrate_series(name, run.series[series], **options))
        except CalibrationError as error:
            mistakes[name] = error
    return found, mistakes


def _described(mistakes: Mapping[str, CalibrationError]) -> list[str]:
    if not mistakes:
        return []
    number, (name, first) = len(mistakes), next(iter(mistakes.items()))
    which = f"1 layer ({name})" if number == 1 else f"{number} layers ({name} and others)"
    return [f"{which} without a threshold of their own, left to robust_log. {first}"]


def _calibrated_for(facts: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    told = {field: facts.get(field) for field in tags.RUN_FIELDS}
    plain = {field: value if isinstance(value, int | str) else None for field, value in told.items()}
    return {field: value if known.get(field) is None else known[field] for field, value in plain.items()}


def _granularity(told: Mapping[str, Any], wanted: str | None) -> str | dict[str, str]:
    found = wanted if wanted is not None else told.get("granularity", "block")
    if isinstance(found, dict):
        return {str(pattern): str(name) for pattern, name in found.items()}
    if found not in _GRANULARITIES:
        raise CalibrationError(f"--granularity={found}: expected one of {', '.join(_GRANULARITIES)}")
    return str(found)
