"""NumericsCallback in Trainers of Lightning and transformers: each verdict, and a fit that shows no trace of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import Trainer

from stabilizer.callbacks import NumericsCallback, StabilizerTrainerCallback
from tests.lightning_models import PACKAGES
from tests.localize_loops import Plan
from tests.numerics_runs import MICRO_BATCH, STEP, findings_of, make_numerics
from tests.stateful import differences
from tests.test_grad_loc_lightning import fit, left, make_module, trainer_for
from tests.trainer_runs import make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning"),
    pytest.mark.filterwarnings("ignore:Encountered .nan. values:UserWarning"),  # of a metric of the module
]
FAULT = 2 * STEP + MICRO_BATCH + 1
#: Fault -> kind and verdict.
EXPECTED = {
    "token": ("spike", "repeats"),
    "nan_token": ("nonfinite_loss", "repeats"),
    "once": ("spike", "transient"),
    "nan_once": ("nonfinite_loss", "transient"),
    "differently": ("spike", "nondeterministic"),
}


def faulty_module(kind: str, package: str = PACKAGES[0]) -> Any:
    """A module whose training_step has a fault."""
    factor = {"token": 3000.0, "nan_token": math.nan}.get(kind, 1.0)
    plan = Plan(
        steps=STEP + 2, faulty=STEP, bad=((0, MICRO_BATCH, 1, 3),), factor=factor, micro_batches=2, rows=2, length=6
    )
    module = make_module(package, plan=plan)
    original, num_calls = module.training_step, 0

    def step(batch: Any, batch_idx: int) -> Any:
        nonlocal num_calls
        num_calls += 1
        output = original(batch, batch_idx)
        if kind in ("once", "nan_once") and num_calls == FAULT:
            output["loss"] = output["loss"] * (1e4 if kind == "once" else math.nan)
        if kind == "differently" and num_calls >= FAULT:
            output["loss"] = output["loss"] * 1e4 * num_calls
        return output

    module.training_step = step
    return module


@pytest.mark.parametrize(
    ("package", "kind"),
    [*((PACKAGES[0], kind) for kind in EXPECTED), (PACKAGES[1], "once")],
)
@pytest.mark.covers(feature="broken steps told apart", strategy="single", host="lightning")
def test_the_verdict_on_each_fault_in_lightning(package: str, kind: str, tmp_path: Path) -> None:
    module, callback = faulty_module(kind, package), make_numerics(tmp_path)
    trainer_for(module, [callback], package=package).fit(module)
    [finding] = findings_of(callback)
    assert (finding.kind, finding.verdict) == EXPECTED[kind]
    assert (finding.step, finding.rank, finding.micro_batch) == (STEP, 0, MICRO_BATCH)


@pytest.mark.parametrize("kind", ["token", "once"])
def test_a_fit_with_an_incident_is_the_fit_without_it(kind: str, tmp_path: Path) -> None:
    without = fit([], module=faulty_module(kind))
    module, callback = faulty_module(kind), make_numerics(tmp_path)
    trainer = trainer_for(module, [callback])
    trainer.fit(module)
    assert len(findings_of(callback)) == 1
    assert differences(left(trainer, module), without) == []


def faulty_trainer(kind: str) -> type[Trainer]:
    """A Trainer whose loss is wrong in one micro-batch, or from that one on."""
    num_calls = 0  # not an attribute: those are put back after a replay

    class Faulty(Trainer):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            loss: Tensor = super().compute_loss(*args, **options)
            is_wrong = num_calls == FAULT if kind == "once" else num_calls >= FAULT
            return loss * 1e4 if is_wrong else loss

    return Faulty


@pytest.mark.parametrize(("kind", "verdict"), [("once", "transient"), ("always", "repeats")])
@pytest.mark.covers(feature="broken steps told apart", strategy="single", host="transformers")
def test_the_same_in_transformers(kind: str, verdict: str, tmp_path: Path) -> None:
    callback: NumericsCallback = make_numerics(tmp_path / "reports")
    trainer = make_trainer(
        "single",
        tmp_path,
        kind=faulty_trainer(kind),
        callbacks=[StabilizerTrainerCallback([callback])],
        max_steps=STEP + 1,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
        learning_rate=1e-3,
    )
    trainer.train()
    [finding] = findings_of(callback)
    assert (finding.kind, finding.verdict, finding.step, finding.micro_batch) == ("spike", verdict, STEP, MICRO_BATCH)
