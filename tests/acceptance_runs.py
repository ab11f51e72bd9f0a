"""Trainings with faults on purpose on every host of the acceptance matrix: what each of them was found to be."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stabilizer.callbacks import AdaptiveClipThreshold, DrillCallback, GradLocCallback, NumericsCallback
from tests.acceptance_hosts import LENGTH, MICRO_BATCHES, ROWS, Losses, Plan, train

__all__ = ["KINDS", "NUM_SLOW_STEPS", "SLOW_KINDS", "WARMUP", "Case", "Found", "cases", "run"]

WARMUP, GAP = 24, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault, and what is to be said of it.

    Attributes:
        name: Row of the matrix.
        fault: As a drill takes it.
        verdict: Column of the matrix.
        kinds: Of the finding, one of these.
        layer: Who is to be named; `None` where that is nobody's to know.
        tokens: Rows, or rows and positions, that are to be named.
    """

    name: str
    fault: dict[str, Any]
    verdict: str
    kinds: tuple[str, ...]
    layer: str | None = None
    tokens: tuple[tuple[int, ...], ...] = ()


REPEATS, OTHERWISE, ONCE = "repeats", "nondeterministic", "transient"
#: Row of the matrix -> kind of the fault and its own fields, what is to be said of it, and of what.
KINDS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "nan_gradient": ({"kind": "nan_gradient"}, REPEATS, ("nonfinite_gradient",)),
    "inf_gradient": ({"kind": "inf_gradient"}, REPEATS, ("nonfinite_gradient",)),
    "layer_spike": ({"kind": "layer_spike", "factor": 2000.0}, REPEATS, ("spike",)),
    "layer_spike_differently": (
        {"kind": "layer_spike", "factor": 2000.0, "repeats": "differently"},
        OTHERWISE,
        ("spike",),
    ),
    "layer_spike_once": ({"kind": "layer_spike", "factor": 2000.0, "repeats": "never"}, ONCE, ("spike",)),
    "token_loss": ({"kind": "token_loss", "factor": 3000.0}, REPEATS, ("spike",)),
    "corrupted_batch": ({"kind": "corrupted_batch", "factor": 1000.0}, REPEATS, ("spike",)),
    # A number of 1e35 is finite, and the sum of its square is not.
    "bit_flip_gradient": ({"kind": "bit_flip"}, ONCE, ("spike", "nonfinite_gradient")),
    "bit_flip_weight": (
        {"kind": "bit_flip", "target": "weight"},
        ONCE,
        ("spike", "nonfinite_gradient", "nonfinite_loss"),
    ),
}
#: In a run of its own, with a gradient scaler and nothing else wrong.
SLOW_KINDS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "stuck_loss_scale": (
        {"kind": "stuck_loss_scale", "step": 60, "num_steps": 14},
        "stuck_loss_scale",
        ("stuck_loss_scale",),
    ),
    "learning_rate_jump": (
        {"kind": "learning_rate_jump", "factor": 50.0, "step": 118},
        "learning_rate_jump",
        ("learning_rate_jump",),
    ),
}
NUM_SLOW_STEPS = 119


def cases(names: Sequence[str], *, seed: int, num_ranks: int, prefix: str) -> list[Case]:
    """Faults one after another, each at a place of its own.

    Args:
        names: Rows of the matrix, in the order of the run.
        seed: Of the places.
        num_ranks: Of the run.
        prefix: Before the names of layers.
    """
    draw, found = random.Random(seed), []
    for number, name in enumerate(names):
        own, verdict, kinds = {**KINDS, **SLOW_KINDS}[name]
        fault = {"step": WARMUP + 2 + GAP * number, **own}
        layer, tokens = None, ()
        if name == "stuck_loss_scale":
            fault |= {"step": fault["step"] + draw.randrange(20), "factor": 2.0 ** -draw.randrange(2, 24)}
        elif name == "learning_rate_jump":
            fault["factor"] = draw.choice([10.0, 50.0, 1000.0])
        else:
            fault |= {"rank": draw.randrange(num_ranks), "micro_batch": draw.randrange(MICRO_BATCHES)}
        if fault["kind"] in ("nan_gradient", "inf_gradient", "layer_spike", "bit_flip"):
            layer = fault["layer"] = f"{prefix}layers.{draw.randrange(2)}"
        if fault.get("target") == "weight":
            # A huge number elsewhere may saturate what comes after it, and be seen in no gradient.
            layer, fault["layer"] = None, f"{prefix}lm_head"
        if fault["kind"] == "token_loss":
            tokens = ((draw.randrange(ROWS), draw.randrange(LENGTH)),)
            fault["token"] = list(tokens[0])
        if fault["kind"] == "corrupted_batch":
            tokens = ((draw.randrange(ROWS),),)
            fault["token"] = list(tokens[0])
        found.append(Case(name, fault, verdict, kinds, layer, tokens))
    return found


@dataclasses.dataclass
class Found:
    """What a run has left on a rank.

    Attributes:
        findings: As plain types, in the order of the run.
        tokens: Step -> (rank, micro-batch, row, position) of those that were named.
        losses: Mean over all ranks, by step.
    """

    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tokens: dict[int, list[tuple[int, int, int, int | None]]] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)


def run(
    rank: int,
    num_ranks: int,
    host: str,
    faults: Sequence[dict[str, Any]],
    num_steps: int,
    folder: str | Path,
    is_scaled: bool = False,
    slow_ratio: float = 1000.0,
) -> Found:
    """One training.

    Args:
        rank: This process.
        num_ranks: How many there are.
        host: One of HOSTS.
        faults: Of the drill.
        num_steps: Optimizer steps.
        folder: For reports.
        is_scaled: Whether there is a gradient scaler.
        slow_ratio: See `NumericsCallback`; a busy machine is no fault on purpose.
    """
    rule = {"name": "robust_log", "warmup_steps": 20}
    losses = Losses()
    # It looks at what is not finite by itself, and at nothing else unless it is asked.
    locating = GradLocCallback(
        rule=rule,
        trigger_ratio=1e30,
        warmup_steps=20,
        cooldown_steps=0,
        tap="model.lm_head" if host.startswith("lightning") else "lm_head",
        dump_dir=str(Path(folder) / "incidents"),
        position_map="never",
        strict=True,
    )
    numerics = NumericsCallback(
        rule=rule,
        warmup_steps=20,
        cooldown_steps=0,
        slow_ratio=slow_ratio,
        dump_dir=str(Path(folder) / "numerics"),
        strict=True,
    )
    clip = AdaptiveClipThreshold(rule=rule, warmup_cap=None, on_spike="skip_step", strict=True)
    callbacks = [locating, numerics, clip, DrillCallback(faults=list(faults), strict=True), losses]
    train(Plan(host, num_steps, is_scaled=is_scaled), callbacks, rank=rank, num_ranks=num_ranks)
    return Found(
        [finding.to_plain() for finding in numerics.findings],
        {
            incident.step: [(one.rank, one.micro_batch, one.row, one.position) for one in incident.tokens]
            for incident in locating.incidents
        },
        losses.losses,
    )
