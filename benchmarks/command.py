"""The command line of a benchmark: measures rows, prints a table, writes the same as JSON."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import timing
from benchmarks.reports import number, write_report
from benchmarks.timing import Figure, busy

__all__ = ["command_line", "run"]

#: Where all rows of a benchmark at full size are written.
RESULTS = Path(__file__).resolve().parent / "results"


def command_line(
    rows: Mapping[str, Callable[..., list[Figure]]], *, title: str, name: str
) -> Callable[[Sequence[str] | None], int]:
    """The `main` of a benchmark.

    Args:
        rows: As of `run`.
        title: Of the table.
        name: Of the benchmark's file of results.

    Returns:
        Takes arguments in the place of the command line's; gives the exit status.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        return run(rows, title=title, results=RESULTS / f"{name}.json", arguments=arguments)

    return main


def run(
    rows: Mapping[str, Callable[..., list[Figure]]],
    *,
    title: str,
    results: Path,
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure, print, write.

    Args:
        rows: Name -> what measures it; takes `tiny`.
        title: Of the table.
        results: Where all rows at full size are written.
        arguments: Of the command line.

    Returns:
        Exit status: 1 if `--check` was given and a target is missed, else 0.
    """
    options = _parser(rows, title).parse_args(arguments)
    chosen = list(dict.fromkeys(options.rows)) or list(rows)
    console = Console(width=None if sys.stdout.isatty() else 150)
    _warn_if_busy(console)
    figures: list[Figure] = []
    patience = timing.patience
    timing.patience = 0.0 if options.quick else patience
    try:
        for row in chosen:
            with console.status(f"measuring: {row}"):
                figures += rows[row](tiny=options.tiny)
    finally:
        timing.patience = patience
    _warn_if_busy(console)
    console.print(_table(figures, title))
    output = options.output
    if output is None and len(chosen) == len(rows) and not (options.tiny or options.quick):
        output = results
    if output is None:
        console.print("Nothing is written: these are not all rows at full size. --output FILE writes them.")
    else:
        write_report(output, figures, is_tiny=options.tiny)
        console.print(f"Written to {output}", soft_wrap=True)
    missed = [figure for figure in figures if figure.is_met is False]
    return 1 if options.check and missed else 0


def _parser(rows: Mapping[str, object], title: str) -> argparse.ArgumentParser:
    def row(name: str) -> str:
        if name not in rows:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(rows)}")
        return name

    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    # Not `choices`: for an argument that may be left out, argparse compares the empty list with them.
    parser.add_argument("rows", nargs="*", type=row, help=f"what to measure, of {', '.join(rows)}; nothing means all")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target that was measured is missed")
    parser.add_argument("--output", type=Path, help="JSON file; all rows at full size go to benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="no third run where two do not agree: rougher figures")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try it out: the figures mean nothing")
    return parser


def _warn_if_busy(console: Console) -> None:
    warning = busy()
    if warning is not None:
        console.print(f"[yellow]Warning:[/yellow] {warning}")


def _table(figures: Sequence[Figure], title: str) -> Table:
    caption = f"medians; torch {torch.__version__}, {os.cpu_count()} cores"
    table = Table(title=title, caption=caption)
    for column, justify in (("What", "left"), ("Figure", "right"), ("Target", "right"), ("Met", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("How it was measured", style="dim")
    for figure in figures:
        value = "not measured" if figure.value is None else number(figure.value, figure.unit)
        target = "" if figure.target is None else f"<= {number(figure.target, figure.unit)}"
        met = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[figure.is_met]
        table.add_row(figure.what, value, target, met, figure.how)
    return table
