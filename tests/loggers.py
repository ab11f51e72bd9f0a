"""Loggers of both hosts that remember what they get: as it comes, in CSV files, and as W&B keeps it offline."""

from __future__ import annotations

import csv
import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from tests.event_files import read_run

__all__ = [
    "CSVTracker",
    "OfflineRun",
    "Points",
    "WandbTracker",
    "points_of",
    "read_csv",
    "read_event_files",
    "row_logger",
    "wandb_logger",
]

#: (tag, step) -> value.
Points = dict[tuple[str, int], float]

_AXES = frozenset({"epoch", "trainer/global_step", "stabilizer/step", "stabilizer/opt1_step"})


def points_of(rows: Sequence[tuple[Mapping[str, float], int]]) -> Points:
    """Points of rows; a point that is there twice is a mistake.

    Args:
        rows: Values and step, in the order of writing.
    """
    points: Points = {}
    for values, step in rows:
        for tag, value in values.items():
            if tag in _AXES:
                continue
            assert (tag, step) not in points, f"{tag} was written twice at step {step}"
            points[tag, step] = float(value)
    return points


class OfflineRun:
    """A run of W&B, as far as `log` and `define_metric` go.

    There is one row at a time. A call with a later step ends it; one with an earlier step is dropped; one without a
    step adds to it and ends it, which moves the run's own step on by one. A metric's axis is the run's own step, or
    another metric of the same row, whose last value is put in where the row lacks it.
    """

    def __init__(self) -> None:
        self.step = 0
        self.dropped: list[dict[str, Any]] = []
        self._row: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._axes: dict[str, str] = {}
        self._last: dict[str, Any] = {}

    def define_metric(self, name: str, step_metric: str | None = None, **options: Any) -> None:
        """Name the axis of a metric; "*" means all that have none of their own."""
        if step_metric is not None:
            self._axes[name] = step_metric

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Add to the row at hand, or to that of a step."""
        if step is not None and step < self.step:
            self.dropped.append(dict(data))
            return
        if step is not None and step > self.step:
            self._end_row()
            self.step = step
        self._row.update(data)
        if commit or (commit is None and step is None):
            self._end_row()

    def points(self) -> Points:
        """What its charts show."""
        self._end_row()
        charts = []
        for row in self._rows:
            for tag, value in row.items():
                axis = self._axes.get(tag, self._axes.get("*", "_step"))
                if axis != tag and tag != "_step" and axis in row:
                    charts.append(({tag: value}, row[axis]))
        return points_of(charts)

    def _end_row(self) -> None:
        if not self._row:
            return
        for tag in list(self._row):
            axis = self._axes.get(tag, self._axes.get("*"))
            if axis in self._last:
                self._row.setdefault(axis, self._last[axis])
        self._last.update(self._row)
        self._rows.append({**self._row, "_step": self.step})
        self._row = {}
        self.step += 1


class _Named:
    """What Lightning asks of a logger beside the metrics."""

    name, version = "recorded", "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not of interest."""


class _Rows(_Named):
    """Keeps rows as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep a row."""
        assert step is not None
        self.rows.append((dict(metrics), step))


class _Wandb(_Named):
    """Passes the step on as a metric, as Lightning's WandbLogger does."""

    def __init__(self) -> None:
        super().__init__()
        self.experiment = OfflineRun()
        self.experiment.define_metric("trainer/global_step")
        self.experiment.define_metric("*", step_metric="trainer/global_step", step_sync=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log a row, whose step is a metric."""
        self.experiment.log({**metrics, "trainer/global_step": step} if step is not None else metrics)


@functools.cache
def _logger_class(body: type[Any], package: str) -> type[Any]:
    base = importlib.import_module(f"{package}.loggers").Logger
    return type(body.__name__, (body, base), {"__module__": __name__})


def row_logger(package: str = "lightning.pytorch") -> Any:
    """A Lightning logger with all that it was given in `rows`.

    Args:
        package: Of the Trainer.
    """
    return _logger_class(_Rows, package)()


def wandb_logger(package: str = "lightning.pytorch") -> Any:
    """A Lightning logger that writes into an OfflineRun, `experiment`.

    Args:
        package: Of the Trainer.
    """
    return _logger_class(_Wandb, package)()


class WandbTracker(GeneralTracker):
    """Passes everything on to an OfflineRun, as Accelerate's own tracker does to a run of W&B."""

    name = "wandb"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.run = OfflineRun()

    @property
    def tracker(self) -> OfflineRun:
        """The run."""
        return self.run

    def log(self, values: Any, step: int | None = None, **options: Any) -> None:
        """Log a row."""
        self.run.log(values, step=step, **options)


class CSVTracker(GeneralTracker):
    """Writes a line for every value: tag, step, value.

    Args:
        path: The file.
    """

    name = "csv"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.path

    def log(self, values: Any, step: int | None = None, **options: Any) -> None:
        """Write lines."""
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows([tag, step, value] for tag, value in values.items())


def read_csv(path: Path) -> Points:
    """Points of a file of CSVTracker, or of Lightning's CSVLogger (one column a tag).

    Args:
        path: The file.
    """
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    if "step" not in lines[0]:
        return points_of([({tag: float(value)}, int(step)) for tag, step, value in lines])
    header, rows = lines[0], [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    tags = [tag for tag in header if tag != "step"]
    return points_of([({t: float(row[t]) for t in tags if row[t]}, int(row["step"])) for row in rows])


def read_event_files(folder: Path) -> Points:
    """Points of TensorBoard's files.

    Args:
        folder: Where they are.
    """
    scalars = read_run(folder).scalars
    return points_of([({tag: value}, step) for tag, points in scalars.items() for step, value in points.items()])
