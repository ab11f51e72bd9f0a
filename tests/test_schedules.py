"""What `peek` says of a schedule, against the rates of a real run, and that nothing moves."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from stabilizer.schedules import Schedule, host_numbers, peek

NUM_STEPS = 60


def _optimizer(lr: Any = 0.1) -> Optimizer:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [first], "lr": lr / 10}, {"params": [second]}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def _warmup(step: int) -> float:
    return min(1.0, step / 7)


class Warmup:
    """A callable object that counts: torch saves what it holds."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, step: int) -> float:
        self.num_calls += 1
        return min(1.0, step / 7)


class Renamed(lr_scheduler.LinearLR):
    """Torch's rule under another name."""


def _sequential(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=54, eta_min=1e-4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[6])


def _nested(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    restarts = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=2)
    warmup = lr_scheduler.LambdaLR(optimizer, _warmup)
    steps = lr_scheduler.StepLR(optimizer, 4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, restarts, steps], milestones=[7, 40])


def _chained(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    return lr_scheduler.ChainedScheduler([warmup, decay, cosine])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, _warmup),
    "callable": lambda o: lr_scheduler.LambdaLR(o, Warmup()),
    "two_lambdas": lambda o: lr_scheduler.LambdaLR(o, [_warmup, lambda step: 1 / (1 + step)]),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 1.1 if step < 5 else 0.95),
    "step": lambda o: lr_scheduler.StepLR(o, 13),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [10, 30]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=9),
    "linear": lambda o: lr_scheduler.LinearLR(o, start_factor=0.01, total_iters=9),
    "renamed": lambda o: Renamed(o, start_factor=0.01, total_iters=9),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=50, power=2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=50, eta_min=1e-3),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7, T_mult=2),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.2, 0.5], total_steps=NUM_STEPS, pct_start=0.1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=9, mode="triangular2"),
    "custom_cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=9, scale_fn=lambda x: 1 / x),
    "sequential": _sequential,
    "nested": _nested,
    "chained": _chained,
}


def _lived(make: Callable[[Any], Any], *, num_steps: int, moves: Callable[[int], int]) -> list[list[float]]:
    """The rates of a real run, by step and group; `moves(step)` is how often the scheduler steps after a step."""
    optimizer = _optimizer()
    scheduler = make(optimizer)
    rates = []
    for step in range(num_steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        for _ in range(moves(step)):
            scheduler.step()
    return rates


def _expected(rates: list[list[float]]) -> Schedule:
    group = max(range(2), key=lambda number: max(row[number] for row in rates))
    values = [row[group] for row in rates]
    first = next(step for step, value in enumerate(values) if value >= max(values) * (1 - 1e-6))
    return Schedule(values[0], max(values), values[-1], first, len(values))


def _check(found: Schedule, expected: Schedule) -> None:
    assert (found.warmup_steps, found.num_steps) == (expected.warmup_steps, expected.num_steps)
    for name in ("start", "peak", "end"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("name", SCHEDULERS)
def test_peek_tells_what_a_run_lives_through(name: str) -> None:
    make = SCHEDULERS[name]
    rates = _lived(make, num_steps=NUM_STEPS, moves=lambda step: 1)
    _check(peek(make(_optimizer()), num_steps=NUM_STEPS), _expected(rates))


@pytest.mark.parametrize(
    ("ratio", "moves"),
    [(0.5, lambda step: 2), (1 / 3, lambda step: 3), (4.0, lambda step: int((step + 1) % 4 == 0))],
)
@pytest.mark.parametrize("name", ["lambda", "sequential", "cosine"])
def test_a_scheduler_that_moves_more_or_less_often_than_the_optimizer(name: str, ratio: float, moves: Any) -> None:
    make = SCHEDULERS[name]
    rates = _lived(make, num_steps=29, moves=moves)
    _check(peek(make(_optimizer()), num_steps=29, steps_per_scheduler_step=ratio), _expected(rates))


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("num_before", [0, 17])
def test_nothing_moves_and_a_resumed_run_is_seen_whole(name: str, num_before: int) -> None:
    optimizer = _optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    fresh = peek(scheduler, num_steps=NUM_STEPS)
    for _ in range(num_before):
        optimizer.step()
        scheduler.step()
    before = copy.deepcopy((scheduler.state_dict(), optimizer.state_dict(), list(vars(optimizer))))
    generator = torch.get_rng_state()
    again = peek(scheduler, num_steps=NUM_STEPS)
    assert (scheduler.state_dict(), optimizer.state_dict(), list(vars(optimizer))) == before
    assert torch.equal(torch.get_rng_state(), generator)
    _check(again, fresh)
    # And it goes on as if nobody had looked.
    rates = _lived(SCHEDULERS[name], num_steps=num_before + 2, moves=lambda step: 1)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == rates[-1]


def test_a_callable_object_of_the_user_is_not_called() -> None:
    warmup = Warmup()
    scheduler = lr_scheduler.LambdaLR(_optimizer(), warmup)
    before = warmup.num_calls
    peek(scheduler, num_steps=NUM_STEPS)
    assert warmup.num_calls == before > 0


@pytest.mark.alone
@pytest.mark.parametrize("num_groups", [1, 60])
@pytest.mark.parametrize("name", ["lambda", "sequential", "cosine", "restarts", "nested", "chained"])
def test_a_million_steps_take_no_time(name: str, num_groups: int) -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(num_groups)]
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    durations = []
    for _ in range(10):  # the machine may be busy
        start = time.perf_counter()
        with contextlib.suppress(ValueError):  # it has been interrupted for so long that it has given up
            assert peek(scheduler, num_steps=1_000_000).num_steps == 1_000_000
            durations.append(time.perf_counter() - start)
        if len(durations) == 3:
            break
    assert min(durations) < 0.05


@pytest.mark.parametrize("share", [0.0001, 0.0123, 0.05, 0.077, 0.4])
def test_the_share_of_a_long_warmup_is_right(share: float) -> None:
    num_steps, warm = 1_000_000, round(share * 1_000_000)

    def rule(step: int) -> float:
        return step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (num_steps - warm)))

    found = peek(lr_scheduler.LambdaLR(_optimizer(), rule), num_steps=num_steps)
    assert found.warmup_steps == pytest.approx(warm, abs=200)
    assert found.peak == pytest.approx(0.1, rel=0.01)
    assert found.end == pytest.approx(0, abs=1e-6)


