"""Both clips under every strategy and on every host: what the optimizer gets equals one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, StabilizerCallback, StepContext, attach
from stabilizer.names import clean_name
from tests import accelerate_loops
from tests.clip_reference import Clipped, clipped_run, worst_error
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, expected_batches, make_module, make_trainer
from tests.models import token_batch
from tests.reference_run import LEARNING_RATE
from tests.spread import CASES, backward, spread, whole_gradients
from tests.tiny_loops import no_log

TOLERANCE = 1e-5
NUM_STEPS = 4
#: Some layers and some totals of these runs are over their limits, and some are not.
LAYER_LIMIT, FIRST_LIMIT, TOTAL_LIMITS = 0.85, 1.0, (2.0, 2.0, 3.0, 1.2)


class Seen(StabilizerCallback):
    """Remembers every norm that is left of each layer and in total, as planned and as said afterwards."""

    after_every_n_steps = (1,)

    def __init__(self) -> None:
        super().__init__(strict=True)
        self.rows: list[dict[str, Any]] = []

    def on_gradients(self, context: StepContext) -> None:
        """Note the plan, when all others have been asked."""
        names, plan = context.store.layer_names, context.plan
        planned = dict(zip(names, plan.norms().tolist(), strict=True))
        raw = context.store.total_norm.item()
        self.rows.append({"norms": planned, "total": plan.total_norm().item(), "raw": raw})

    def on_step_end(self, context: StepContext) -> None:
        """Note what the optimizer got."""
        assert context.after is not None
        after = dict(zip(context.store.layer_names, context.after.norms.tolist(), strict=True))
        self.rows[-1] |= {"norms_after": after, "total_after": context.after.total_norm.item()}


def _fixed(threshold: float) -> dict[str, Any]:
    return {"name": "fixed", "threshold": threshold}


def _callbacks(seen: Seen) -> list[StabilizerCallback]:
    """The total's clip stands first: the order in the list is not the order in a step."""
    layers = LayerClipCallback(rule=_fixed(LAYER_LIMIT), rules={r"(.*\.)?layers\.0": _fixed(FIRST_LIMIT)}, strict=True)
    schedule = {step: limit for step, limit in enumerate(TOTAL_LIMITS) if step > 1}
    total = AdaptiveClipThreshold(rule={**_fixed(TOTAL_LIMITS[0]), "schedule": schedule}, strict=True)
    return [total, seen, layers]


def _gathered(model: nn.Module, prefix: str = "") -> dict[str, Tensor | None]:
    """The whole gradients as they are; a collective."""
    if not isinstance(model, FullyShardedDataParallel):
        return {name.removeprefix(prefix): g for name, g in whole_gradients(model).items()}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        named = {clean_name(name).removeprefix(prefix): p.grad for name, p in model.named_parameters()}
        return {name: None if g is None else g.detach().clone() for name, g in named.items()}


def _record(optimizer: torch.optim.Optimizer, gather: Callable[[], Any]) -> list[Any]:
    """What each of an optimizer's steps is given: a list that grows."""
    received: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: received.append(gather()))
    return received


def plain(rank: int, world_size: int, strategy: str, num_micro_batches: int = 1) -> tuple[list[Any], list[Any]]:
    """A loop by hand."""
    model, data_rank = spread(strategy, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    seen = Seen()
    with attach(None, model=model, optimizer=optimizer, callbacks=_callbacks(seen), log=no_log):
        received = _record(optimizer, lambda: _gathered(model))
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            backward(model, strategy, data_rank, step=step, num_micro_batches=num_micro_batches)
            optimizer.step()
    return received, seen.rows


def in_lightning(rank: int, world_size: int, strategy: str, package: str) -> tuple[list[Any], list[Any]]:
    """A Trainer of either package."""
    module = make_module("transformer", package=package, tensor_style="sp" if strategy == "sp" else "tp")
    seen, received, configure = Seen(), [], module.configure_optimizers

    def configure_optimizers() -> torch.optim.Optimizer:
        optimizer = configure()
        nonlocal received
        is_fsdp1 = strategy == "fsdp1"
        received = _record(optimizer, lambda: _gathered(trainer.strategy.model if is_fsdp1 else module, "model."))
        return optimizer

    module.configure_optimizers = configure_optimizers
    trainer = make_trainer(
        strategy, devices=world_size, package=package, max_steps=NUM_STEPS, callbacks=_callbacks(seen)
    )
    trainer.fit(module)
    return received, seen.rows


def in_accelerate(rank: int, world_size: int, strategy: str, accumulation: int) -> tuple[list[Any], list[Any]]:
    """The loop of Accelerate's documentation."""
    accelerator = accelerate_loops.make_accelerator(strategy, gradient_accumulation_steps=accumulation)
    model, optimizer = accelerate_loops.prepared(accelerator)
    seen = Seen()
    pairs = [(step, micro_batch) for step in range(NUM_STEPS) for micro_batch in range(accumulation)]
    batches = [token_batch(rank, step=step, micro_batch=micro_batch) for step, micro_batch in pairs]
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=_callbacks(seen), log=no_log):
        received = _record(optimizer.optimizer, lambda: _gathered(model))
        accelerate_loops.train(accelerator, model, optimizer, batches)
    return received, seen.rows


