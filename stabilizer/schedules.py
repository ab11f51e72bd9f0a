"""What a learning-rate schedule will do over a run, found out without moving it."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import math
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

__all__ = ["Schedule", "host_numbers", "peek"]

_MAX_SECONDS = 0.04
_NUM_POINTS = 128
# Steps up to which a rule that only knows the last rate is followed one by one.
_MAX_FOLLOWED = 5000
# Of the rate: a warm-up has ended where this little is missing.
_TOLERANCE = 1e-6

# From a scheduler step to the rate of every parameter group.
Rates = Callable[[int], Sequence[float]]

_PURE = (lr_scheduler.LambdaLR, lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
_FACTORS = (
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.PolynomialLR,
)
_METHODS = ("step", "get_lr", "_update_lr", "_get_closed_form_lr")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A learning rate over a run, of the parameter group whose rate rises highest.

    Attributes:
        start: Rate of the first optimizer step.
        peak: The highest one.
        end: Rate of the last optimizer step.
        warmup_steps: Optimizer steps before the highest rate is reached for the first time.
        num_steps: Optimizer steps of the run.
    """

    start: float
    peak: float
    end: float
    warmup_steps: int
    num_steps: int


def peek(scheduler: Any, *, num_steps: int, steps_per_scheduler_step: float = 1.0) -> Schedule:
    """Find out what a scheduler will do, from the first step of the run, wherever it stands now.

    The scheduler and its optimizer stay as they are: the rules of torch are evaluated on copies, at a few hundred
    steps, whatever the length of the run. Needs at most one read of device memory (rates that are tensors).

    Args:
        scheduler: One of `torch.optim.lr_scheduler`, not wrapped.
        num_steps: Optimizer steps of the run.
        steps_per_scheduler_step: Optimizer steps between two steps of the scheduler; below 1 if it moves several times
            a step.

    Returns:
        The rate where it starts, peaks and ends.

    Raises:
        ValueError: If it cannot be known; the message is the reason.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50))
        >>> peek(scheduler, num_steps=1000)
        Schedule(start=0.0, peak=0.1, end=0.1, warmup_steps=50, num_steps=1000)
    """
    if num_steps < 1 or steps_per_scheduler_step <= 0:
        raise ValueError(
            f"num_steps={num_steps}, steps_per_scheduler_step={steps_per_scheduler_step}: expected at least one step, "
            "and a positive ratio"
        )
    deadline = time.monotonic() + _MAX_SECONDS
    values: dict[int, Sequence[float]] = {}

    def evaluate(steps: Sequence[int], rates: Rates) -> None:
        for step in steps:
            if time.monotonic() > deadline:
                raise ValueError(f"{type(scheduler).__name__} takes too long to evaluate")
            if step not in values:
                # A little more than the ratio: 3 / (1 / 3) is 9, and not 8.999...
                values[step] = rates(int(step / steps_per_scheduler_step * (1 + 1e-12) + 1e-9))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rates = _rates(scheduler, _numbers_in(scheduler), is_accelerated=steps_per_scheduler_step < 1)
            evaluate(_coarse(num_steps), rates)
            group = max(range(len(values[0])), key=lambda number: max(value[number] for value in values.values()))
            evaluate(_fine(num_steps, {step: value[group] for step, value in values.items()}), rates)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{type(scheduler).__name__} raised {type(error).__name__}: {error}") from error
    return _summary({step: float(values[step][group]) for step in sorted(values)}, num_steps)


def host_numbers(values: Sequence[Any]) -> list[float]:
    """Numbers that may be tensors, with one wait for each device they are on.

    Args:
        values: Numbers and tensors of one element.

    Returns:
        As Python numbers, in order.
    """
    tensors = {id(value): value for value in values if isinstance(value, Tensor)}
    numbers: dict[int, float] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        own = {key: tensor for key, tensor in tensors.items() if tensor.device == device}
        stacked = torch.stack([tensor.detach().reshape(()).to(torch.get_default_dtype()) for tensor in own.values()])
        numbers.update(zip(own, stacked.tolist(), strict=True))
    return [numbers[id(value)] if isinstance(value, Tensor) else float(value) for value in values]


def _coarse(num_steps: int) -> list[int]:
    """Evenly over the run, and densely at its start, where warm-ups are short."""
    even = {round(number * (num_steps - 1) / _NUM_POINTS) for number in range(_NUM_POINTS + 1)}
    return sorted(even | {step for step in (2**power for power in range(40)) if step < num_steps})


def _fine(num_steps: int, values: dict[int, float]) -> list[int]:
    """Between the neighbours of the first point that reaches the peak: the true one may lie beside it."""
    steps = sorted(values)
    position = steps.index(_first_at_peak(values))
    first, last = steps[max(0, position - 1)], steps[min(len(steps) - 1, position + 1)]
    return sorted({first + round(number * (last - first) / _NUM_POINTS) for number in range(_NUM_POINTS + 1)})


def _first_at_peak(values: dict[int, float]) -> int:
    peak = max(values.values())
    return min(step for step, value in values.items() if value >= peak * (1 - _TOLERANCE))


def _summary(values: dict[int, float], num_steps: int) -> Schedule:
    if not all(math.isfinite(value) for value in values.values()):
        raise ValueError("the rate is not finite at some steps")
    return Schedule(
        start=values[0],
        peak=max(values.values()),
        end=values[num_steps - 1],
        warmup_steps=_first_at_peak(values),
        num_steps=num_steps,
    )


