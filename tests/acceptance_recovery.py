"""Trainings that a fault would spoil, with recovery on: what they end with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from stabilizer.callbacks import AdaptiveClipThreshold, CheckpointGuardCallback, DrillCallback, NumericsCallback
from tests.acceptance_hosts import Losses, Plan, train

__all__ = ["FAULTS", "FAULT_STEP", "NUM_LAST", "NUM_STEPS", "Recovered", "recovered"]

FAULT_STEP, NUM_STEPS, NUM_LAST = 65, 200, 40
LADDER: list[Any] = ["alarm", {"name": "roll_back", "cooldown_steps": 0}, "stop"]

#: Name -> the fault, and whether a clip stands beside the recovery: without it nothing but going back helps.
FAULTS: dict[str, tuple[dict[str, Any], bool]] = {
    "nan_gradient": ({"kind": "nan_gradient", "num_steps": 4}, False),
    "inf_gradient": ({"kind": "inf_gradient", "num_steps": 4}, False),
    "learning_rate_jump": ({"kind": "learning_rate_jump", "factor": 300.0, "num_steps": 3}, False),
    "layer_spike": ({"kind": "layer_spike", "factor": 2000.0, "num_steps": 4}, True),
    "token_loss": ({"kind": "token_loss", "factor": 3000.0, "num_steps": 4}, True),
    "corrupted_batch": ({"kind": "corrupted_batch", "num_steps": 4}, True),
    "bit_flip_gradient": ({"kind": "bit_flip"}, True),
    "bit_flip_weight": ({"kind": "bit_flip", "target": "weight"}, True),
}


@dataclasses.dataclass
class Recovered:
    """What a run has left.

    Attributes:
        losses: Mean over all ranks, by step.
        history: What recovery has done: step and rung.
        findings: Kinds of what was found.
    """

    losses: list[float]
    history: list[tuple[int, str]]
    findings: list[str]

    @property
    def final_loss(self) -> float:
        """Mean of the last steps."""
        return sum(self.losses[-NUM_LAST:]) / NUM_LAST


def recovered(
    rank: int,
    num_ranks: int,
    host: str,
    fault: dict[str, Any] | None,
    folder: str | Path,
    clips: bool,
    ladder: list[Any] = LADDER,
) -> Recovered:
    """One training.

    Args:
        rank: This process.
        num_ranks: How many there are.
        host: One of `tests.acceptance_hosts.HOSTS`.
        fault: Without its step; `None` for a faultless run.
        folder: For checkpoints and reports.
        clips: Whether a clip is there.
        ladder: What recovery does.
    """
    folder, losses = Path(folder), Losses()
    guard = CheckpointGuardCallback(
        conditions=[{"name": "nonfinite", "num": 3}, {"name": "loss", "num_steps": 5, "window": 40}],
        ladder=ladder,
        strict=True,
    )
    faults = [] if fault is None else [{**fault, "step": FAULT_STEP}]
    numerics = NumericsCallback(dump_dir=str(folder / "numerics"), strict=True)
    callbacks: list[Any] = [guard, numerics, losses]
    callbacks += [DrillCallback(faults=faults, strict=True)]
    if clips:
        callbacks.append(AdaptiveClipThreshold(warmup_cap=None, strict=True))
    plan = Plan(host, NUM_STEPS, learning_rate=1e-2, checkpoints=folder / "checkpoints")
    train(plan, callbacks, rank=rank, num_ranks=num_ranks)
    history = [(entry.step, entry.rung) for entry in guard.recovery.history]
    return Recovered(losses.losses, history, [finding.kind for finding in numerics.findings])
