"""Drills in a replay: a fault comes again bit for bit, never, or differently each time, as it was told."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilizer import token_gate
from stabilizer.callbacks import DrillCallback, StabilizerCallback
from stabilizer.localize.guard import Guard
from tests.lightning_models import make_module, make_trainer
from tests.localize_loops import Plan, grad_loc, loss_of_tokens, run

STEP, MICRO_BATCH, NUM_REPLAYS = 3, 1, 3
LAYER = "layers.1"

pytestmark = pytest.mark.filterwarnings("ignore:drill. a fault on purpose")


class Again(StabilizerCallback):
    """Runs every micro-batch of every step again: gradients by step, replay and micro-batch, each of one vector."""

    localizes = True

    def __init__(self) -> None:
        super().__init__(strict=True)
        self.again: dict[int, list[list[Tensor]]] = {}
        self.steps: dict[int, Tensor] = {}

    def on_gradients(self, context: Any) -> None:
        self.steps[context.step] = _vector(list(self.host.model.parameters()))
        context.plan.search(torch.ones_like(context.is_bad))

    def localize(self, context: Any, steps: Any) -> bool:
        replayer, parameters = steps.replayer, list(self.host.model.parameters())
        with Guard(replayer.model, parameters=parameters, device=torch.device("cpu")) as guard, replayer.quiet():
            self.again[context.step] = [
                [self._once(guard, replayer, micro_batch, parameters) for micro_batch in steps.micro_batches]
                for _ in range(NUM_REPLAYS)
            ]
        return False

    def _once(self, guard: Guard, replayer: Any, micro_batch: Any, parameters: list[Any]) -> Tensor:
        guard.restore_buffers(micro_batch)
        guard.forget_gradients()
        with torch.enable_grad():
            replayer.loss(micro_batch).backward()
        return _vector(parameters)


def _vector(parameters: list[Any]) -> Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.detach().flatten() for p in parameters])


def plain(*callbacks: Any) -> None:
    run(Plan(steps=5, faulty=-1, micro_batches=2, rows=3, length=8), callbacks)


def lightning(*callbacks: Any) -> None:
    make_trainer(max_steps=5, accumulate_grad_batches=2, callbacks=list(callbacks)).fit(make_module())


FAULTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"kind": "nan_gradient", "layer": LAYER}, ("always", "never")),
    ({"kind": "layer_spike", "layer": LAYER}, ("always", "never", "differently")),
    ({"kind": "token_loss", "token": [1, 2]}, ("always", "never", "differently")),
    ({"kind": "bit_flip", "layer": LAYER}, ("always", "never")),
    ({"kind": "bit_flip", "layer": LAYER, "target": "weight"}, ("always", "never")),
    ({"kind": "corrupted_batch"}, ("always",)),
]
CASES = [
    pytest.param(fault, repeats, id=f"{fault['kind']}-{fault.get('target', 'gradient')}-{repeats}")
    for fault, known in FAULTS
    for repeats in known
]


@pytest.mark.parametrize(("fault", "repeats"), CASES)
@pytest.mark.parametrize("train", [plain, lightning])
def test_it_comes_again_as_it_was_told(train: Any, fault: dict[str, Any], repeats: str) -> None:
    own = {} if fault["kind"] == "corrupted_batch" else {"repeats": repeats}
    if train is lightning and "layer" in fault:
        fault = {**fault, "layer": f"model.{LAYER}"}
    found, healthy = Again(), Again()
    drill = DrillCallback(faults=[{**fault, "step": STEP, "micro_batch": MICRO_BATCH, **own}], strict=True)
    train(drill, found)
    train(healthy)
    for number in range(STEP):
        assert torch.equal(found.steps[number], healthy.steps[number])
        assert all(torch.equal(one[0] + one[1], found.steps[number]) for one in found.again[number])
    step, again = found.steps[STEP], found.again[STEP]
    assert not torch.equal(step, healthy.steps[STEP])
    assert all(torch.equal(one[1 - MICRO_BATCH], healthy.again[STEP][0][1 - MICRO_BATCH]) for one in again)
    if repeats == "always":
        for one in again:
            assert torch.equal((one[0] + one[1]).nan_to_num(123.0), step.nan_to_num(123.0))
    elif repeats == "never":
        assert all(torch.equal(one[MICRO_BATCH], healthy.again[STEP][0][MICRO_BATCH]) for one in again)
    else:
        norms = [float(step.norm()), *(float(one[MICRO_BATCH].norm()) for one in again)]
        assert norms[1:] == sorted(norms[1:])
        assert all(larger / smaller > 1.1 for smaller, larger in itertools.pairwise(norms))


def gated_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss marks its tokens itself, in an order of its own, which no other gate would give."""
    tokens, targets, _ = batch
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return token_gate(losses.flip(1)).mean()


@pytest.mark.parametrize("loss_fn", [loss_of_tokens, gated_loss])
def test_a_search_names_the_token(loss_fn: Any, tmp_path: Path) -> None:
    fault = {"kind": "token_loss", "step": 24, "token": [2, 5], "micro_batch": 3, "factor": 2000.0}
    locating = grad_loc(tmp_path)
    run(Plan(steps=26, faulty=-1), [DrillCallback(faults=[fault], strict=True), locating], loss_fn=loss_fn)
    [incident] = locating.incidents
    assert [(one.micro_batch, one.row, one.position) for one in incident.tokens] == [(3, 2, 5)]
