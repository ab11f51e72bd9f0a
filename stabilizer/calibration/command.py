"""The command `stabilizer calibrate`: its arguments are the options, its docstring is the help."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["calibrate"]

Granularity: TypeAlias = Literal["block", "module", "parameter"]


def calibrate(
    logdir: Path,
    *,
    tag: str | None = None,
    quantile: float = 0.999,
    margin: float = 1.5,
    skip_steps: int | None = None,
    layers: bool = True,
    out: Path = Path("stabilizer-calibrated.yaml"),
    picture: Path = Path("stabilizer-calibrated.png"),
    granularity: Granularity | None = None,
    num_params: int | None = None,
    world_size: int | None = None,
    accumulation: int | None = None,
    batch: int | None = None,
    precision: str | None = None,
) -> None:
    """Compute fixed clip thresholds from the gradient norms of a recorded run, as YAML for load_callbacks.

    Reads TensorBoard's event files (norms of stabilizer's callbacks, of transformers, of Lightning) and CSV files with
    a column of steps. A threshold is max(quantile x margin, 3 x median): a fixed threshold under 3 medians shrinks many
    healthy steps, which biases Adam. Norms that are zero or not finite do not count.

    Args:
        logdir: Folder with the logs, at any depth, or one event or CSV file; of several runs the newest is taken.
        tag: Series to take for the total, or of one layer to take alone; found by its name unless you say.
        quantile: Quantile of the norms, above 0 and at most 1.
        margin: What the quantile is multiplied by, at least 1.
        skip_steps: Steps at the start that are warm-up and do not count; by default 10 % of the run and at least 100.
        layers: Whether layers get thresholds of their own.
        out: YAML file to write.
        picture: PNG file to write: norms over the steps, histogram, thresholds.
        granularity: What a layer was in that run, if the log does not say.
        num_params: Trainable parameters of that run's model, if the log does not say; a later run that differs in this
            or the next four is warned.
        world_size: Processes of that run, if the log does not say.
        accumulation: Micro-batches a step of that run, if the log does not say.
        batch: Samples of a micro-batch on one process of that run, if the log does not say.
        precision: Precision of that run in its host's words, such as bf16-mixed, if the log does not say.

    Raises:
        CalibrationError: If the log gives no thresholds, an argument is out of range, or a file cannot be written.
    """
    from stabilizer.calibration.report import write
    from stabilizer.calibration.running import calibrate_log

    known = {
        "num_params": num_params,
        "world_size": world_size,
        "accumulation": accumulation,
        "batch": batch,
        "precision": precision,
    }
    found = calibrate_log(
        logdir,
        tag=tag,
        quantile=quantile,
        margin=margin,
        skip_steps=skip_steps,
        layers=layers,
        granularity=granularity,
        known=known,
    )
    write(found, out=out, picture=picture, quantile=quantile, margin=margin)
