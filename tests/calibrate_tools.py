"""Event files that are written by hand, the threshold from its definition, and the command on them."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]
from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-untyped]

from stabilizer.calibration import picture, report
from stabilizer.callbacks import load_callbacks
from stabilizer.cli import main

__all__ = ["command_in", "expected", "norms", "write_events"]

Series = Mapping[str, Mapping[int, float]]


def write_events(folder: Path, series: Series, *, as_tensors: bool = False) -> Path:
    """An event file, record by record; with tensors as TensorFlow 2 writes numbers."""
    writer = EventFileWriter(str(folder))
    for tag, points in series.items():
        for step, number in points.items():
            if as_tensors:
                value = Summary.Value(tag=tag, tensor=make_tensor_proto(np.float32(number)))
            else:
                value = Summary.Value(tag=tag, simple_value=number)
            writer.add_event(Event(step=step, wall_time=float(step), summary=Summary(value=[value])))
    text = make_tensor_proto(np.array(["{}"], dtype=object))
    writer.add_event(Event(step=0, summary=Summary(value=[Summary.Value(tag="args/text_summary", tensor=text)])))
    writer.close()
    return folder


def norms(
    *, number: int = 1500, spread: float = 0.2, level: float = 2.0, seed: int = 0, every: int = 1
) -> dict[int, float]:
    """Log-normal norms by step, in float32, as a log has them."""
    values = level * np.exp(spread * np.random.default_rng(seed).standard_normal(number))
    return {every * step: float(np.float32(value)) for step, value in enumerate(values)}


def expected(points: Mapping[int, float], *, first: int, quantile: float = 0.999, margin: float = 1.5) -> float:
    """The threshold from its definition, in float64: max(quantile x margin, 3 x median), up to 4 digits."""
    kept = np.array([value for step, value in points.items() if step >= first], dtype=np.float64)
    kept = kept[np.isfinite(kept) & (kept > 0)]
    exact = max(np.quantile(kept, quantile) * margin, 3 * np.median(kept))
    digits = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return float(digits.create_decimal(decimal.Decimal(float(exact))))


def command_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, str]]:
    """Runs the command in a folder of the test's own; gives the YAML, and what was printed. Draws only if asked to."""
    real = picture.can_draw

    def command(logdir: Path, *options: str, draws: bool = False) -> tuple[Any, str]:
        monkeypatch.setattr(report, "can_draw", real if draws else lambda: False)
        out = tmp_path / "made" / "thresholds.yaml"
        arguments = ["calibrate", str(logdir), "--out", str(out), "--picture", str(tmp_path / "made" / "norms.png")]
        status = main([*arguments, *options])
        printed = capsys.readouterr()
        if status:
            assert status == 2
            assert len(printed.err.splitlines()) == 1, "an error is one line"
            return None, printed.err
        load_callbacks(out)  # as it is
        return yaml.safe_load(out.read_text()), printed.out

    return command
