"""The action "lower_lr": the optimizer moves as in a run made by hand, and nobody ever sees another learning rate."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, ExponentialLR
from torch.utils.data import DataLoader

from stabilizer.callbacks import StabilizerCallback, StepContext, attach
from stabilizer.callbacks.learning_rates import LearningRates
from tests.accelerate_loops import make_accelerator
from tests.lightning_models import PACKAGES, make_trainer
from tests.loss_alarm_loops import BURST, healthy, watcher, with_spikes
from tests.tiny_loops import OneLayer, no_log

HOSTS = ("plain", "accelerate", *PACKAGES)
#: The burst begins at 80, and its next event is at 110: lowered from 81 to 90, and from 111 to 120.
LOWERED = frozenset([*range(81, 91), *range(111, 121)])
ACTION = {"name": "lower_lr", "factor": 0.25, "num_steps": 10}

Make = Callable[[Any], torch.optim.Optimizer]
#: What a run leaves: the weight after every step, and the rate between steps.
Trace = tuple[list[float], list[float]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """With a rate that is a tensor."""
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-5), foreach=False)


def chained(optimizer: torch.optim.Optimizer) -> Any:
    """Each of the two computes the next rate from the one that it finds."""
    return ChainedScheduler([ExponentialLR(optimizer, gamma=0.995), CosineAnnealingLR(optimizer, T_max=300)])


def rate_of(optimizer: Any) -> float:
    """The rate that anybody would read."""
    return float(optimizer.param_groups[0]["lr"])


def by_hand(values: Sequence[float], make: Make, *, lowered: Any = LOWERED, factor: float = 0.25) -> Trace:
    """The run without us, whose rate is set for some steps and put back after them."""
    model = OneLayer()
    optimizer = make(model.parameters())
    scheduler, trace = chained(optimizer), ([], [])
    for step, value in enumerate(values):
        model(torch.full((2, 1), value)).mean().backward()
        before = [group["lr"] for group in optimizer.param_groups]
        if step in lowered:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
        scheduler.step()
        optimizer.zero_grad()
        trace[0].append(model.weight.item())
        trace[1].append(rate_of(optimizer))
    return trace


def in_loop(host: str, values: Sequence[float], callbacks: Sequence[Any], make: Make) -> Trace:
    """The same in a loop."""
    accelerator: Any = make_accelerator() if host == "accelerate" else None
    model: Any = OneLayer()
    inner = make(model.parameters())
    optimizer: Any = inner
    scheduler, trace = chained(inner), ([], [])
    if accelerator is not None:
        model, optimizer, scheduler = accelerator.prepare(model, inner, scheduler)
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=no_log) as handle:
        for value in values:
            loss = model(torch.full((2, 1), value)).mean()
            if accelerator is None:
                handle.record_loss(loss)
                loss.backward()
            else:
                accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            trace[0].append(next(model.parameters()).item())
            trace[1].append(rate_of(optimizer))
    return trace


def scripted(package: str, values: Sequence[float], make: Make, trace: Trace) -> Any:
    """A LightningModule with these losses and the chained schedulers, stepped at every step."""
    lightning = importlib.import_module(package)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = OneLayer()

        def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
            loss: Tensor = self.model(batch).mean()
            return loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            # The first moment at which anybody can look.
            assert rate_of(self.optimizers()) == self.rate_before

        def on_train_batch_start(self, *args: Any) -> None:
            self.rate_before = rate_of(self.optimizers())

        def on_train_batch_end(self, *args: Any) -> None:
            trace[0].append(self.model.weight.item())
            trace[1].append(rate_of(self.optimizers()))

        def configure_optimizers(self) -> Any:
            optimizer = make(self.model.parameters())
            return [optimizer], [{"scheduler": chained(optimizer), "interval": "step"}]

        def train_dataloader(self) -> Any:
            return DataLoader([torch.full((2, 1), value) for value in values], batch_size=None)

    return Module()


def run(host: str, values: Sequence[float], callbacks: Sequence[Any], make: Make) -> Trace:
    """Train in a host."""
    if host not in PACKAGES:
        return in_loop(host, values, callbacks, make)
    trace: Trace = ([], [])
    trainer = make_trainer(package=host, max_steps=len(values), callbacks=list(callbacks))
    trainer.fit(scripted(host, values, make, trace))
    return trace


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("host", HOSTS)
def test_the_optimizer_moves_less_for_as_many_steps_and_schedulers_see_nothing(host: str, make: Make) -> None:
    callback = watcher(ACTION)
    weights, rates = run(host, BURST, [callback], make)
    assert [alarm.step for alarm in callback.alarms] == [80, 110]
    expected, expected_rates = by_hand(BURST, make)
    assert rates == expected_rates
    assert weights == expected
    assert weights != by_hand(BURST, make, lowered=())[0]


@pytest.mark.parametrize("host", ["plain", PACKAGES[0]])
def test_an_alarm_while_rates_are_lowered_starts_the_time_anew(host: str) -> None:
    callback = watcher({**ACTION, "num_steps": 35})
    weights, rates = run(host, healthy_then_two(), [callback], sgd)
    assert [alarm.step for alarm in callback.alarms] == [80, 110]
    # The factor is not applied twice.
    expected, expected_rates = by_hand(healthy_then_two(), sgd, lowered=range(81, 146))
    assert (weights, rates) == (expected, expected_rates)


def healthy_then_two() -> list[float]:
    """As BURST, and longer."""
    return BURST + healthy(20, seed=9)


def test_two_callbacks_multiply() -> None:
    values = with_spikes(healthy(110), {80: 9.0})
    callbacks = [watcher(ACTION), watcher({**ACTION, "factor": 0.5, "num_steps": 10}, name="b")]
    weights, _ = run("plain", values, callbacks, sgd)
    assert weights == by_hand(values, sgd, lowered=range(81, 91), factor=0.125)[0]


def test_groups_that_share_a_tensor_are_scaled_once() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]]}, {"params": [weights[2]], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1), foreach=False)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    rates = LearningRates()
    rates.scale(optimizer, 0.5)
    rates.scale(optimizer, 0.5)  # twice before a step is once
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.05, 0.05, 0.25])
    for weight in weights:
        weight.grad = torch.ones(1)
    optimizer.step()
    assert [weight.item() for weight in weights] == pytest.approx([0.95, 0.95, 0.75])
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.1, 0.5])
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]


def test_no_hook_is_left_when_it_is_over() -> None:
    optimizer = sgd(OneLayer().parameters())
    rates = LearningRates()
    for _ in range(3):
        rates.scale(optimizer, 0.5)
        optimizer.step()
    assert len(optimizer._optimizer_step_post_hooks) == 1
    del rates
    assert len(optimizer._optimizer_step_post_hooks) == 0


class BreaksOff(torch.optim.SGD):
    """Raises in its step when it is told to."""

    breaks = False

    def step(self, closure: Any = None) -> Any:
        """The usual one, or none."""
        if self.breaks:
            raise ArithmeticError("no step")
        return super().step(closure)


@pytest.mark.parametrize("host", ["plain", "accelerate"])
def test_a_step_that_raises_leaves_the_rate_as_it_was(host: str) -> None:
    made: list[BreaksOff] = []

    class Breaks(StabilizerCallback):
        """Lets the optimizer raise at a step with a lowered rate."""

        def on_gradients(self, context: StepContext) -> None:
            made[0].breaks = context.step == 85

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(BreaksOff(parameters, lr=1e-5))
        return made[0]

    with pytest.raises(ArithmeticError, match="no step"):
        run(host, BURST, [watcher(ACTION), Breaks()], make)
    assert rate_of(made[0]) == pytest.approx(by_hand(BURST[:85], sgd)[1][-1])


def test_a_callback_that_may_not_cannot() -> None:
    class Lowers(StabilizerCallback):
        """Has not said that it does."""

        def on_gradients(self, context: StepContext) -> None:
            context.plan.scale_lr(0.5)

    with pytest.raises(ValueError, match="lowers_lr = True"):
        run("plain", [1.0], [Lowers(strict=True)], sgd)