def test_rates_that_are_tensors() -> None:
    rates = _lived(_sequential, num_steps=NUM_STEPS, moves=lambda step: 1)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1), foreach=False)
    scheduler = _sequential(optimizer)
    held = optimizer.param_groups[0]["lr"]
    before = held.clone()
    found = peek(scheduler, num_steps=NUM_STEPS)
    assert optimizer.param_groups[0]["lr"] is held
    assert torch.equal(held, before)
    expected = _expected(rates)
    assert found.peak == pytest.approx(expected.peak, rel=1e-5)
    assert found.warmup_steps == expected.warmup_steps
    assert all(isinstance(value, float) for value in (found.start, found.peak, found.end))


def test_numbers_from_one_device_come_with_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or original(tensor))
    values = [torch.tensor(0.5), 2, torch.tensor([0.25]), 1e-3]
    assert host_numbers(values) == [0.5, 2.0, 0.25, 1e-3]
    assert reads == [(2,)]


class Own(lr_scheduler.LRScheduler):
    """A rule that nobody knows."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _raising(step: int) -> float:
    if step > 3:
        raise RuntimeError("no such step")
    return 1.0


def _slow(step: int) -> float:
    time.sleep(0.002)
    return 1.0


def _replaced(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    scheduler.get_lr = lambda: [1.0, 1.0]  # type: ignore[method-assign]
    return scheduler


def _plateau(optimizer: Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_plateau, "ReduceLROnPlateau decides while the run goes on"),
        (Own, "Own follows a rule of its own"),
        (lambda o: object(), "object follows a rule of its own"),
        (_replaced, "StepLR has had its rule replaced"),
        (lambda o: lr_scheduler.LambdaLR(o, _raising), "LambdaLR raised RuntimeError: no such step"),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: math.nan if step == 8 else 1.0), "not finite"),
        (lambda o: lr_scheduler.LambdaLR(o, _slow), "LambdaLR takes too long"),
        (lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20), "Tried to step"),
        (lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LambdaLR(o, _warmup)]), "a chain with LambdaLR"),
    ],
)
def test_what_cannot_be_known_has_a_reason(make: Any, reason: str) -> None:
    scheduler = make(_optimizer())
    with pytest.raises(ValueError, match=reason):
        peek(scheduler, num_steps=NUM_STEPS)


def test_a_long_multiplicative_rule_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A slow machine would give up before: that is another reason.
    monkeypatch.setattr("stabilizer.schedules._MAX_SECONDS", 10.0)
    scheduler = lr_scheduler.MultiplicativeLR(_optimizer(), lambda step: 0.999)
    with pytest.raises(ValueError, match="5000 steps only"):
        peek(scheduler, num_steps=1_000_000)


def test_one_cycle_that_moves_several_times_a_step_stops_at_its_end() -> None:
    def make(optimizer: Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=NUM_STEPS, pct_start=0.2)

    # As Accelerate does it: twice a step on two processes, up to and including `total_steps`.
    rates = _lived(make, num_steps=NUM_STEPS, moves=lambda step: 2 if 2 * step < NUM_STEPS else 0)
    _check(peek(make(_optimizer()), num_steps=NUM_STEPS, steps_per_scheduler_step=0.5), _expected(rates))


@pytest.mark.parametrize(("num_steps", "ratio"), [(0, 1.0), (10, 0.0)])
def test_arguments_out_of_range(num_steps: int, ratio: float) -> None:
    scheduler = lr_scheduler.StepLR(_optimizer(), 3)
    with pytest.raises(ValueError, match="expected at least one step"):
        peek(scheduler, num_steps=num_steps, steps_per_scheduler_step=ratio)
