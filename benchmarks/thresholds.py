#!/usr/bin/env python
"""What every threshold rule clips, and what it should not: one table a question, all rules side by side.

python benchmarks/thresholds.py                  # every rule, and three as published
python benchmarks/thresholds.py robust_log       # some
python benchmarks/thresholds.py --check          # status 1 if the default rule misses a target
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

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.published_rules import AdaGC, AutoClip, ZClip  # noqa: E402
from benchmarks.reports import counted_misses, write_report  # noqa: E402
from benchmarks.threshold_scenarios import (  # noqa: E402
    Clipper,
    Ours,
    Setting,
    healthy_run,
    incident,
    made_up_runs,
)

__all__ = ["RULES", "TARGETS", "main", "measure", "misses"]

DEFAULT = "robust_log"
RULES: Mapping[str, Callable[[], Clipper]] = {
    "robust_log": lambda: Ours("robust_log"),
    "mean_multiple": lambda: Ours("mean_multiple"),
    "quantile": lambda: Ours("quantile"),
    "zscore": lambda: Ours("zscore"),
    "fixed 1.0": lambda: Ours({"name": "fixed", "threshold": 1.0}),
    "ZClip": ZClip,
    "AutoClip": AutoClip,
    "AdaGC": AdaGC,
}
#: The total norm has a wider floor, as AdaptiveClipThreshold gives it.
_TOTAL = {"robust_log": lambda: Ours({"name": "robust_log", "min_ratio": 3.0})}

Figures = dict[str, dict[str, float]]
#: Question -> what it starts with -> smallest and largest good value, for the default rule.
TARGETS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "false clips, % of layer-steps": {"log-std": (0, 0.1)},
    "lasting shift: clipped from the 64th step on, %": {"": (0, 1)},
    "lasting shift: without a threshold, % of layer-steps": {"": (0, 0)},
    "one spike of x1000": {"threshold": (0, 1.2)},
    "30 spikes of 3 x the threshold within 100 steps, clipped (fewest)": {"": (30, 30)},
    "a NaN": {"spikes": (100, 100), "threshold": (0, 1.05)},
    "a recorded healthy run": {"layers": (0, 0.2), "total": (0, 0.1)},
    "the incident: 0.21 +- 0.03 for 47,000 steps, then 53.7": {"norm": (0, 1), "threshold": (0, 1.2)},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        arguments: Of the command line.

    Returns:
        Exit status: 1 if `--check` was given and the default rule misses a target, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", metavar="rule", help=f"default all: {', '.join(RULES)}")
    parser.add_argument("--check", action="store_true", help="status 1 if the default rule misses a target")
    parser.add_argument("--tiny", action="store_true", help="a few short runs: the figures mean nothing")
    parser.add_argument("--output", type=Path, help="JSON file: how many targets each rule misses")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.rules if name not in RULES]
    if unknown:
        parser.error(f"{unknown[0]!r} is no rule: choose from {', '.join(RULES)}")
    names = options.rules or list(RULES)
    if options.check and DEFAULT not in names:
        names = [DEFAULT, *names]
    # More threads only cost time: the vectors are short.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    setting = Setting(num_steps=420, num_runs=1, healthy_steps=100, incident_steps=100) if options.tiny else Setting()
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        figures: dict[str, Figures] = {}
        for name in names:
            with console.status(f"measuring: {name}"):
                figures[name] = measure(name, setting)
    finally:
        torch.set_num_threads(num_threads)
    for question in next(iter(figures.values())):
        # Not as the table's title, which would wrap at its width.
        console.print(f"\n{question}", markup=False)
        console.print(_table(question, figures))
    if options.output is not None:
        judged = {name: [is_met for _, is_met in _judged(found)] for name, found in figures.items()}
        write_report(options.output, counted_misses("thresholds", judged, DEFAULT), is_tiny=options.tiny)
    found = misses(figures.get(DEFAULT, {}))
    for miss in found:
        console.print(f"missed by {DEFAULT}: {miss}")
    return int(options.check and bool(found))


def measure(name: str, setting: Setting) -> Figures:
    """All figures of one rule.

    Args:
        name: Of the rule, as in `RULES`.
        setting: Sizes.

    Returns:
        Question -> what -> figure.
    """
    make = RULES[name]
    figures = made_up_runs(make(), setting)
    figures["a recorded healthy run"] = healthy_run(make(), _TOTAL.get(name, make)(), setting)
    figures["the incident: 0.21 +- 0.03 for 47,000 steps, then 53.7"] = incident(make(), setting)
    return figures


def misses(figures: Figures) -> list[str]:
    """The targets that are missed.

    Args:
        figures: Of the default rule; what was not measured is not missed.

    Returns:
        A line a miss.
    """
    return [line for line, is_met in _judged(figures) if not is_met]


def _judged(figures: Figures) -> Iterator[tuple[str, bool]]:
    """A line for every figure that has a target, and whether it is met."""
    for question, targets in TARGETS.items():
        for what, value in figures.get(question, {}).items():
            for start, (low, high) in targets.items():
                if what.startswith(start):
                    # NaN is in no interval.
                    yield f"{question}: {what}: {value:.4g}, target {low:g} to {high:g}", low <= value <= high


def _table(question: str, figures: Mapping[str, Figures]) -> Table:
    table = Table()
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")
    for what in next(iter(figures.values()))[question]:
        table.add_row(what, *(_number(found[question][what]) for found in figures.values()))
    return table


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "inf"
    return f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
