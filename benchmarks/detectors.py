#!/usr/bin/env python
"""What the loss detectors see, how soon, and how often they are wrong, beside the plain rules in use elsewhere.

python benchmarks/detectors.py                   # all of them
python benchmarks/detectors.py stabilizer        # some
python benchmarks/detectors.py --check           # status 1 if the package's detectors miss a target
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.loss_series import NOISES, Setting, Watcher, measure  # noqa: E402
from benchmarks.plain_detectors import FirstMaximum, MeanAndSigmas, PageHinkley, WindowMean  # noqa: E402
from benchmarks.reports import counted_misses, write_report  # noqa: E402
from stabilizer.detectors import LossDetector  # noqa: E402

__all__ = ["DETECTORS", "QUICK", "TARGETS", "Ours", "main", "misses"]

DEFAULT = "stabilizer"
#: Sizes with which figures mean nothing.
QUICK = Setting(healthy_runs=1, healthy_steps=500, num_runs=1, num_points=2)


class Ours:
    """The detectors of the package, as the benchmark sees them."""

    kinds = ("jump", "drift", "variance")

    def __init__(self) -> None:
        self.detector = LossDetector()

    def update(self, step: int, value: float) -> list[str]:
        """Take the next loss.

        Args:
            step: Of the loss.
            value: The loss.
        """
        return [found.kind for found in self.detector.update(step, value)]


DETECTORS: Mapping[str, Callable[[], Watcher]] = {
    DEFAULT: Ours,
    "mean + 6 sigma (128)": MeanAndSigmas,
    "2 x mean (100), 5 times": WindowMean,
    "10 x max of first 100": FirstMaximum,
    "Page-Hinkley": PageHinkley,
}

Figures = dict[str, dict[str, float]]
_FALSE = "false alarms per 10,000 healthy steps"
_JUMP = "lasting jump of 5 sigma, %"
_TRIALS = "bursts, NaN, first losses, lasting shifts"
#: Question -> what -> smallest and largest good value, for the package's detectors.
TARGETS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    _FALSE: {f"{name}: {kind}": (0, 0.5) for name in [*NOISES, "falling, normal"] for kind in Ours.kinds},
    _JUMP: {"normal, within 1 step": (99, 100)}
    | {f"{name}, within 5 steps": (98, 100) for name in ("Laplace", "t5", "t3")},
    "one-step spikes": {"normal, of 7 sigma seen, %": (99, 100)},
    "ramp of 5 sigma in 100 steps": {f"{name}, within 60, %": (98, 100) for name in NOISES},
    _TRIALS: {
        "30 of 100 steps at 12 sigma, scattered: seen, %": (99, 100),
        "30 of 100 steps at 12 sigma, in a row: seen, %": (99, 100),
        "a spike of 10 sigma 10 steps after a NaN: seen, %": (99, 100),
        "a lasting shift of 12 sigma: alarms from the 64th step on, % of steps": (0, 0.1),
        "a spike of 10 sigma 64 steps into that shift: seen, %": (99, 100),
        "1e6 first, 100 losses near 2.0, then 8.0: seen, %": (100, 100),
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        arguments: Of the command line.

    Returns:
        Exit status: 1 if `--check` was given and the package's detectors miss a target, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("detectors", nargs="*", metavar="detector", help=f"default all: {', '.join(DETECTORS)}")
    parser.add_argument("--check", action="store_true", help=f"status 1 if {DEFAULT!r} misses a target")
    parser.add_argument("--quick", action="store_true", help="a few short runs: the figures mean nothing")
    parser.add_argument("--output", type=Path, help="JSON file: how many targets each detector misses")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.detectors if name not in DETECTORS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no detector: choose from {', '.join(DETECTORS)}")
    names = options.detectors or list(DETECTORS)
    if options.check and DEFAULT not in names:
        names = [DEFAULT, *names]
    console = Console(width=None if sys.stdout.isatty() else 180)
    figures: dict[str, Figures] = {}
    for name in names:
        with console.status(f"measuring: {name}"):
            figures[name] = measure(DETECTORS[name], QUICK if options.quick else Setting())
    for question in next(iter(figures.values())):
        # Not as the table's title, which would wrap at its width.
        console.print(f"\n{question}", markup=False)
        console.print(_table(question, figures))
    if options.output is not None:
        judged = {name: [is_met for _, is_met in _judged(found)] for name, found in figures.items()}
        write_report(options.output, counted_misses("detectors", judged, DEFAULT), is_tiny=options.quick)
    found = misses(figures.get(DEFAULT, {}))
    for miss in found:
        console.print(f"missed by {DEFAULT}: {miss}")
    return int(options.check and bool(found))


def misses(figures: Figures) -> list[str]:
    """The targets that are missed.

    Args:
        figures: Of the package's detectors; what was not measured is not missed.

    Returns:
        A line a miss.
    """
    return [line for line, is_met in _judged(figures) if not is_met]


def _judged(figures: Figures) -> Iterator[tuple[str, bool]]:
    """A line for every figure that has a target, and whether it is met."""
    for question, targets in TARGETS.items():
        for what, (low, high) in targets.items():
            value = figures.get(question, {}).get(what)
            if value is not None:
                # NaN is in no interval.
                yield f"{question}: {what}: {value:.4g}, target {low:g} to {high:g}", low <= value <= high


def _table(question: str, figures: Mapping[str, Figures]) -> Table:
    table = Table()
    for name in ("", *figures):
        table.add_column(name, justify="right" if name else "left")
    for what in next(iter(figures.values()))[question]:
        table.add_row(what, *(_number(found[question].get(what)) for found in figures.values()))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if math.isfinite(value) else "never"


if __name__ == "__main__":
    sys.exit(main())
