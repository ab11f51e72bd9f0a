"""Figures as JSON, with what they were measured on."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Figure

__all__ = ["counted_misses", "environment", "figures_of", "number", "write_report"]

#: Distributions whose version may move a figure.
_DISTRIBUTIONS = ("torch-stabilizer", "torch", "lightning", "accelerate", "transformers", "trl", "numpy")


def environment(*, is_tiny: bool) -> dict[str, Any]:
    """What figures are measured on and with.

    Args:
        is_tiny: Whether the sizes are tiny, so that the figures mean nothing.

    Returns:
        Plain types, by name.

    Example:
        >>> sorted(environment(is_tiny=True)["versions"])[-1]
        'trl'
    """
    return {
        "torch": torch.__version__,
        "versions": {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "is_tiny": is_tiny,
    }


def write_report(path: Path, figures: Iterable[Figure], *, is_tiny: bool) -> None:
    """Write figures as JSON, with what they were measured on.

    Args:
        path: File; its folder is made.
        figures: What was measured.
        is_tiny: Whether the sizes are tiny, so that the figures mean nothing.
    """
    report = {
        "environment": environment(is_tiny=is_tiny),
        "figures": [{**dataclasses.asdict(figure), "is_met": figure.is_met} for figure in figures],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def figures_of(path: Path) -> list[Figure]:
    """Read figures back.

    Args:
        path: What `write_report` wrote.

    Returns:
        The figures, in their order.
    """
    names = [field.name for field in dataclasses.fields(Figure)]
    return [Figure(**{name: figure[name] for name in names}) for figure in json.loads(path.read_text())["figures"]]


def counted_misses(row: str, judged: Mapping[str, Sequence[bool]], default: str) -> list[Figure]:
    """How many targets ours and others miss.

    Args:
        row: Which part of the benchmarks it belongs to.
        judged: Name -> whether each target is met.
        default: The name of ours, which shall miss none.

    Returns:
        A figure for each name.

    Example:
        >>> [figure] = counted_misses("rules", {"ours": [True, False]}, "ours")
        >>> figure.value, figure.target, figure.how
        (1.0, 0.0, 'of 2 targets')
    """
    return [
        Figure(
            row,
            f"targets missed by {name}",
            float(len(met) - sum(met)),
            "targets",
            0.0 if name == default else None,
            f"of {len(met)} targets",
        )
        for name, met in judged.items()
    ]


def number(value: float, unit: str) -> str:
    """A value as tables show it.

    Args:
        value: Of a figure.
        unit: Of the same figure.

    Returns:
        Three digits, with the unit behind all but ratios.

    Example:
        >>> number(0.4449, "ratio"), number(2, "collectives")
        ('0.445', '2 collectives')
    """
    return f"{value:.3g}" if unit == "ratio" else f"{value:.3g} {unit}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The name that Linux knows; elsewhere platform says what it can."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