def _reference(steps: list[list[Any]], prefix: str = "") -> list[Clipped]:
    limits: Callable[[str], float] = lambda layer: FIRST_LIMIT if layer == "layers.0" else LAYER_LIMIT  # noqa: E731
    run = clipped_run(steps, layer_limits=limits, total_limits=TOTAL_LIMITS, prefix=prefix)
    for pieces in ([c < 1 for step in run for c in step.coefficients.values()], [s.total_coefficient < 1 for s in run]):
        assert any(pieces), "nothing is clipped: the test says nothing"
        assert not all(pieces), "everything is clipped: the test says less than it could"
    return run


def _compare(results: list[tuple[list[Any], list[Any]]], expected: list[Clipped]) -> None:
    for gradients, rows in results:
        assert len(gradients) == len(rows) == len(expected)
        assert rows == results[0][1], "ranks disagree"
        for found, row, step in zip(gradients, rows, expected, strict=True):
            assert worst_error(found, step.gradients) < TOLERANCE
            assert row["norms"] == pytest.approx(step.norms_after, rel=TOLERANCE)
            assert row["raw"] == pytest.approx(step.total, rel=TOLERANCE)
            assert row["total"] == pytest.approx(step.total_after, rel=TOLERANCE)
            assert (row["norms_after"], row["total_after"]) == (row["norms"], row["total"])
        for found, first in zip(gradients, results[0][0], strict=True):
            pairs = [(found[name], first[name]) for name in found]
            assert all(torch.equal(one, other) for one, other in pairs), "ranks were given different gradients"


def _covers(strategy: str, host: str) -> pytest.MarkDecorator:
    columns = {"sp": "tp_sp", "fsdp1_no_shard": "fsdp1", "fsdp1_hybrid": "fsdp1", "ddp_tp": "tp"}
    name = columns.get(strategy, strategy)
    return pytest.mark.covers(feature=["layer clip", "total clip"], strategy=name, host=host)


def _steps(num_data_ranks: int, num_micro_batches: int = 1) -> list[list[Any]]:
    pairs = [(rank, micro) for micro in range(num_micro_batches) for rank in range(num_data_ranks)]
    return [[token_batch(rank, step=step, micro_batch=micro) for rank, micro in pairs] for step in range(NUM_STEPS)]


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=_covers(name, "plain")) for name in CASES])
def test_plain_loops(strategy: str) -> None:
    case = CASES[strategy]
    results = run_distributed(plain, strategy, world_size=case.world_size)
    _compare(results, _reference(_steps(case.num_data_ranks)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_accumulation(strategy: str) -> None:
    """Clipped once a step, and as a whole."""
    results = run_distributed(plain, strategy, 2, world_size=2)
    _compare(results, _reference(_steps(2, 2)))


LIGHTNING = {"single": (1, 1), "ddp": (2, 2), "fsdp1": (2, 2), "fsdp2": (2, 2), "tp": (2, 1), "sp": (2, 1)}


def _lightning_cases() -> list[Any]:
    cases = [(name, package) for package in PACKAGES for name in LIGHTNING]
    hosts = dict(zip(PACKAGES, ("lightning", "pytorch_lightning"), strict=True))
    return [
        pytest.param(name, package, marks=_covers(name, hosts[package])) for name, package in [*cases, FSDP2_TP_CASE]
    ]


FSDP2_TP_CASE = ("fsdp2_tp", PACKAGES[0])


@pytest.mark.parametrize(("strategy", "package"), _lightning_cases())
def test_lightning(strategy: str, package: str) -> None:
    world_size, num_data_ranks = LIGHTNING.get(strategy, (4, 2))
    results = run_distributed(in_lightning, strategy, package, world_size=world_size)
    steps = [expected_batches("transformer", step, num_ranks=num_data_ranks) for step in range(NUM_STEPS)]
    _compare(results, _reference(steps, prefix="model."))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=_covers(name, "accelerate")) for name in accelerate_loops.STRATEGIES]
)
def test_accelerate(strategy: str, accumulation: int) -> None:
    world_size = 1 if strategy == "single" else 2
    results = run_distributed(in_accelerate, strategy, accumulation, world_size=world_size)
    _compare(results, _reference(_steps(world_size, accumulation)))
