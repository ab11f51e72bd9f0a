#!/usr/bin/env python
"""How the passes of the search grow with the number of units.

python benchmarks/search_growth.py             # 1,000 to 10,000,000 units
python benchmarks/search_growth.py --tiny      # a few, to try it out
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the project.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor  # noqa: E402

from stabilizer.localize.search import Answer, Finding, Request, search  # noqa: E402

__all__ = ["Counted", "count_passes", "main"]

_SIZES = (10**3, 10**4, 10**5, 10**6, 10**7)
_FEATURES, _OUTPUTS = 2, 2
_SPIKE = 100.0
_MAX_PASSES = 256


@dataclasses.dataclass(frozen=True)
class Counted:
    """One search.

    Attributes:
        num_units: Searched.
        num_bad: Planted.
        is_hidden: Whether the scores of these are average.
        num_passes: After the replay.
        is_exact: Whether they were found, and nothing else.
        seconds: Of the search, its passes included.
    """

    num_units: int
    num_bad: int
    is_hidden: bool
    num_passes: int
    is_exact: bool
    seconds: float


class _Layer:
    """A linear layer on many units, whose output goes through a gate: one forward, many backward passes.

    A bad unit that shows has a large gradient at the gate; one that does not has a large input, which is in its
    Jacobian.
    """

    def __init__(self, num_units: int, num_bad: int, *, is_hidden: bool) -> None:
        generator = torch.Generator().manual_seed(num_units + num_bad)
        inputs = torch.randn(num_units, _FEATURES, generator=generator)
        slopes = torch.randn(num_units, _OUTPUTS, generator=generator)
        self.bad = torch.randperm(num_units, generator=generator)[:num_bad]
        # The sum of so many healthy gradients is as large as the square root of their number.
        factor = _SPIKE * math.sqrt(num_units / num_bad)
        (inputs if is_hidden else slopes)[self.bad] *= factor
        self.weight = torch.zeros(_FEATURES, _OUTPUTS, requires_grad=True)
        self.arrived: Tensor | None = None
        self.open: Tensor | None = None
        outputs = inputs @ self.weight
        outputs.register_hook(self._gate)
        # Linear too: the gradient at the gate is what it is multiplied by.
        self.loss = (outputs * slopes).sum()

    def _gate(self, gradient: Tensor) -> Tensor:
        if self.open is None:
            self.arrived = gradient.norm(dim=-1)
            return gradient
        return torch.where(self.open[:, None], gradient, 0)

    def norm(self, opened: Tensor | None) -> float:
        """One pass."""
        self.open = opened
        (gradient,) = torch.autograd.grad(self.loss, self.weight, retain_graph=True)
        return float(gradient.norm())


def count_passes(num_units: int, num_bad: int, *, is_hidden: bool) -> Counted:
    """Search a layer for planted units.

    Args:
        num_units: Of the layer.
        num_bad: How many are planted.
        is_hidden: Whether their scores are average.

    Returns:
        What it took.
    """
    layer = _Layer(num_units, num_bad, is_hidden=is_hidden)
    norm = layer.norm(None)
    start = time.perf_counter()
    assert layer.arrived is not None
    hunt = search(layer.arrived, norm=norm, limit=norm / _SPIKE * 3, max_passes=_MAX_PASSES)
    try:
        request: Request = next(hunt)
        while True:
            request = hunt.send(Answer(layer.norm(request.open)))
    except StopIteration as end:
        found: Finding = end.value
    seconds = time.perf_counter() - start
    is_exact = found.verdict == "tokens" and set(found.units) == set(layer.bad.tolist())
    return Counted(num_units, num_bad, is_hidden, found.num_passes, is_exact, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        arguments: Of the command line.

    Returns:
        Exit status: 1 if a search found anything but what was planted, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few units, to try it out")
    sizes = _SIZES[:2] if parser.parse_args(arguments).tiny else _SIZES
    table = Table(title="Passes of a search after the replay", caption="log2: logarithm of the number of units")
    for column in ("Units", "log2", "Bad", "Their scores", "Passes", "Exactly these", "Seconds"):
        table.add_column(column, justify="left" if column == "Their scores" else "right")
    is_exact = True
    for is_hidden in (False, True):
        for num_bad in (1, 5):
            # Five that are hidden among the most units would take more time than all the others.
            for num_units in sizes[: -1 if is_hidden and num_bad > 1 else None]:
                counted = count_passes(num_units, num_bad, is_hidden=is_hidden)
                is_exact &= counted.is_exact
                table.add_row(*_cells(counted))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return int(not is_exact)


def _cells(counted: Counted) -> list[str]:
    return [
        f"{counted.num_units:,}",
        f"{math.log2(counted.num_units):.1f}",
        str(counted.num_bad),
        "average" if counted.is_hidden else "large",
        str(counted.num_passes),
        "yes" if counted.is_exact else "no",
        f"{counted.seconds:.2f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
