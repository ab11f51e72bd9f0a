"""DrillCallback in one process: each fault is what it says, at its step only, and what it changes is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stabilizer.callbacks import DrillCallback, StabilizerCallback, attach
from tests.acceptance_loops import MICRO_BATCHES, STEP, Seen, data, gated_loss, plain_loss, train
from tests.models import make_transformer
from tests.tiny_loops import no_log

pytestmark = pytest.mark.filterwarnings("ignore:drill. a fault on purpose")


@pytest.fixture(scope="module")
def healthy() -> Seen:
    return train()


def own_gradients(healthy: Seen, micro_batch: int) -> dict[str, Tensor]:
    """What one micro-batch of the faulty step gives, by itself."""
    model = make_transformer(num_layers=2)
    model.load_state_dict(healthy.weights[STEP - 1])
    (plain_loss(model, data()[STEP][micro_batch]) / MICRO_BATCHES).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_before(found: Seen, healthy: Seen) -> None:
    """Nothing has happened before the step of the fault."""
    for step in range(STEP):
        for name, gradient in found.gradients[step].items():
            assert torch.equal(gradient, healthy.gradients[step][name]), (step, name)


def changed(found: Seen, healthy: Seen) -> dict[str, Tensor]:
    """Gradients of the faulty step that are other ones."""
    pairs = {name: (found.gradients[STEP][name], gradient) for name, gradient in healthy.gradients[STEP].items()}
    return {name: now for name, (now, before) in pairs.items() if not torch.equal(now, before)}


def test_a_layer_spike_multiplies_one_layer_of_one_micro_batch(healthy: Seen) -> None:
    found = train({"kind": "layer_spike", "step": STEP, "layer": 1, "micro_batch": 1, "factor": 64.0})
    check_before(found, healthy)
    other = changed(found, healthy)
    assert set(other) == {name for name in healthy.gradients[0] if name.startswith("layers.1.")}
    first, second = own_gradients(healthy, 0), own_gradients(healthy, 1)
    for name, gradient in other.items():
        assert torch.equal(gradient, first[name] + 64.0 * second[name]), name
    # Only that step: the same weights give the same gradients afterwards.
    model = make_transformer(num_layers=2)
    model.load_state_dict(found.weights[STEP])
    for batch in data()[STEP + 1]:
        (plain_loss(model, batch) / MICRO_BATCHES).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, found.gradients[STEP + 1][name])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["nan_gradient", "inf_gradient"])
def test_one_element_of_a_layer_is_not_finite(kind: str, healthy: Seen) -> None:
    found = train({"kind": kind, "step": STEP, "layer": "layers.0"})
    check_before(found, healthy)
    [(name, gradient)] = changed(found, healthy).items()
    assert name.startswith("layers.0.")
    bad = gradient.isnan() if kind == "nan_gradient" else gradient.isinf()
    assert int(bad.sum()) == 1
    assert torch.equal(gradient[~bad], healthy.gradients[STEP][name][~bad])


def test_the_seed_chooses_what_is_left_open(healthy: Seen) -> None:
    fault = {"kind": "nan_gradient", "step": STEP}
    found = [changed(train(fault, seed=seed), healthy) for seed in (0, 0, 1, 2, 3)]
    names = [next(iter(one)) for one in found]
    assert names[0] == names[1]
    assert torch.equal(found[0][names[0]].isnan(), found[1][names[0]].isnan())
    assert len(set(names)) > 1


def test_a_flipped_bit_in_a_gradient(healthy: Seen) -> None:
    found = train({"kind": "bit_flip", "step": STEP, "layer": "lm_head", "bit": 2})
    check_before(found, healthy)
    [(name, gradient)] = changed(found, healthy).items()
    assert name == "lm_head.weight"
    differs = gradient != healthy.gradients[STEP][name]
    assert int(differs.sum()) == 1
    first, second = own_gradients(healthy, 0)[name][differs], own_gradients(healthy, 1)[name][differs]
    assert float((gradient[differs] - second) / first) == pytest.approx(16.0, rel=1e-3) or float(
        (gradient[differs] - second) / first
    ) == pytest.approx(1 / 16.0, rel=1e-3)


def test_a_flipped_bit_in_a_weight_is_there_for_one_forward_and_backward(healthy: Seen) -> None:
    seen: list[Tensor] = []
    model = make_transformer(num_layers=2)
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(module.weight.detach().clone()))
    fault = {"kind": "bit_flip", "step": STEP, "layer": "lm_head", "target": "weight", "micro_batch": 1, "bit": 2}
    found = train(fault, model=model)
    check_before(found, healthy)
    is_flipped = [
        not torch.equal(weight, found.weights[number // MICRO_BATCHES - 1]["lm_head.weight"])
        for number, weight in enumerate(seen)
        if number >= MICRO_BATCHES
    ]
    assert is_flipped == [number == 3 for number in range(8)]
    flipped = make_transformer(num_layers=2)
    flipped.load_state_dict({**healthy.weights[STEP - 1], "lm_head.weight": seen[5]})
    (plain_loss(flipped, data()[STEP][1]) / MICRO_BATCHES).backward()
    first = own_gradients(healthy, 0)
    for name, parameter in flipped.named_parameters():
        assert parameter.grad is not None
        gradient = first[name] + parameter.grad
        assert torch.equal(found.gradients[STEP][name], gradient), name
        # What the optimizer moves is the weight as it was.
        moved = healthy.weights[STEP - 1][name].add(gradient, alpha=-0.01)
        assert torch.equal(found.weights[STEP][name], moved), name


@pytest.mark.parametrize("loss_fn", [plain_loss, gated_loss])
def test_a_tokens_loss_is_multiplied(loss_fn: Callable[..., Tensor], healthy: Seen) -> None:
    fault = {"kind": "token_loss", "step": STEP, "token": [2, 5], "factor": 500.0, "micro_batch": 1}
    found = train(fault, loss_fn=loss_fn)
    check_before(found, healthy)
    model = make_transformer(num_layers=2).double()
    model.load_state_dict(healthy.weights[STEP - 1])
    for number, (tokens, targets) in enumerate(data()[STEP]):
        losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        weights = torch.ones_like(losses)
        weights[2, 5] = 500.0 if number == 1 else 1.0
        ((losses * weights).mean() / MICRO_BATCHES).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (found.gradients[STEP][name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, name


def test_a_learning_rate_jumps_for_some_steps_and_comes_back(healthy: Seen) -> None:
    found = train({"kind": "learning_rate_jump", "step": STEP, "num_steps": 2, "factor": 8.0})
    assert found.rates == [0.01, 0.01, 0.08, 0.08, 0.01]
    for name, weight in found.weights[STEP].items():
        before = healthy.weights[STEP - 1][name]
        assert torch.equal(weight, before.add(healthy.gradients[STEP][name], alpha=-0.08)), name


def test_a_scheduler_finds_the_rates_as_it_left_them() -> None:
    model = make_transformer(num_layers=2)
    rates: list[list[float]] = []
    for faults in ([], [{"kind": "learning_rate_jump", "step": 1, "num_steps": 2, "factor": 8.0}]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # multiplies what it finds
        used: list[float] = []
        optimizer.register_step_pre_hook(lambda o, *_, used=used: used.append(o.param_groups[0]["lr"]))
        with attach(None, model=model, optimizer=optimizer, callbacks=[DrillCallback(faults=faults)], log=no_log):
            for [batch, _] in data():
                plain_loss(model, batch).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rates.append(used)
    assert rates[1] == [rate * (8.0 if step in (1, 2) else 1.0) for step, rate in enumerate(rates[0])]


def test_rates_that_somebody_lowers_meanwhile_come_back_too() -> None:
    class Lowers(StabilizerCallback):
        acts = lowers_lr = True

        def on_gradients(self, context: Any) -> None:
            context.plan.scale_lr(0.5)

    fault = {"kind": "learning_rate_jump", "step": 1, "num_steps": 2, "factor": 8.0}
    found = train(fault, others=(Lowers(),))  # which looks at the rates at the end
    assert len(found.rates) == 5


def test_a_corrupted_batch_is_put_back_after_its_step(healthy: Seen) -> None:
    steps = data()
    kept = data()
    found = train({"kind": "corrupted_batch", "step": STEP, "micro_batch": 1, "token": [1]}, steps=steps)
    check_before(found, healthy)
    assert changed(found, healthy)
    for step, before in zip(steps, kept, strict=True):
        for batch, other in zip(step, before, strict=True):
            assert all(torch.equal(one, two) for one, two in zip(batch, other, strict=True))


def test_a_loss_scale_is_held_and_let_go() -> None:
    model, seen = make_transformer(num_layers=2), []
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
    drill = DrillCallback(faults=[{"kind": "stuck_loss_scale", "step": 1, "num_steps": 2, "factor": 0.25}])
    with attach(None, model=model, optimizer=optimizer, callbacks=[drill], log=no_log) as handle:
        for [batch, _] in data():
            loss = plain_loss(model, batch)
            seen.append(scaler.get_scale())
            scaler.scale(loss).backward()
            handle.measure(scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert seen == [8.0, 0.25, 0.25, 8.0, 8.0]


def test_without_faults_nothing_changes(healthy: Seen) -> None:
    found = train(others=(DrillCallback(),))
    for one, other in zip(found.gradients, healthy.gradients, strict=True):
        assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())
