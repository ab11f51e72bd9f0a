"""Drills on two ranks: a fault is in one rank's own gradient, before the reduction, under every strategy and host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import DrillCallback, StabilizerCallback, attach
from stabilizer.names import clean_name, layer_names
from tests import accelerate_loops
from tests.launcher import run_distributed
from tests.lightning_models import expected_batches, make_module, make_trainer
from tests.localize_loops import Plan, Seen, batches, loss_of_tokens, run
from tests.models import Batch, TinyTransformer, loss_of, make_transformer, token_batch
from tests.sharding import full
from tests.tiny_loops import no_log

RANK, MICRO_BATCH, MICRO_BATCHES, FACTOR = 1, 1, 2, 50.0
PLACE = {"rank": RANK, "micro_batch": MICRO_BATCH, "factor": FACTOR}
LAYER_STEP, TOKEN_STEP, NUM_STEPS = 2, 3, 5
TOKEN = (2, 3)

pytestmark = pytest.mark.filterwarnings("ignore:drill. a fault on purpose")


def drill(prefix: str) -> DrillCallback:
    faults = [
        {"kind": "layer_spike", "step": LAYER_STEP, "layer": f"{prefix}layers.1", **PLACE},
        {"kind": "token_loss", "step": TOKEN_STEP, "token": list(TOKEN), **PLACE},
    ]
    return DrillCallback(faults=faults, strict=True)


class Local(StabilizerCallback):
    """Keeps the norms of this rank's own gradients, as sensors see them: step -> micro-batch -> layer."""

    localizes = True

    def __init__(self) -> None:
        super().__init__(strict=True)
        self.norms: dict[int, list[dict[str, float]]] = {}

    def on_gradients(self, context: Any) -> None:
        context.plan.search(torch.ones_like(context.is_bad))

    def localize(self, context: Any, steps: Any) -> bool:
        names, layers = context.store.layer_names, context.store.unit_layers
        self.norms[context.step] = []
        for squares in steps.gradients.local.current:
            found = dict.fromkeys(names, 0.0)
            for layer, square in zip(layers, [] if squares is None else squares.tolist(), strict=squares is not None):
                found[names[layer]] += square
            self.norms[context.step].append({name: square**0.5 for name, square in found.items()})
        return False


class Gradients(StabilizerCallback):
    """Keeps the whole gradients and weights of every step."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(strict=True)
        self.seen = seen

    def on_gradients(self, context: Any) -> None:
        named = [(clean_name(name.removeprefix("module.")), p) for name, p in self.host.model.named_parameters()]
        self.seen.gradients[context.step] = {name: full(p.grad).clone() for name, p in named if p.grad is not None}
        self.seen.parameters[context.step] = {name: full(p.detach()).clone() for name, p in named}


def plain(rank: int, world_size: int, strategy: str) -> Any:
    plan = Plan(strategy, steps=NUM_STEPS, faulty=-1, micro_batches=MICRO_BATCHES, rows=3, length=8)
    seen, local = Seen(range(NUM_STEPS)), Local()
    run(plan, [drill(""), local], rank=rank, seen=seen)
    return local.norms, seen


def lightning(rank: int, world_size: int, strategy: str) -> Any:
    seen, local = Seen(range(NUM_STEPS)), Local()
    trainer = make_trainer(
        strategy,
        devices=world_size,
        max_steps=NUM_STEPS,
        accumulate_grad_batches=MICRO_BATCHES,
        callbacks=[drill("model."), local, Gradients(seen)],
    )
    trainer.fit(make_module())
    return local.norms, seen


def accelerate(rank: int, world_size: int, strategy: str) -> Any:
    accelerator = accelerate_loops.make_accelerator(strategy, gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer = accelerate_loops.prepared(accelerator)
    seen, local = Seen(range(NUM_STEPS)), Local()
    rows = [
        token_batch(rank, step=step, micro_batch=number) for step in range(NUM_STEPS) for number in range(MICRO_BATCHES)
    ]
    callbacks = [drill(""), local, Gradients(seen)]
    with attach(
        accelerator, model=model, optimizer=optimizer, callbacks=callbacks, loss_fn=loss_of, log=no_log
    ) as handle:
        for batch in rows:
            handle.record_batch(batch)
            accelerate_loops.train(accelerator, model, optimizer, [batch])
    return local.norms, seen


def batches_of(host: str, step: int) -> list[list[Batch]]:
    """Micro-batches of a step: rank -> number."""
    if host == "lightning":
        flat = expected_batches("transformer", step, num_ranks=2, num_micro_batches=MICRO_BATCHES)
        return [flat[rank::2] for rank in range(2)]
    if host == "accelerate":
        return [[token_batch(rank, step=step, micro_batch=n) for n in range(MICRO_BATCHES)] for rank in range(2)]
    plan = Plan(steps=NUM_STEPS, faulty=-1, micro_batches=MICRO_BATCHES, rows=3, length=8)
    return [[(batch[0], batch[1]) for batch in list(batches(plan, rank))[step]] for rank in range(2)]


def own_gradients(model: nn.Module, batch: Batch, *, factor: float = 1.0) -> dict[str, Tensor]:
    """In float64, with one token's loss multiplied."""
    weights = torch.ones(batch[0].shape, dtype=torch.float64)
    weights[TOKEN] = factor
    model.zero_grad()
    (loss_of_tokens(model, (*batch, weights)) / MICRO_BATCHES).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(host: str, found: Sequence[tuple[dict[int, list[dict[str, float]]], Seen]]) -> None:
    prefix = "model." if host == "lightning" else ""
    model: nn.Module = TinyTransformer() if host == "plain" else make_transformer()
    model = model.double()
    names = [name for name, _ in model.named_parameters()]
    layers = dict(zip(names, layer_names(names), strict=True))
    seen = found[0][1]
    for step in range(1, NUM_STEPS):
        model.load_state_dict({name.removeprefix(prefix): value for name, value in seen.parameters[step].items()})
        expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for rank, rows in enumerate(batches_of(host, step)):
            for number, batch in enumerate(rows):
                is_bad = (rank, number) == (RANK, MICRO_BATCH)
                own = own_gradients(model, batch, factor=FACTOR if is_bad and step == TOKEN_STEP else 1.0)
                for name in own:
                    if is_bad and step == LAYER_STEP and layers[name] == "layers.1":
                        own[name] *= FACTOR
                    expected[name] += own[name] / 2
                norms = found[rank][0][step][number]
                for layer in set(layers.values()):
                    norm = sum(float(own[name].square().sum()) for name in own if layers[name] == layer) ** 0.5
                    assert norms[prefix + layer] == pytest.approx(norm, rel=1e-4), (step, rank, number, layer)
        for name, gradient in expected.items():
            got = seen.gradients[step][prefix + name]
            assert got is not None
            assert float((got.double() - gradient).norm() / gradient.norm()) < 1e-5, (step, name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_a_plain_loop(strategy: str) -> None:
    check("plain", run_distributed(plain, strategy))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_lightning(strategy: str) -> None:
    check("lightning", run_distributed(lightning, strategy))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_accelerate(strategy: str) -> None:
    check("accelerate", run_distributed(accelerate, strategy))
