"""All benchmarks, each in a process of its own, and one table of their figures in benchmarks/README.md.

python -m benchmarks                       # all but the long one, and the table
python -m benchmarks --quick               # likewise, with fewer runs: rougher figures
python -m benchmarks --long                # all of them: a quarter of an hour more
python -m benchmarks clipping rollout      # some: shown, not written
python -m benchmarks --quote               # nothing is measured: README.md quotes the table again
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.jobs import JOBS, ROOT, Job, Outcome, run_job
from benchmarks.page import COSTS, MARKS, costs, described, replace_between, table
from benchmarks.reports import environment
from benchmarks.timing import busy

__all__ = ["main"]

_PAGE = ROOT / "benchmarks" / "README.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the table, and let README.md quote it.

    Args:
        arguments: Of the command line.

    Returns:
        Exit status: 1 if a benchmark failed or, with `--check`, a limit is missed, else 0.
    """
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    if options.quote:
        return _quote(options.page, options.readme, console)
    chosen = [job for job in JOBS if _is_due(job, options)]
    start, warning = time.monotonic(), busy()
    outcomes = [_run(job, options, console) for job in chosen]
    head = described(
        environment(is_tiny=options.tiny),
        day=datetime.date.today(),
        seconds=time.monotonic() - start,
        warning=warning or busy(),
        is_quick=options.quick,
    )
    text = f"{head}\n\n{table(outcomes)}"
    sys.stdout.write(f"{text}\n")
    if options.benchmarks or (options.tiny and options.page == _PAGE):
        console.print("Nothing is written: these are not all benchmarks at full size.")
        is_unquoted = 0
    else:
        page = replace_between(options.page.read_text(encoding="utf-8"), MARKS, text)
        options.page.write_text(page, encoding="utf-8")
        console.print(f"Written to {options.page}", soft_wrap=True)
        is_unquoted = _quote(options.page, options.readme, console)
    has_failed = any(outcome.error is not None for outcome in outcomes)
    is_missed = any(figure.is_met is False for outcome in outcomes for figure in outcome.figures)
    return int(has_failed or (options.check and is_missed) or bool(is_unquoted))


def _parser() -> argparse.ArgumentParser:
    known = list(dict.fromkeys(job.benchmark for job in JOBS))

    def benchmark(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return name

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="*", type=benchmark, help=f"of {', '.join(known)}; nothing means all")
    parser.add_argument("--long", action="store_true", help="the long one as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit that was measured is missed")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try it out: the figures mean nothing")
    parser.add_argument("--quick", action="store_true", help="rougher figures in half the time")
    parser.add_argument("--quote", action="store_true", help="measure nothing; let README.md quote the table")
    parser.add_argument("--page", type=Path, default=_PAGE, help="where the table goes")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the page that quotes it")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder for JSON files")
    return parser


def _is_due(job: Job, options: argparse.Namespace) -> bool:
    return job.benchmark in options.benchmarks if options.benchmarks else options.long or not job.is_long


def _run(job: Job, options: argparse.Namespace, console: Console) -> Outcome:
    with console.status(f"measuring: {job.name}"):
        outcome = run_job(job, options.results, tiny=options.tiny, quick=options.quick)
    said = f"{len(outcome.figures)} figures" if outcome.error is None else f"failed, {outcome.error}"
    console.print(f"{job.name}: {said}, {outcome.seconds:.0f} s", markup=False, soft_wrap=True)
    return outcome


def _quote(page: Path, readme: Path, console: Console) -> int:
    """Let one page quote the other; 1 if it has no place for it."""
    text = readme.read_text(encoding="utf-8")
    try:
        new = replace_between(text, COSTS, costs(page.read_text(encoding="utf-8")))
    except ValueError as error:
        console.print(f"{readme.name} quotes nothing: {error}", markup=False, soft_wrap=True)
        return 1
    if new != text:
        readme.write_text(new, encoding="utf-8")
        console.print(f"Quoted in {readme}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
