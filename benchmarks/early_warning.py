#!/usr/bin/env python
"""Does the noise scale rise before the loss? Runs that become unstable for a known reason, and healthy ones.

python benchmarks/early_warning.py                       # seven healthy runs and nine others: about 15 minutes
python benchmarks/early_warning.py --quick               # to try it out: the figures mean nothing
python benchmarks/early_warning.py --output FOLDER       # the runs as JSON, the tables and the pictures
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

from benchmarks.reports import write_report  # noqa: E402
from benchmarks.timing import Figure  # noqa: E402
from benchmarks.unstable_runs import KINDS, Run, train  # noqa: E402

__all__ = ["crossing", "false_crossings", "frozen", "lead_figures", "main", "tables"]

CHANNELS = ("noise_scale", "variance", "layers")
#: Seeds of healthy runs that thresholds are frozen on, and of those that say how often they are crossed for nothing.
FROZEN_ON, TRIED_ON, SEEDS = (0, 1, 2, 3, 4), (5, 6), (10, 11, 12)
NUM_STEPS, START = 1300, 700
#: Before it a run has just begun, and nothing is usual.
SETTLED = 500


def frozen(runs: Sequence[Run], *, settled: int = SETTLED) -> dict[str, float]:
    """Thresholds: the largest excess of each channel in healthy runs, twice in a row as a rise needs it.

    Args:
        runs: Healthy ones.
        settled: First step that counts.
    """
    return {
        channel: max(min(pair) for run in runs for pair in _pairs(run, channel, start=settled)) for channel in CHANNELS
    }


def crossing(run: Run, channel: str, *, threshold: float, start: int, end: int) -> int | None:
    """The first step at which a channel is over its threshold, and was at the look before.

    Args:
        run: Any.
        channel: One of `CHANNELS`.
        threshold: Of the channel.
        start: First step.
        end: First step that does not count any more.
    """
    steps = [step for step in run.steps if start <= step < end]
    found = dict(zip(run.steps, run.excesses[channel], strict=True))
    pairs = itertools.pairwise(steps)
    return next((second for first, second in pairs if min(found[first], found[second]) > threshold), None)


def false_crossings(runs: Sequence[Run], channel: str, *, threshold: float, settled: int = SETTLED) -> tuple[int, int]:
    """How often a channel rises over its threshold in healthy runs, and in how many steps.

    Args:
        runs: Healthy ones that the threshold was not frozen on.
        channel: One of `CHANNELS`.
        threshold: Of the channel.
        settled: First step that counts.
    """
    num = 0
    for run in runs:
        is_over = [min(pair) > threshold for pair in _pairs(run, channel, start=settled)]
        num += sum(now and not before for before, now in itertools.pairwise([False, *is_over]))
    return num, sum(max(0, len(run.losses) - settled) for run in runs)


def tables(runs: Sequence[Run], *, settled: int = SETTLED) -> str:
    """The report, in Markdown.

    Args:
        runs: Of `train`; the healthy ones among them by their seeds.
        settled: First step that counts.
    """
    healthy = {run.seed: run for run in runs if run.kind == "healthy"}
    thresholds = frozen([healthy[seed] for seed in FROZEN_ON if seed in healthy], settled=settled)
    tried = [healthy[seed] for seed in TRIED_ON if seed in healthy]
    lines = ["| channel | threshold (times its usual value) | false rises per 10,000 healthy steps |", "|---|---|---|"]
    for channel in CHANNELS:
        num, steps = false_crossings(tried, channel, threshold=thresholds[channel], settled=settled)
        rate = f"{10_000 * num / steps:.1f} ({num} in {steps:,} steps)" if steps else "not measured"
        lines.append(f"| {channel} | {math.exp(thresholds[channel]):.2f} | {rate} |")
    alarms = sum(len(run.alarms) for run in healthy.values())
    steps = sum(len(run.losses) for run in healthy.values())
    lines += [f"| loss alarms | | {10_000 * alarms / max(1, steps):.1f} ({alarms} in {steps:,} steps) |", ""]
    lines += [
        "| run | loss alarm | noise_scale | variance | layers | first | findings of layers |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS[1:]:
        chosen = [run for run in runs if run.kind == kind]
        lines += [_row(run, thresholds) for run in chosen]
        lines.append(_summary(kind, chosen, thresholds))
    return "\n".join(lines) + "\n"


def lead_figures(runs: Sequence[Run], *, settled: int = SETTLED) -> list[Figure]:
    """How long before the loss alarm the first channel rose: a figure for every kind of fault.

    Args:
        runs: Of `train`; the healthy ones among them by their seeds.
        settled: First step that counts.
    """
    thresholds = frozen([run for run in runs if run.kind == "healthy" and run.seed in FROZEN_ON], settled=settled)
    figures = []
    for kind in KINDS[1:]:
        chosen = [run for run in runs if run.kind == kind and run.alarm_step is not None]
        found = [[lead for lead in _leads(run, thresholds).values() if lead is not None] for run in chosen]
        leads = [max(one) for one in found if one]
        how = f"seen before the loss alarm in {len(leads)} of {len(chosen)} runs that had one"
        value = float(statistics.median(leads)) if leads else None
        figures.append(Figure("runs", f"{kind}: first warning before the loss alarm", value, "steps", None, how))
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, report.

    Args:
        arguments: Of the command line.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(description="Does the noise scale rise before the loss?")
    parser.add_argument("--quick", action="store_true", help="short runs, to try it out: the figures mean nothing")
    parser.add_argument("--output", type=Path, help="folder for the runs, the tables and the pictures")
    parser.add_argument("--figures", type=Path, help="JSON file: how early each kind of fault was seen")
    options = parser.parse_args(arguments)
    size = {"num_steps": 340, "start": 320} if options.quick else {"num_steps": NUM_STEPS, "start": START}
    seeds = dict.fromkeys(KINDS[1:], SEEDS[:1] if options.quick else SEEDS)
    seeds["healthy"] = (FROZEN_ON[0], TRIED_ON[0]) if options.quick else FROZEN_ON + TRIED_ON
    jobs = [(kind, seed, size) for kind in KINDS for seed in seeds[kind]]
    # One thread each: a machine with two cores trains two at a time.
    context = multiprocessing.get_context("spawn")
    with context.Pool(max(1, min(len(jobs), (os.cpu_count() or 1)))) as pool:
        runs = pool.map(_train, jobs, chunksize=1)
    settled = 310 if options.quick else SETTLED
    report = tables(runs, settled=settled)
    sys.stdout.write(report)
    if options.figures is not None:
        write_report(options.figures, lead_figures(runs, settled=settled), is_tiny=options.quick)
    if options.output is not None:
        _write(options.output, runs, report)
    return 0


def _train(job: tuple[str, int, Mapping[str, int]]) -> Run:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("stabilizer").setLevel(logging.ERROR)
    os.environ["STABILIZER_PREFLIGHT"] = "0"
    kind, seed, size = job
    run = train(kind, seed=seed, **size)
    sys.stderr.write(f"{kind} {seed}: {len(run.losses)} steps, loss {run.losses[-1]:.2f}, alarm {run.alarm_step}\n")
    return run


def _pairs(run: Run, channel: str, *, start: int) -> list[tuple[float, float]]:
    values = [
        -math.inf if math.isnan(value) else value
        for step, value in zip(run.steps, run.excesses[channel], strict=True)
        if step >= start
    ]
    return list(itertools.pairwise(values)) or [(-math.inf, -math.inf)]


def _leads(run: Run, thresholds: Mapping[str, float]) -> dict[str, int | None]:
    """Channel -> how many steps before the loss alarm it rose, `None` if it did not."""
    alarm = run.alarm_step
    found = {}
    for channel in CHANNELS:
        end = len(run.losses) if alarm is None else alarm
        step = crossing(run, channel, threshold=thresholds[channel], start=run.start, end=end)
        found[channel] = None if step is None else end - step
    return found


def _row(run: Run, thresholds: Mapping[str, float]) -> str:
    leads = _leads(run, thresholds)
    known = {channel: lead for channel, lead in leads.items() if lead is not None}
    first = max(known, key=known.__getitem__) if known else "none"
    alarm = "none" if run.alarm_step is None else f"{run.alarm_step - run.start} steps after the start"
    findings = sorted({kind for step, kind in run.findings if run.start <= step < (run.alarm_step or len(run.losses))})
    shown = " | ".join("no" if leads[channel] is None else f"{leads[channel]} before" for channel in CHANNELS)
    return f"| {run.kind}, seed {run.seed} | {alarm} | {shown} | {first} | {', '.join(findings) or 'none'} |"


def _summary(kind: str, runs: Sequence[Run], thresholds: Mapping[str, float]) -> str:
    cells = []
    for channel in CHANNELS:
        leads = [lead for lead in (_leads(run, thresholds)[channel] for run in runs) if lead is not None]
        middle = f"median {statistics.median(leads):.0f}, {min(leads)} to {max(leads)}; " if leads else ""
        cells.append(f"{middle}{len(leads)} of {len(runs)}")
    return f"| **{kind}** | | {' | '.join(cells)} | | |"


def _write(folder: Path, runs: Sequence[Run], report: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "early_warning.md").write_text(report)
    (folder / "early_warning_runs.json").write_text(json.dumps([dataclasses.asdict(run) for run in runs]))
    for kind in KINDS[1:]:
        _draw([run for run in runs if run.kind == kind], folder / f"early_warning_{kind}.png")


def _draw(runs: Sequence[Run], path: Path) -> None:
    """Loss above, channels below, against the steps since something began to go wrong."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(runs), 6), layout="constrained")
    axes = figure.subplots(2, len(runs), squeeze=False, sharex="col")
    for column, run in enumerate(runs):
        top, bottom = axes[0][column], axes[1][column]
        window = range(max(0, run.start - 200), len(run.losses))
        top.plot([step - run.start for step in window], [run.losses[step] for step in window], lw=0.7, color="k")
        top.set_title(f"{run.kind}, seed {run.seed}", fontsize=9)
        top.set_ylabel("loss" if not column else "")
        shown = [number for number, step in enumerate(run.steps) if step >= run.start - 200]
        for channel in CHANNELS:
            steps = [run.steps[number] - run.start for number in shown]
            bottom.plot(steps, [run.excesses[channel][number] for number in shown], lw=1, label=channel)
        bottom.set_ylabel("ln(value / usual value)" if not column else "")
        bottom.set_xlabel("steps since the start of the fault")
        for axis in (top, bottom):
            axis.axvline(0, color="0.6", lw=0.8, ls=":")
            if run.alarm_step is not None:
                axis.axvline(run.alarm_step - run.start, color="tab:red", lw=0.8)
    axes[1][0].legend(fontsize=8)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
