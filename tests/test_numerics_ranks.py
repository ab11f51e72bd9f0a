"""NumericsCallback on two ranks: each verdict with the right rank, the same on both, and nothing is changed."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import attach
from stabilizer.errors import StabilizerWarning
from stabilizer.localize.guard import Guard
from stabilizer.numerics import timing
from tests.accelerate_loops import make_accelerator
from tests.launcher import run_distributed
from tests.localize_loops import Plan, batches, loss_of_tokens, run
from tests.models import TinyTransformer
from tests.numerics_runs import (
    KINDS,
    MICRO_BATCH,
    STEP,
    Trouble,
    findings_of,
    make_numerics,
    plain_findings,
    train,
    weights,
)
from tests.test_numerics import EXPECTED

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")
each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.covers(feature="broken steps told apart", strategy=name, host="plain"))
        for name in ("ddp", "fsdp2")
    ],
)
#: Whose fault it is.
OWNER = 1
#: Of the quick run; and those after which the weights are compared with those of a run without it.
SHORT = {"ddp": ("nan_once", "differently", "reduction"), "fsdp2": ("token", "once")}
COMPARED = ("token", "reduction")


def _quiet() -> None:
    import warnings

    warnings.simplefilter("ignore", StabilizerWarning)


def _each_fault(
    rank: int, world_size: int, strategy: str, kinds: tuple[str, ...], compared: tuple[str, ...], folder: str
) -> tuple[dict[str, Any], list[str]]:
    _quiet()
    found, changed = {}, []
    for kind in kinds:
        trouble = Trouble(kind, rank=rank, owner=OWNER)
        findings, model = train(Path(folder) / kind, trouble, strategy=strategy, with_grad_loc=kind == "token")
        found[kind] = plain_findings(findings)
        if kind in compared:
            again = Trouble(kind, rank=rank, owner=OWNER)
            _, plain = train(Path(folder), again, strategy=strategy, callbacks=False)
            pairs = zip(weights(model).items(), weights(plain).values(), strict=True)
            differs = [name for (name, one), other in pairs if not torch.equal(one.nan_to_num(), other.nan_to_num())]
            changed += [f"{kind}: {name}" for name in differs]
    return found, changed


def check_each_fault(strategy: str, kinds: tuple[str, ...], compared: tuple[str, ...], folder: Path) -> None:
    """All verdicts, on both ranks alike."""
    results = run_distributed(_each_fault, strategy, kinds, compared, str(folder), timeout=300)
    (found, changed), (other, _) = results
    assert found == other, "the ranks do not say the same"
    assert changed == []
    assert found.pop("healthy", []) == []
    for kind, findings in found.items():
        [one] = findings
        assert (one["kind"], one["verdict"], one["layer"], one["micro_batch"]) == EXPECTED[kind], kind
        assert (one["step"], one["rank"]) == (STEP, OWNER), kind
        assert one["host"], kind
    if "token" in found:
        assert f"token at rank {OWNER}, micro-batch {MICRO_BATCH}, row 1, position 3" in found["token"][0]["text"]
    assert len(list(folder.rglob("report.json"))) == len(found), "one rank writes"


@each_strategy
def test_faults_have_their_verdicts_and_their_rank(strategy: str, tmp_path: Path) -> None:
    check_each_fault(strategy, SHORT[strategy], COMPARED, tmp_path)


@pytest.mark.slow
@each_strategy
def test_each_fault_has_its_verdict_and_its_rank(strategy: str, tmp_path: Path) -> None:
    check_each_fault(strategy, KINDS, (*COMPARED, "healthy", "once", "flipped_weight"), tmp_path)


def _two_faults(rank: int, world_size: int, strategy: str, folder: str) -> Any:
    """Rank 0 has a bad token, rank 1 a gradient that never comes again, in one step and micro-batch."""
    _quiet()

    class Mixed(Trouble):
        @property
        def plan(self) -> dict[str, Any]:
            return {**Trouble("token", owner=0).plan}

    findings, _ = train(folder, Mixed("once", rank=rank, owner=1), strategy=strategy)
    return plain_findings(findings)


@pytest.mark.covers(feature="broken steps told apart", strategy="ddp", host="plain")
def test_what_the_machine_does_on_one_rank_outweighs_bad_data_on_another(tmp_path: Path) -> None:
    own, other = run_distributed(_two_faults, "ddp", str(tmp_path), timeout=60)
    assert own == other
    assert [(one["verdict"], one["rank"]) for one in own] == [("transient", 1)]


class Trap:
    """Fails in a replay on one rank."""

    def __init__(self, rank: int, place: str) -> None:
        self.is_armed, self.place = rank == 1, place

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        loss = loss_of_tokens(model, batch)
        is_replay = self.calls > 2 * (STEP + 1)
        if self.is_armed and is_replay and self.place == "loss":
            raise RuntimeError("a planted failure")
        if self.is_armed and is_replay and self.place == "backward":
            loss.register_hook(self._fail)
        return loss

    def _fail(self, gradient: Tensor) -> None:
        raise RuntimeError("a planted failure")


def _failing(rank: int, world_size: int, strategy: str, place: str, folder: str) -> Any:
    _quiet()
    trap = Trap(rank, place)
    callback = make_numerics(folder)
    if place == "guard" and rank == 1:
        original = Guard.__enter__

        def enter(self: Any) -> Any:
            Guard.__enter__ = original  # type: ignore[method-assign]
            raise RuntimeError("a planted failure")

        Guard.__enter__ = enter  # type: ignore[method-assign]
    plan = Plan(strategy=strategy, **{**Trouble("token", owner=0).plan, "steps": STEP + 1})
    run(plan, [callback], rank=rank, loss_fn=trap.loss)
    return plain_findings(findings_of(callback))


@pytest.mark.parametrize(
    ("strategy", "place"),
    [
        pytest.param(
            "ddp", "guard", marks=pytest.mark.covers(feature="broken steps told apart", strategy="ddp", host="plain")
        ),
        pytest.param(
            "ddp",
            "loss",
            marks=[
                pytest.mark.slow,
                pytest.mark.covers(feature="broken steps told apart", strategy="ddp", host="plain"),
            ],
        ),
        pytest.param(
            "fsdp2",
            "loss",
            marks=[
                pytest.mark.slow,
                pytest.mark.covers(feature="broken steps told apart", strategy="fsdp2", host="plain"),
            ],
        ),
        pytest.param(
            "fsdp2",
            "backward",
            marks=pytest.mark.covers(feature="broken steps told apart", strategy="fsdp2", host="plain"),
        ),
    ],
)
def test_a_rank_that_fails_in_a_replay_leaves_nobody_waiting(strategy: str, place: str, tmp_path: Path) -> None:
    own, other = run_distributed(_failing, strategy, place, str(tmp_path), timeout=60)
    assert own == other
    [one] = own
    assert (one["kind"], one["verdict"], one["step"]) == ("spike", "unknown", STEP)
    assert "rank 1: RuntimeError: a planted failure" in one["text"]


def _accelerated(rank: int, world_size: int, kind: str, folder: str) -> Any:
    _quiet()
    trouble = Trouble(kind, rank=rank, owner=OWNER)
    accelerator = make_accelerator("ddp", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = TinyTransformer()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    callback = make_numerics(folder)
    plan = Plan("ddp", **trouble.plan)
    handle = attach(
        accelerator, model=model, optimizer=optimizer, callbacks=[callback], loss_fn=trouble.loss, log=lambda *_: None
    )
    with handle:
        for step, rows in enumerate(batches(plan, rank)):
            for batch in rows:
                with accelerator.accumulate(model):
                    handle.record_batch(batch)
                    accelerator.backward(trouble.loss(model, batch))
                    if accelerator.sync_gradients:
                        trouble.on_step(step, model)
                    optimizer.step()
                    optimizer.zero_grad()
    return plain_findings(findings_of(callback))


@pytest.mark.parametrize(
    "kind", ["nan_once", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("token", "differently"))]
)
@pytest.mark.covers(feature="broken steps told apart", strategy="ddp", host="accelerate")
def test_the_same_in_accelerate(kind: str, tmp_path: Path) -> None:
    own, other = run_distributed(_accelerated, kind, str(tmp_path), timeout=60)
    assert own == other
    [one] = own
    # The loop of Accelerate tells its losses.
    expected = ("nonfinite_loss", *EXPECTED[kind][1:]) if kind == "nan_once" else EXPECTED[kind]
    assert (one["kind"], one["verdict"], one["layer"], one["micro_batch"]) == expected
    assert (one["step"], one["rank"]) == (STEP, OWNER)


def _slow(rank: int, world_size: int, folder: str) -> Any:
    _quiet()
    timing._MIN_SECONDS = 0.25
    callback = make_numerics(folder, slow_ratio=3.0)

    def on_step(step: int, model: nn.Module) -> None:
        # Between the backward pass and our own collective.
        if step == 24 and rank == 1:
            time.sleep(1.5)

    try:
        run(Plan("ddp", steps=28, bad=(), micro_batches=1), [callback], rank=rank, on_step=on_step)
    finally:
        timing._MIN_SECONDS = 1.0
    return plain_findings(findings_of(callback))


@pytest.mark.covers(feature="broken steps told apart", strategy="ddp", host="plain")
def test_a_slow_collective_names_the_rank_that_came_last(tmp_path: Path) -> None:
    own, other = run_distributed(_slow, str(tmp_path), timeout=90)
    assert own == other
    [one] = [finding for finding in own if float(finding["evidence"]["slow_step"]) == 24]
    assert (one["kind"], one["rank"], one["verdict"]) == ("slow_collective", 1, None)
    assert float(one["evidence"]["seconds"]) > 1.0
    assert math.isfinite(float(one["evidence"]["step_seconds_skew"]))
    assert "rank 1 waited least" in one["text"]
