"""Every benchmark as a process of its own with a time limit, so that one which fails or hangs costs one row."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.limited import run_limited
from benchmarks.reports import figures_of
from benchmarks.timing import Figure

__all__ = ["INSIDE_OTHERS", "JOBS", "Job", "Outcome", "run_job"]

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Job:
    """One benchmark, or one row of it.

    Attributes:
        benchmark: File of benchmarks/, without its ending.
        row: Argument that chooses the row; empty for all of it.
        seconds: Time limit, several times what an idle machine of two cores needs.
        tiny: Option for sizes whose figures mean nothing.
        quick: Option for rougher figures in less time; empty if there is none.
        output: Option for the JSON file.
        is_long: Left out unless asked for.
    """

    benchmark: str
    row: str = ""
    seconds: float = 300
    tiny: str = "--tiny"
    quick: str = "--quick"
    output: str = "--output"
    is_long: bool = False

    @property
    def name(self) -> str:
        """Benchmark and row.

        Example:
            >>> Job("clipping", "one_process").name
            'clipping one_process'
        """
        return f"{self.benchmark} {self.row}".rstrip()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        job: The job.
        figures: What it measured; nothing if it failed.
        error: What went wrong; `None` if nothing did.
        seconds: It took.
    """

    job: Job
    figures: Sequence[Figure]
    error: str | None
    seconds: float


#: In the order of the table.
JOBS = (
    *(Job("gradient_statistics", row, 600) for row in ("statistics", "first_step", "import", "gpu", "steps")),
    Job("clipping", "one_process", 600),
    Job("clipping", "two_processes", 600),
    *(Job("localize", row, 600) for row in ("ddp", "fsdp2", "dormant", "exchanged", "growth")),
    Job("sensors", seconds=600),
    Job("monitors", seconds=600),
    Job("noise_scale"),
    Job("trainer", seconds=600),
    Job("rollout"),
    Job("thresholds", seconds=600, quick=""),
    Job("detectors", seconds=600, tiny="--quick", quick=""),
    Job("early_warning", seconds=3600, tiny="--quick", quick="", output="--figures", is_long=True),
)
#: Files that can be run by hand, and are part of another job's figures.
INSIDE_OTHERS = {"search_growth": "localize growth"}


def run_job(job: Job, results: Path, *, tiny: bool = False, quick: bool = False) -> Outcome:
    """Run one benchmark in a process of its own, and end it and its children when its time is up.

    Args:
        job: What to run.
        results: Folder for its JSON file.
        tiny: Try it out.
        quick: Rougher figures in less time.

    Returns:
        Its figures, or what went wrong.
    """
    path = results / f"{job.name.replace(' ', '-')}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "benchmarks" / f"{job.benchmark}.py"), *([job.row] if job.row else [])]
    command += [job.output, str(path), *([job.tiny] if tiny else []), *([job.quick] if quick and job.quick else [])]
    start = time.monotonic()
    error = _run(command, seconds=job.seconds)
    figures: list[Figure] = []
    if error is None:
        try:
            figures = figures_of(path)
        except (OSError, ValueError, KeyError) as wrong:
            error = f"no figures: {wrong!r}"
    return Outcome(job, figures, error, time.monotonic() - start)


def _run(command: Sequence[str], *, seconds: float) -> str | None:
    """What went wrong; `None` if nothing did."""
    environment = {"STABILIZER_PREFLIGHT": "0", "STABILIZER_SUMMARY": "0", **os.environ}
    try:
        done = run_limited(command, cwd=ROOT, environment=environment, seconds=seconds)
    except TimeoutError as error:
        return str(error)
    if done.returncode == 0:
        return None
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "nothing was told")
    return f"exit status {done.returncode}: {last.strip()}"
