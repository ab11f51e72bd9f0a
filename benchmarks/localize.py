#!/usr/bin/env python
"""What a search costs beside the published one, what GradLoc costs while all is well, and how its passes grow.

python benchmarks/localize.py           # everything
python benchmarks/localize.py --check   # exit status 1 if a target is missed
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
from benchmarks.localize_dormant import dormant, exchanged  # noqa: E402
from benchmarks.localize_growth import growth  # noqa: E402
from benchmarks.localize_search import ddp, fsdp2  # noqa: E402
from benchmarks.timing import Figure  # noqa: E402

__all__ = ["ROWS", "main"]

TITLE = "What finding the tokens behind a spike costs"

ROWS: dict[str, Callable[..., list[Figure]]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "dormant": dormant,
    "exchanged": exchanged,
    "growth": growth,
}
main = command_line(ROWS, title=TITLE, name="localize")


if __name__ == "__main__":
    sys.exit(main())
