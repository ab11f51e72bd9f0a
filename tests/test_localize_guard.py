"""The guard: training with replays inside it is training without them, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stabilizer.localize import guard as guard_module
from stabilizer.localize.guard import Guard
from stabilizer.localize.recording import MicroBatch, Recorder
from tests.stateful import Net, Slots, batch_of, differences, fingerprint, lightning_module, rng_fingerprint

CPU = torch.device("cpu")
#: What a trainer hangs on a module, and what differs between two trainers.
_HOST = ("_trainer", "_log_hyperparams", "_hparams")


def _seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _guard(model: nn.Module) -> Guard:
    return Guard(model, parameters=_trained(model), device=CPU)


def _replay(model: Any, guard: Guard, micro_batch: MicroBatch) -> list[Tensor | None]:
    guard.restore_buffers(micro_batch)
    for parameter in model.parameters():
        parameter.grad = None
    args, kwargs = micro_batch.call()
    with torch.enable_grad():
        model.training_step(*args, **kwargs).backward()
    return [parameter.grad for parameter in _trained(model)]


def _loop(*, with_replays: bool, num_steps: int = 20, num_micro_batches: int = 2) -> Any:
    """A plain loop: the worth of everything at its end, and the gradients of each step."""
    model: Any = Net()
    _seed()
    optimizer, recorder = torch.optim.Adam(_trained(model), lr=0.01), Recorder(model, device=CPU)
    seen = []
    for step in range(num_steps):
        for number in range(num_micro_batches):
            batch = batch_of(step * num_micro_batches + number)
            recorder.record((batch, number), {})
            (model.training_step(batch, number) / num_micro_batches).backward()
        if with_replays:
            with _guard(model) as guard:
                for micro_batch in recorder.micro_batches:
                    _replay(model, guard, micro_batch)
        recorder.end_step()
        seen.append(fingerprint([parameter.grad for parameter in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return seen, fingerprint(model), fingerprint(optimizer.state_dict()), rng_fingerprint()


def test_a_plain_loop_is_the_same_bit_for_bit() -> None:
    without, replayed = _loop(with_replays=False), _loop(with_replays=True)
    assert differences(without, replayed) == []


def _fit(*, with_replays: bool) -> Any:
    from lightning.pytorch import Callback, Trainer

    recorder: Any = None

    class Replays(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_index: int) -> None:
            nonlocal recorder
            recorder = recorder or Recorder(module, device=CPU)
            recorder.record((batch, batch_index), {})

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            with _guard(module) as guard:
                # An attribute that the guard takes away again.
                module.log = lambda *args, **kwargs: None
                for micro_batch in recorder.micro_batches:
                    _replay(module, guard, micro_batch)
            recorder.end_step()

    module = lightning_module()()
    _seed()
    trainer = Trainer(
        max_steps=20,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        callbacks=[Replays()] if with_replays else [],
    )
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = fingerprint(trainer.optimizers[0].state_dict())
    return metrics, fingerprint(module, names=_HOST), state, rng_fingerprint()


def test_a_lightning_run_is_the_same_bit_for_bit() -> None:
    without, replayed = _fit(with_replays=False), _fit(with_replays=True)
    assert set(without[0]) >= {"loss", "mean"}
    assert differences(without, replayed) == []


@pytest.mark.parametrize("kind", ["plain", "lightning"])
def test_the_replayed_gradient_is_the_first_one_bit_for_bit(kind: str) -> None:
    model: Any = Net() if kind == "plain" else lightning_module()()
    model.log = lambda *args, **kwargs: None
    _seed()
    recorder = Recorder(model, device=CPU)
    originals = []
    for number in range(6):
        recorder.record((batch_of(number), number), {})
        # The teacher moves in the forward: of the weights before it there is no record.
        teacher = [parameter.clone() for parameter in model.teacher.parameters()]
        model.zero_grad()
        model.training_step(batch_of(number), number).backward()
        originals.append((teacher, fingerprint([parameter.grad for parameter in _trained(model)])))
    with _guard(model) as guard:
        # In any order, more than once.
        for number in (5, 0, 3, 3, 1):
            teacher, original = originals[number]
            for parameter, value in zip(model.teacher.parameters(), teacher, strict=True):
                parameter.copy_(value)
            assert fingerprint(_replay(model, guard, recorder.micro_batches[number])) == original


def test_gradients_are_the_same_objects_and_none_stays_none() -> None:
    model = Net()
    model(torch.randn(4, 5)).sum().backward()
    model.head.bias.grad = None
    before = [parameter.grad for parameter in model.parameters()]
    worth = fingerprint(before)
    with _guard(model):
        assert all(parameter.grad is None for parameter in model.parameters())
        model(torch.randn(4, 5)).sum().backward()
        assert all(parameter.grad is not None for parameter in _trained(model))
    after = [parameter.grad for parameter in model.parameters()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert fingerprint(after) == worth


def test_flags_and_modes_come_back() -> None:
    model = Net()
    model.inner[1].eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=False), _guard(model):
        model.eval()
        model.inner[1].train()
        model.requires_grad_(False)
        model.teacher.requires_grad_(True)
        torch._C._set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_cache_enabled(False)
    assert [module.training for module in (model, model.inner, model.inner[1])] == [True, True, False]
    assert [parameter.requires_grad for parameter in model.parameters()].count(False) == 2
    assert not model.teacher.weight.requires_grad
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    with torch.no_grad():
        with _guard(model):
            torch._C._set_grad_enabled(True)
        assert not torch.is_grad_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with _guard(model):
            torch.set_autocast_dtype("cpu", torch.float16)
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_cache_enabled(False)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("where", ["forward", "backward", "later"])
def test_an_exception_restores_everything_too(where: str) -> None:
    model: Any = Net()
    _seed()
    recorder = Recorder(model, device=CPU)
    recorder.record((batch_of(0), 0), {})
    model.training_step(batch_of(0), 0).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = fingerprint(model), fingerprint(gradients), rng_fingerprint()

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    def replay() -> None:
        with _guard(model) as guard:
            if where == "forward":
                model.head.forward = fail
            if where == "backward":
                model.head.weight.register_hook(fail)
            _replay(model, guard, recorder.micro_batches[0])
            fail()

    with pytest.raises(ZeroDivisionError):
        replay()
    after = [parameter.grad for parameter in model.parameters()]
    assert all(one is other for one, other in zip(gradients, after, strict=True))
    model.head.weight._backward_hooks = None
    assert differences((fingerprint(model), fingerprint(after), rng_fingerprint()), before) == []


def test_what_cannot_be_put_back_does_not_keep_the_rest_from_it() -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(3))
    model.array, model.first, model.slots = np.zeros(2), [1], Slots()
    gradient = model[0].weight.grad = torch.ones(3)

    def replay() -> None:
        with _guard(model):
            model(torch.randn(4, 3)).sum().backward()
            model.first.append(2)
            model.slots.count = 2
            # Nothing can be written into it any more.
            model.array.flags.writeable = False

    with pytest.raises(ValueError, match="read-only"):
        replay()
    assert model.first == [1]
    assert model.slots.count == [0]
    assert model[0].weight.grad is gradient
    assert model[0].running_mean.tolist() == [0, 0, 0]


def test_a_graph_made_before_outlives_a_replay() -> None:
    """Two optimizers: the second loss is there before the first step, and holds a running mean that a replay moves."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(torch.randn(4, 3))
    model.eval()
    loss = model(torch.randn(4, 3)).square().sum()
    expected = torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0]
    with _guard(model):
        model.train()
        model(torch.randn(4, 3)).sum().backward()
    assert torch.equal(torch.autograd.grad(loss, model[0].weight)[0], expected)


def test_frozen_parameters_come_back_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    before = fingerprint(list(model.parameters()))
    with _guard(model) as guard:
        model(torch.randn(4, 5))
    assert guard.unprotected == ()
    assert fingerprint(list(model.parameters())) == before
    monkeypatch.setattr(guard_module, "_FROZEN", 4)
    with _guard(model) as guard:
        pass
    assert guard.unprotected == ("teacher.weight",)


def test_restoring_buffers_outside_of_it_is_refused() -> None:
    model = Net()
    recorder, guard = Recorder(model, device=CPU), _guard(model)
    micro_batch = recorder.record((), {})
    with pytest.raises(RuntimeError, match="outside"):
        guard.restore_buffers(micro_batch)
    with guard, pytest.raises(RuntimeError, match="entered already"), guard:
        pass
    with guard:
        guard.restore_buffers(micro_batch)


def test_nothing_is_kept_afterwards() -> None:
    import gc
    import weakref

    model = Net()
    guard = _guard(model)
    with guard:
        loss = model(torch.randn(4, 5)).sum()
        loss.backward()
        gradient = weakref.ref(model.head.weight.grad)
        output = weakref.ref(loss)
        del loss
    gc.collect()
    assert gradient() is None
    assert output() is None
