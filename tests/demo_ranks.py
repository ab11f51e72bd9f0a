"""What the tests run in new processes: light, so that these start at once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

__all__ = ["fail", "write_environment"]


def fail(failing: int) -> None:
    """Raise on one rank, and wait for ever on the others.

    Args:
        failing: The rank.
    """
    if int(os.environ["RANK"]) == failing:
        raise RuntimeError("out of luck")
    time.sleep(600)


def write_environment(folder: str) -> None:
    """Write what the process finds in its environment to a file with the number of its rank.

    Args:
        folder: Where.
    """
    Path(folder, os.environ.get("RANK", "none")).write_text(json.dumps(dict(os.environ)))
