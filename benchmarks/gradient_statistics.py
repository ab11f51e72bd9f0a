#!/usr/bin/env python
"""What gradient statistics cost, as ratios within one run: a table, and the same as JSON in benchmarks/results.

python benchmarks/gradient_statistics.py                     # everything
python benchmarks/gradient_statistics.py statistics import   # some rows
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

from benchmarks.command import command_line  # noqa: E402
from benchmarks.gpu import gpu_rows  # noqa: E402
from benchmarks.one_process import import_time, statistics_of_a_step  # noqa: E402
from benchmarks.timing import Figure  # noqa: E402
from benchmarks.two_processes import first_step, steps  # noqa: E402

ROWS: dict[str, Callable[..., list[Figure]]] = {
    "statistics": statistics_of_a_step,
    "first_step": first_step,
    "import": import_time,
    "gpu": gpu_rows,
    "steps": steps,
}
main = command_line(ROWS, title="What gradient statistics cost", name="gradient_statistics")


if __name__ == "__main__":
    sys.exit(main())
