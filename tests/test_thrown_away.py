"""Steps and losses that a loop throws away are in no step, no window and no extreme."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from stabilizer.callbacks import LossMeanVarCallback, attach
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed
from tests.tiny_loops import HOSTS, Loop, OneLayer, Steps, loss_at, no_log, told

NAN = math.nan


def _means(**options: Any) -> LossMeanVarCallback:
    return LossMeanVarCallback(**{"every_n_steps": 1, "warmup_steps": 0, **options})


def _window(callback: LossMeanVarCallback) -> tuple[float, int]:
    """Mean of the window and how many losses are in it."""
    return callback.statistics()["mean_100"], int(callback._statistics[0].num_finite)


@pytest.mark.parametrize("skips", ["guard", "scaler"])
def test_a_step_that_is_measured_and_then_skipped_is_none(skips: str) -> None:
    steps, means = Steps(), _means()
    with Loop("plain", steps, means, scaler=skips == "scaler") as loop:
        for value in (1.0, math.inf, 3.0, 4.0):
            loop.backward(value)
            if loop.scaler is not None:
                loop.scaler.unscale_(loop.optimizer)
            loop.handle.measure()
            total = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e9)
            if loop.scaler is not None:
                loop.scaler.step(loop.optimizer)
                loop.scaler.update()
            elif torch.isfinite(total):
                loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert steps.done == [(0, 1.0, 1.0), (1, 3.0, 3.0), (2, 4.0, 4.0)]
    assert _window(means) == (pytest.approx(8 / 3), 3)
    assert {values["loss/nonfinite"] for values, _ in loop.rows if "loss/nonfinite" in values} == {0}
    assert {step for _, step in loop.rows} == {0, 1, 2}


@pytest.mark.parametrize("host", HOSTS)
def test_of_two_measures_the_second_counts(host: str) -> None:
    """A loop that clears the gradients in a way of its own."""
    steps = Steps()
    with Loop(host, steps) as loop:
        for value in (1.0, 7.0, 3.0):
            loop.backward(value)
            loop.handle.measure()
            if value != 7.0:
                loop.optimizer.step()
            loop.model.weight.grad = None
    assert steps.done == [(0, 1.0, 1.0), (1, 3.0, 3.0)]


@pytest.mark.parametrize("host", HOSTS)
def test_measuring_the_same_gradient_twice_keeps_its_loss(host: str) -> None:
    steps = Steps()
    with Loop(host, steps) as loop:
        for value in (1.0, 2.0):
            loop.backward(value)
            loop.handle.measure()
            loop.handle.measure()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert steps.done == [(0, 1.0, 1.0), (1, 2.0, 2.0)]


class Fragile(torch.optim.SGD):
    """Raises when it is told to."""

    is_broken = False

    def _init_group(self, *args: Any) -> Any:
        if self.is_broken:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._init_group(*args)


@pytest.mark.parametrize("clears", ["optimizer", "model"])
@pytest.mark.parametrize("host", HOSTS)
def test_an_optimizer_that_raises_leaves_no_open_step(host: str, clears: str) -> None:
    steps = Steps()
    with Loop(host, steps, optimizer=lambda parameters: [Fragile(parameters, lr=0.0)]) as loop:
        for value in (1.0, 2.0, 3.0):
            loop.backward(value)
            loop.inner[0].is_broken = value == 2.0
            try:
                loop.optimizer.step()
            except torch.OutOfMemoryError:
                assert value == 2.0
            (loop.optimizer if clears == "optimizer" else loop.model).zero_grad()
    assert steps.done == [(0, 1.0, 1.0), (1, 3.0, 3.0)]


class Derived(torch.optim.SGD):
    """Has a step around that of its base; torch runs the hooks for both, one inside the other."""

    def step(self, closure: Any = None) -> Any:
        """The base's."""
        return super().step(closure)


@pytest.mark.parametrize("host", HOSTS)
def test_a_step_within_a_step_is_one(host: str) -> None:
    torch.optim.SGD([torch.zeros(1)])  # torch puts hooks around a class when it is used first
    steps = Steps()
    with Loop(host, steps, optimizer=lambda parameters: [Derived(parameters, lr=0.0)]) as loop:
        for value in (1.0, 2.0):
            loop.step(value)
    assert steps.done == [(0, 1.0, 1.0), (1, 2.0, 2.0)]


@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_an_abandoned_step_leaves_its_loss_nowhere_and_takes_no_other_away(every_n_steps: int) -> None:
    means = _means(every_n_steps=every_n_steps)
    with Loop("accelerate", means) as loop:
        for value in (1.0, 50.0, 1000.0, NAN, 2.0, 3.0):
            loop.backward(value)
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e9)
            if value < 100:
                loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert _window(means) == (14.0, 4)
    largest = {step: values["loss/max"] for values, step in loop.rows if "loss/max" in values}
    assert largest == ({0: 1, 1: 50, 2: 2, 3: 3} if every_n_steps == 1 else {0: 1, 2: 50})


def test_a_step_without_a_new_loss_has_none() -> None:
    steps, means = Steps(), _means()
    with Loop("plain", steps, means) as loop:
        for number in range(6):
            loss_at(loop.model, 1.0).backward()
            if number % 3 == 0:  # "log every third step"
                loop.handle.record_loss(100.0 + number)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert str(steps.losses()) == str([100.0, NAN, NAN, 103.0, NAN, NAN])
    assert _window(means) == (101.5, 2)


