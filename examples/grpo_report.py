"""What the GRPO example says: when a run has collapsed, what was found, and a table of runs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table

from stabilizer.examples.grpo_faults import KINDS, Kind
from stabilizer.localize.incident import Incident
from stabilizer.localize.table import print_incident

__all__ = ["ARMS", "REPAIRS", "Arm", "Clip", "Run", "collapsed_at", "draw", "show_fault", "show_table", "summarize"]

Clip: TypeAlias = Literal["TokenClip", "TokenClip at 100", "SeqClip", "LayerClip"]
#: Which clip is made for which fault.
REPAIRS: dict[Kind, Clip] = {"token_ratio": "TokenClip", "sequence_ratio": "SeqClip", "layer": "LayerClip"}
_WINDOW, _PATIENCE = 5, 3
#: Of the picture: Okabe and Ito's colours, and dashes that differ as well; and where the first fault is.
_LINES = {
    "no faults": ("0.5", ":"),
    "none": ("#D55E00", "-"),
    "TokenClip": ("#E69F00", "-."),
    "TokenClip, SeqClip": ("#56B4E9", "--"),
    "all three": ("#0072B2", "-"),
}
_FIRST = 60


@dataclasses.dataclass(frozen=True)
class Arm:
    """One line of the table.

    Attributes:
        clips: Of ours.
        max_grad_norm: The trainer's own.
        has_faults: Whether anything goes wrong.
    """

    clips: tuple[Clip, ...] = ()
    max_grad_norm: float = 0.0
    has_faults: bool = True


ARMS = {
    "no faults": Arm(has_faults=False),
    "no faults, all three": Arm(("TokenClip", "SeqClip", "LayerClip"), has_faults=False),
    "none": Arm(),
    "max_grad_norm=1": Arm(max_grad_norm=1.0),
    "TokenClip": Arm(("TokenClip",)),
    "SeqClip": Arm(("SeqClip",)),
    "LayerClip": Arm(("LayerClip",)),
    "TokenClip, SeqClip": Arm(("TokenClip", "SeqClip")),
    "TokenClip at 100": Arm(("TokenClip at 100",)),
    "all three": Arm(("TokenClip", "SeqClip", "LayerClip")),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        clips: What was to keep it stable.
        seed: Of weights, prompts, samples and faults.
        rewards: Mean reward of every sampled batch, one every four steps.
        collapsed_at: Step at which the run was called off; `None` if it lasted.
        planted: Step, kind, row and position in the micro-batch of the faults; a sequence has no position.
        incidents: What GradLoc has found.
    """

    clips: tuple[Clip, ...]
    seed: int
    rewards: list[float]
    collapsed_at: int | None
    planted: list[tuple[int, str, int, int | None]]
    incidents: list[Incident]

    @property
    def end(self) -> float:
        """Mean reward of the last five batches."""
        return statistics.fmean(self.rewards[-_WINDOW:])

    def describe(self) -> str:
        """One line."""
        start = statistics.fmean(self.rewards[:_WINDOW])
        lasted = "" if self.collapsed_at is None else f", collapsed: called off at step {self.collapsed_at}"
        return f"reward {start:.2f} -> {self.end:.2f}{lasted}"

    def found(self) -> dict[str, dict[str, int]]:
        """How often each kind was planted, and the types of what was found at these steps.

        Returns:
            Kind -> "planted", and type -> number; what was found at other steps stands under "other".
        """
        kinds = {step: kind for step, kind, _, _ in self.planted}
        counted: dict[str, dict[str, int]] = {}
        for kind in kinds.values():
            counted.setdefault(kind, {"planted": 0})["planted"] += 1
        for incident in self.incidents:
            own = counted.setdefault(kinds.get(incident.step, "other"), {})
            own[incident.type] = own.get(incident.type, 0) + 1
        return counted

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "seed": self.seed,
            "rewards": self.rewards,
            "end": round(self.end, 4),
            "collapsed_at": self.collapsed_at,
            "found": self.found(),
        }