def _kind(scheduler: Any) -> type:
    """The class of torch whose rule a scheduler follows; of a subclass too, unless it has a rule of its own."""
    for kind in type(scheduler).__mro__:
        if kind.__module__ == lr_scheduler.__name__:
            break
        own = [method for method in _METHODS if method in vars(kind)]
        if own or kind is object:
            raise ValueError(f"{type(scheduler).__name__} follows a rule of its own")
    if any(method in vars(scheduler) for method in _METHODS):
        raise ValueError(f"{type(scheduler).__name__} has had its rule replaced")
    return kind


def _parts(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


def _numbers_in(scheduler: Any) -> dict[int, float]:
    """All rates that are tensors, by identity, read together."""
    found: dict[int, Any] = {}
    for part in _parts(scheduler):
        _kind(part)
        options = [value for group in part.optimizer.param_groups for key, value in group.items() if key != "params"]
        listed = [value for values in vars(part).values() if isinstance(values, list) for value in values]
        tensors = [value for value in (*options, *listed) if isinstance(value, Tensor) and value.numel() == 1]
        found.update((id(tensor), tensor) for tensor in tensors)
    return dict(zip(found, host_numbers(list(found.values())), strict=True))


def _rates(scheduler: Any, numbers: dict[int, float], *, is_accelerated: bool) -> Rates:
    kind = _kind(scheduler)
    parts = [_rates(part, numbers, is_accelerated=False) for part in getattr(scheduler, "_schedulers", ())]
    if kind is lr_scheduler.SequentialLR:
        return _sequence(parts, scheduler._milestones)
    if kind is lr_scheduler.ChainedScheduler:
        return _chain(scheduler, parts, numbers)
    twin = _twin(scheduler, numbers)
    if kind is lr_scheduler.MultiplicativeLR:
        return _products(twin)
    if kind is lr_scheduler.CosineAnnealingWarmRestarts:
        return lambda step: _restarted(twin, step)
    if kind not in _PURE and not hasattr(kind, "_get_closed_form_lr"):
        raise ValueError(f"{type(scheduler).__name__} decides while the run goes on")
    rule = twin.get_lr if kind in _PURE else twin._get_closed_form_lr
    # Where a scheduler moves several times a step, Accelerate stops a OneCycleLR at its end.
    last = twin.total_steps if kind is lr_scheduler.OneCycleLR and is_accelerated else None

    def rates(step: int) -> Sequence[float]:
        twin.last_epoch = step if last is None else min(step, last)
        found: Sequence[float] = rule()
        return found

    return rates


def _twin(scheduler: Any, numbers: dict[int, float]) -> Any:
    """A copy with groups of its own (some rules write momentum into them), which hold plain numbers."""

    def plain(value: Any) -> Any:
        return numbers.get(id(value), value) if isinstance(value, Tensor) else value

    twin = copy.copy(scheduler)
    for name, value in vars(twin).items():
        if isinstance(value, list):
            setattr(twin, name, [_own(plain(item)) for item in value])
    if getattr(twin, "_scale_fn_custom", None) is not None:
        twin._scale_fn_custom = _own(twin._scale_fn_custom)
    groups = [
        {key: plain(value) for key, value in group.items() if key != "params"}
        for group in scheduler.optimizer.param_groups
    ]
    twin.optimizer = types.SimpleNamespace(param_groups=groups)
    twin._get_lr_called_within_step = True
    return twin


def _own(item: Any) -> Any:
    """A callable object may count its calls; torch saves what it holds, so that must not change."""
    is_plain = isinstance(item, types.FunctionType | types.BuiltinFunctionType | types.MethodType)
    return copy.copy(item) if callable(item) and not is_plain else item


def _sequence(parts: Sequence[Rates], milestones: Sequence[int]) -> Rates:
    def rates(step: int) -> Sequence[float]:
        number = bisect.bisect_right(milestones, step)
        return parts[number](step - milestones[number - 1] if number else step)

    return rates


def _chain(scheduler: Any, parts: Sequence[Rates], numbers: dict[int, float]) -> Rates:
    for part in scheduler._schedulers:
        is_cosine = _kind(part) is lr_scheduler.CosineAnnealingLR and part.eta_min == 0
        if _kind(part) not in _FACTORS and not is_cosine:
            raise ValueError(f"a chain with {type(part).__name__} depends on every step before")
    bases = _twin(scheduler._schedulers[0], numbers).base_lrs

    def rates(step: int) -> Sequence[float]:
        found = [part(step) for part in parts]
        return [
            base * math.prod(values[number] / base for values in found) if base else 0.0
            for number, base in enumerate(bases)
        ]

    return rates


def _products(twin: Any) -> Rates:
    rates = [list(twin.base_lrs)]

    def follow(step: int) -> Sequence[float]:
        if step > _MAX_FOLLOWED:
            raise ValueError(f"MultiplicativeLR is followed for {_MAX_FOLLOWED} steps only, step {step} is beyond")
        while len(rates) <= step:
            factors = [function(len(rates)) for function in twin.lr_lambdas]
            rates.append([rate * factor for rate, factor in zip(rates[-1], factors, strict=True)])
        return rates[step]

    return follow


def _restarted(twin: Any, step: int) -> list[float]:
    twin.step(step)
    return [group["lr"] for group in twin.optimizer.param_groups]