def silent_rank(rank: int, world_size: int) -> list[float]:
    """Rank 0 tells its loss at step 0 alone."""
    model = DistributedDataParallel(OneLayer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = Steps()
    with attach(None, model=model, optimizer=optimizer, callbacks=[steps], log=no_log) as handle:
        for number in range(3):
            loss_at(model, 1.0).backward()
            if rank == 1 or number == 0:
                handle.record_loss(1.0 if rank else 1000.0, weight=1)
            optimizer.step()
            optimizer.zero_grad()
    return steps.losses()


def test_a_rank_without_a_new_loss_adds_nothing() -> None:
    assert run_distributed(silent_rank, timeout=30) == [[500.5, 1.0, 1.0]] * 2


def _two(parameters: Any) -> list[torch.optim.Optimizer]:
    parameters = list(parameters)
    return [torch.optim.SGD(parameters, lr=0.0), torch.optim.SGD(parameters, lr=0.0)]


@pytest.mark.parametrize("host", HOSTS)
def test_a_second_optimizer_gets_the_same_loss_once(host: str) -> None:
    steps = Steps()
    with Loop(host, steps, optimizer=_two) as loop:
        first, second = loop.optimizers
        for value in (5.0, 6.0):
            loop.backward(value)
            first.step()
            second.step()
            if value == 5.0:
                second.step()  # once more without a backward pass
            loop.model.zero_grad()
    assert steps.losses(0) == [5.0, 6.0]
    assert str(steps.losses(1)) == str([5.0, NAN, 6.0])


@pytest.mark.parametrize("host", HOSTS)
def test_losses_that_are_thrown_away_before_the_step_are_not_the_next_one_s(host: str) -> None:
    steps, means = Steps(), _means()
    with Loop(host, steps, means) as loop:
        for value in (1.0, NAN, 3.0, NAN, NAN, 5.0):
            loss = loop.backward(value)
            if not torch.isfinite(loss):
                loop.optimizer.zero_grad()
                continue
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert steps.done == [(0, 1.0, 1.0), (1, 3.0, 3.0), (2, 5.0, 5.0)]
    assert _window(means) == (3.0, 3)
    assert [position.num_micro_batches for position in steps.positions] == [1, 1, 1]


def test_a_loss_that_is_recorded_before_the_gradients_are_cleared_counts() -> None:
    """Many loops clear the old gradients between the forward and the backward pass."""
    steps = Steps()
    with Loop("plain", steps) as loop:
        for value in (1.0, 2.0):  # after three steps without a loss a warning tells what to do
            loss = loss_at(loop.model, value)
            loop.handle.record_loss(loss)
            loop.optimizer.zero_grad()
            loss.backward()
            loop.optimizer.step()
    assert steps.losses() == [1.0, 2.0]


def test_an_overflow_of_a_scaler_takes_its_loss_along() -> None:
    steps = Steps()
    with Loop("plain", steps, scaler=True) as loop:
        assert loop.scaler is not None
        for value in (1.0, math.inf, 3.0):
            loop.backward(value)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
            loop.optimizer.zero_grad()
    assert steps.losses() == [1.0, 3.0]
    assert [step for step, _, _ in steps.done] == [0, 1]


@pytest.mark.parametrize("host", HOSTS)
def test_losses_from_before_a_checkpoint_is_loaded_are_gone(host: str, tmp_path: Path) -> None:
    steps, states = Steps(), {}
    with Loop(host, steps) as loop:
        for value in (1.0, NAN, 2.0):
            loss = loop.backward(value)
            if not torch.isfinite(loss):
                if host == "accelerate":
                    loop.accelerator.load_state(str(tmp_path))
                else:
                    loop.handle.load_state_dict(states)
                loop.model.zero_grad()  # the optimizer's own would say that a step is thrown away
                continue
            loop.optimizer.step()
            loop.model.zero_grad()
            if value == 1.0 and host == "accelerate":
                loop.accelerator.save_state(str(tmp_path))
            elif value == 1.0:
                states = loop.handle.state_dict()
    assert steps.done == [(0, 1.0, 1.0), (1, 2.0, 2.0)]
    assert [position.num_micro_batches for position in steps.positions] == [1, 1]


def test_the_alarm_speaks_again_after_going_back() -> None:
    with told() as messages, Loop("plain", _means()) as loop:
        loop.step(1.0)
        states = loop.handle.state_dict()
        for number in range(1, 20):
            loop.step(1.0, record=NAN if number in (10, 15) else 1.0)
        loop.handle.load_state_dict(states)
        for number in range(1, 6):
            loop.step(1.0, record=NAN if number == 3 else 1.0)
    alarms = [message for message in messages if "not finite" in message]
    assert ["step 10" in alarms[0], "step 3" in alarms[-1], len(alarms)] == [True, True, 2], alarms


def test_the_alarm_of_each_optimizer_is_its_own() -> None:
    with told() as messages, Loop("plain", _means(), optimizer=_two) as loop:
        for number in range(4):
            for which, optimizer in enumerate(loop.optimizers):
                loop.backward(1.0, record=NAN if number == 1 + which else 1.0)
                optimizer.step()
                optimizer.zero_grad()
    alarms = [message for message in messages if "not finite" in message]
    assert ["step 1" in alarms[0], "step 2" in alarms[-1], len(alarms)] == [True, True, 2], alarms


def test_a_closure_is_told_once_and_not_measured() -> None:
    steps = Steps()
    with Loop("plain", steps) as loop:

        def closure() -> float:
            loop.optimizer.zero_grad()
            return loop.backward(1.0).item()

        with pytest.warns(StabilizerWarning, match="closure"):
            loop.optimizer.step(closure)
        loop.optimizer.step(closure)
    assert steps.next_step() == 0
    assert steps.done == []