def collapsed_at(rewards: Sequence[float]) -> int | None:
    """Where a run has collapsed: its running mean over five batches is under half of its best, three times in a row.

    Args:
        rewards: Mean reward of every sampled batch.

    Returns:
        Number of the batch at which that is known.

    Example:
        >>> collapsed_at([0.4, 0.6, 0.8] * 3), collapsed_at([0.6] * 9 + [0.1] * 9)
        (None, 14)
    """
    means = [statistics.fmean(rewards[end - _WINDOW : end]) for end in range(_WINDOW, len(rewards) + 1)]
    best, in_a_row = 0.0, 0
    for number, mean in enumerate(means):
        best = max(best, mean)
        in_a_row = in_a_row + 1 if mean < best / 2 else 0
        if in_a_row == _PATIENCE:
            return number + _WINDOW - 1
    return None


def summarize(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Put runs together by seed.

    Args:
        runs: Name of an arm -> its runs.

    Returns:
        Plain types: name -> seed -> what `Run.as_dict` gives.
    """
    return {name: {str(run.seed): run.as_dict() for run in sorted(own, key=_seed)} for name, own in runs.items()}


def show_table(report: Mapping[str, Any]) -> None:
    """Print steps to collapse and rewards at the end.

    Args:
        report: With the setting, and arms as `summarize` gives them.
    """
    steps, arms = report["setting"]["steps"], report["arms"]
    seeds = list(next(iter(arms.values())))
    table = Table(title=f"Steps to collapse (and reward at the end) of {steps}")
    for column in ("", *(f"seed {seed}" for seed in seeds), "mean reward"):
        table.add_column(column, justify="right" if column else "left")
    for name, runs in arms.items():
        cells = [f"{runs[seed]['collapsed_at'] or '-'} ({runs[seed]['end']:.2f})" for seed in seeds]
        table.add_row(name, *cells, f"{statistics.fmean(runs[seed]['end'] for seed in seeds):.2f}")
    Console().print(table)


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw the rewards of some arms, one field a seed; needs matplotlib.

    Args:
        report: As of `show_table`.
        path: Of the PNG.
    """
    from matplotlib.figure import Figure

    seeds = list(report["arms"]["none"])
    figure = Figure(figsize=(11, 3.6), dpi=100, layout="constrained")
    fields = figure.subplots(1, len(seeds), sharey=True, squeeze=False)[0]
    for field, seed in zip(fields, seeds, strict=True):
        for name, (color, dashes) in _LINES.items():
            rewards = report["arms"][name][seed]["rewards"]
            means = [statistics.fmean(rewards[max(0, end - _WINDOW) : end]) for end in range(1, len(rewards) + 1)]
            field.plot([4 * number for number in range(len(means))], means, dashes, color=color, label=name)
            if report["arms"][name][seed]["collapsed_at"] is not None:
                field.plot(4 * (len(means) - 1), means[-1], "x", color=color, markersize=9, markeredgewidth=2)
        field.axvline(_FIRST, color="0.7", linewidth=1)
        field.set_title(f"seed {seed}")
        field.set_xlabel("optimizer step")
    fields[0].set_ylabel("reward (mean of 5 batches)")
    fields[-1].legend(fontsize=8, loc="lower left")
    figure.savefig(path, format="png")


def show_fault(kind: Kind, run: Run) -> None:
    """Print what GradLoc has found.

    Args:
        kind: What went wrong.
        run: With nothing to repair it.
    """
    own, console = [incident for incident in run.incidents if incident.type == KINDS[kind]], Console()
    if own:
        print_incident(own[0])
    steps = {step for step, *_ in run.planted}
    hits = sum(incident.step in steps for incident in own)
    console.print(
        f"{len(steps)} faults planted, {hits} of them found as {KINDS[kind]}; {len(run.incidents) - hits} other finds"
    )


def _seed(run: Run) -> int:
    return run.seed
