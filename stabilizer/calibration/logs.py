"""Runs in a folder of logs: TensorBoard's event files, and CSV files with a column of steps."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stabilizer import tags
from stabilizer.calibration.mistakes import CalibrationError
from stabilizer.progress import Progress

__all__ = ["Run", "find_runs", "read_run"]

_EVENTS = "*tfevents*"
_STEP_COLUMNS = ("step", "global_step", "iteration", "iter")
_MEGABYTE = 1_000_000
_RECORD_BYTES = 16  # around every record of an event file: its length and two checksums

#: Takes the number of bytes that were read.
Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a log tells of one run.

    Attributes:
        path: Its folder, or its CSV file.
        series: Tag -> {step: value}. Of a step that was written twice (a run that was resumed) the later value.
        facts: What our callbacks have written of the run; empty if there is nothing.
    """

    path: Path
    series: dict[str, dict[int, float]]
    facts: dict[str, Any]


def find_runs(logdir: Path) -> list[list[Path]]:
    """The runs in a folder, the newest first.

    Args:
        logdir: A folder, at any depth above the logs; or one event file, or one CSV file.

    Returns:
        The files of each run: all event files of one folder, or one CSV file.

    Raises:
        CalibrationError: If there is no such folder, or nothing in it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "metrics.csv")
        ...     _ = path.write_text("step,grad_norm")
        ...     [[found]] = find_runs(Path(folder))
        >>> found.name
        'metrics.csv'
    """
    if logdir.is_file():
        return [[logdir]]
    if not logdir.is_dir():
        raise CalibrationError(f"{logdir}: no such folder")
    folders: dict[Path, list[Path]] = {}
    for path in sorted(logdir.rglob(_EVENTS)):
        if path.is_file():
            folders.setdefault(path.parent, []).append(path)
    runs = list(folders.values()) + [[path] for path in sorted(logdir.rglob("*.csv")) if path.is_file()]
    if not runs:
        raise CalibrationError(f"{logdir}: neither an event file of TensorBoard nor a CSV file in it")

    def age(files: list[Path]) -> tuple[float, bool, str]:
        # Two loggers of one run write into one folder at about the same time. Event files tell more, and come first.
        is_csv, folder = _is_csv(files[0]), files[0].parent
        newest = max(path.stat().st_mtime for path in (*files, *(() if is_csv else folder.glob("*.csv"))))
        return newest, not is_csv, str(files[0])

    return sorted(runs, key=age, reverse=True)


def read_run(files: Sequence[Path]) -> Run:
    """Read all numbers of a run. Shows progress on stderr.

    Args:
        files: Of one run; see `find_runs`.

    Raises:
        CalibrationError: If a file cannot be read.
    """
    num_bytes = sum(path.stat().st_size for path in files)
    what = files[0].name if len(files) == 1 else f"{len(files)} files"
    with Progress(f"reading {what}", total=num_bytes / _MEGABYTE, unit="MB") as progress:

        def advance(size: int) -> None:
            progress.advance(size / _MEGABYTE)

        if _is_csv(files[0]):
            return _read_csv(files[0], advance)
        return _read_events(files, advance)


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _read_csv(path: Path, advance: Advance) -> Run:
    series: dict[str, dict[int, float]] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = [name for name in reader.fieldnames or () if name]
            found = {name.strip().lower(): name for name in names}
            step_name = next((found[name] for name in _STEP_COLUMNS if name in found), None)
            for row in reader if step_name is not None else ():
                advance(sum(len(value) + 1 for value in row.values() if isinstance(value, str)))
                step = _number(row[step_name])
                if step is None or not math.isfinite(step):
                    continue
                for name in names:
                    value = None if name == step_name else _number(row[name])
                    if value is not None:
                        series.setdefault(name, {})[int(step)] = value
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CalibrationError(f"{path} cannot be read ({error})") from error
    return Run(path, series, {})


def _number(text: Any) -> float | None:
    """A number that may be NaN; `None` for an empty cell, words, or no cell at all."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _read_events(files: Sequence[Path], advance: Advance) -> Run:
    # The raw reader hands out records, whose sizes are the progress; the accumulators of TensorBoard would keep every
    # picture in memory as well.
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    series: dict[str, dict[int, float]] = {}
    facts: dict[str, Any] = {}
    for path in files:
        try:
            for record in RawEventFileLoader(str(path)).Load():
                advance(len(record) + _RECORD_BYTES)
                event = Event.FromString(record)
                for value in event.summary.value:
                    if value.tag in (tags.RUN, f"{tags.RUN}/text_summary"):
                        facts = _facts(value, facts)
                    elif (number := _scalar(value)) is not None:
                        series.setdefault(value.tag, {})[event.step] = number
        except Exception as error:  # whatever protobuf and TensorBoard raise at bytes that are none of theirs
            raise CalibrationError(f"{path} is no event file that can be read ({error})") from error
    return Run(files[0].parent, series, facts)


def _scalar(value: Any) -> float | None:
    """The number of a summary; `None` for pictures, text and the like."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.tensor.tensor_shape.dim:
        return None
    from tensorboard.compat.proto import types_pb2  # type: ignore[import-untyped]

    is_number = value.tensor.dtype in (types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE)
    return float(_array(value.tensor)) if is_number else None


def _facts(value: Any, before: dict[str, Any]) -> dict[str, Any]:
    try:
        text = _array(value.tensor).flat[0].decode()
        found = json.loads(text.strip("`\n").removeprefix("json"))  # it stands in a block of code
    except (ValueError, TypeError, IndexError):
        return before
    return found if isinstance(found, dict) else before


def _array(tensor: Any) -> Any:
    from tensorboard.util.tensor_util import make_ndarray  # type: ignore[import-untyped]

    return make_ndarray(tensor)
