"""Runs with planted faults for tests of NumericsCallback: in one process or on ranks, in a plain loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stabilizer.callbacks import NumericsCallback
from stabilizer.numerics import KINDS as FINDING_KINDS
from stabilizer.numerics import NumericsFinding
from tests.localize_loops import Plan, grad_loc, loss_of_tokens, run
from tests.sharding import full

__all__ = [
    "KINDS",
    "MICRO_BATCH",
    "STEP",
    "WARMUP",
    "Trouble",
    "findings_of",
    "make_numerics",
    "plain_findings",
    "train",
    "weights",
]

#: Where the faults are.
STEP, WARMUP = 14, 12
MICRO_BATCH = 1
#: Planted in the data, in the loss of one rank, in its gradients after the backward passes, and in its weights.
KINDS = (
    "healthy",
    "token",
    "nan_token",
    "once",
    "nan_once",
    "differently",
    "reduction",
    "nan_weight",
    "flipped_weight",
)


def make_numerics(folder: Path | str, **options: Any) -> NumericsCallback:
    """One that is soon warm.

    Args:
        folder: For reports.
        **options: Of the callback.
    """
    defaults: dict[str, Any] = {
        "warmup_steps": WARMUP,
        "rule": {"name": "robust_log", "warmup_steps": WARMUP},
        "every_n_steps": 5,
        "check_parameters_every_n_steps": 5,
        "dump_dir": str(folder),
        "strict": True,
    }
    return NumericsCallback(**{**defaults, **options})


@dataclasses.dataclass
class Trouble:
    """A fault on one rank.

    Attributes:
        kind: One of `KINDS`.
        rank: This process.
        owner: Whose fault it is.
    """

    kind: str
    rank: int = 0
    owner: int = 0
    num_calls: int = 0

    @property
    def plan(self) -> dict[str, Any]:
        """What `Plan` plants."""
        factor = {"token": 3000.0, "nan_token": math.nan}.get(self.kind)
        bad = () if factor is None else ((self.owner, MICRO_BATCH, 1, 3),)
        return {"steps": STEP + 2, "faulty": STEP, "micro_batches": 2, "bad": bad, "factor": factor or 1.0}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, with a fault that a replay does not have, or has in another way."""
        self.num_calls += 1
        loss, fault = loss_of_tokens(model, batch), 2 * STEP + MICRO_BATCH + 1
        if self.rank != self.owner:
            return loss
        if self.kind in ("once", "nan_once") and self.num_calls == fault:
            return loss * (1e4 if self.kind == "once" else math.nan)
        if self.kind == "differently" and self.num_calls >= fault:
            return loss * 1e4 * self.num_calls
        return loss

    def on_step(self, step: int, model: nn.Module) -> None:
        """Before an optimizer step."""
        if self.rank != self.owner:
            return
        parameter = dict(model.named_parameters())[next(n for n, _ in model.named_parameters() if "up.weight" in n)]
        if self.kind == "reduction" and step == STEP:
            _local(parameter.grad).view(-1)[0] = math.nan
        if self.kind in ("nan_weight", "flipped_weight") and step == STEP - 1:
            value = math.nan if self.kind == "nan_weight" else 1e33
            _local(parameter.data).view(-1)[0] = value


def train(
    folder: Path | str,
    trouble: Trouble,
    *,
    strategy: str = "single",
    with_grad_loc: bool = False,
    callbacks: bool = True,
    on_step: Callable[[int, nn.Module], None] | None = None,
    **options: Any,
) -> tuple[list[NumericsFinding], nn.Module]:
    """A run with one fault.

    Args:
        folder: For reports.
        trouble: The fault.
        strategy: As of `Plan`.
        with_grad_loc: Whether GradLoc is there; it starts no search by itself.
        callbacks: Whether ours are there.
        on_step: Called before every optimizer step too.
        **options: Of the callback.

    Returns:
        What was found, and the model.
    """
    own = make_numerics(folder, **options)
    others = [grad_loc(Path(folder) / "grad_loc", trigger_ratio=1e9)] if with_grad_loc else []

    def before_step(step: int, model: nn.Module) -> None:
        trouble.on_step(step, model)
        if on_step is not None:
            on_step(step, model)

    model = run(
        Plan(strategy=strategy, **trouble.plan),
        [own, *others] if callbacks else [],
        rank=trouble.rank,
        loss_fn=trouble.loss,
        on_step=before_step,
    )
    return findings_of(own), model


def findings_of(callback: NumericsCallback) -> list[NumericsFinding]:
    """What was found, without what is said of the optimizer.

    Args:
        callback: After its run.
    """
    return [finding for finding in callback.findings if finding.kind in FINDING_KINDS]


def plain_findings(findings: list[NumericsFinding]) -> list[dict[str, Any]]:
    """Findings as ranks can be compared by them: numbers that are not finite are equal to themselves.

    Args:
        findings: Of a rank.
    """
    plain = [finding.to_plain() for finding in findings]
    return [{**one, "evidence": {name: repr(value) for name, value in one["evidence"].items()}} for one in plain]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole; a collective where they are sharded.

    Args:
        model: Wrapped or not.
    """
    return {name: full(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
