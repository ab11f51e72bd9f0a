"""Facts about a run before its first step: what is set, and where practice advises otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.errors import logger
from stabilizer.inspection import compute_shapes, inner_optimizer, reductions, whole_sizes
from stabilizer.parameters import named_parameters
from stabilizer.reduction import world_size
from stabilizer.schedules import Schedule, host_numbers, peek
from stabilizer.skipping import skips_on_device

__all__ = ["Fact", "Setting", "facts"]

_MAX_NAMES = 5
_TILE = 16
_WARM_UP = (0.05, 0.10)
_WARM_UP_ADVICE = "the first updates are the noisiest: warm up over 5-10 % of the steps"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a host knows of a run.

    Attributes:
        host: Its name.
        model: As it trains, wrapped.
        optimizers: Not wrapped.
        callbacks: All of ours.
        clipping: Who clips, when and at what limit, apart from our callbacks; empty if nobody does.
        precision: In the host's words.
        schedulers: Each with the optimizer steps between two of its steps, `None` if that is not known.
        num_steps: Planned optimizer steps, `None` if that is not known.
    """

    host: str
    model: nn.Module
    optimizers: Sequence[Optimizer]
    callbacks: Sequence[StabilizerCallback]
    clipping: str
    precision: str
    schedulers: Sequence[tuple[Any, float | None]] = ()
    num_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Fact:
    """One row of the table.

    Attributes:
        name: What it is about.
        value: What is the case.
        advice: What practice advises instead, why, and what to set; empty if there is nothing to say.
    """

    name: str
    value: str
    advice: str = ""


def facts(setting: Setting) -> list[Fact]:
    """Find out all facts of a run.

    Args:
        setting: What the host knows.

    Returns:
        The rows, in the order of the table. What fails is a row that says so.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> options = {"model": model, "optimizers": [optimizer], "callbacks": []}
        >>> found = facts(Setting(host="plain loop", clipping="", precision="32", **options))
        >>> [fact.name for fact in found if fact.advice]
        ['gradient clipping', 'learning rate']
    """
    rows: list[Fact] = []
    rules: dict[str, Callable[[Setting], Iterable[Fact]]] = {
        "gradient clipping": _clipping,
        "precision": _precision,
        "gradient reduction": _reduction,
        "learning rate": _learning_rates,
        "optimizer": _optimizers,
        "parameters": _parameters,
        "matrix dimensions": _dimensions,
        "callbacks": _callbacks,
    }
    for name, rule in rules.items():
        try:
            rows.extend(rule(setting))
        except Exception as error:
            logger.debug("preflight: %s", name, exc_info=error)
            rows.append(Fact(name, f"not known ({type(error).__name__}: {error})"))
    return rows


def _clipping(setting: Setting) -> Iterator[Fact]:
    ours = [callback.state_key for callback in setting.callbacks if callback.clips]
    advice = ""
    if not setting.clipping and not ours:
        advice = (
            "one bad batch can undo thousands of steps; practice clips the total norm: add AdaptiveClipThreshold(), "
            "whose threshold follows the run, or clip at 1.0 (gradient_clip_val=1.0, clip_grad_norm_(..., 1.0))"
        )
    elif "by value" in setting.clipping:
        advice = "a clip by value turns the direction of the step; clip by total norm, at 1.0"
    yield Fact("gradient clipping", "; ".join(filter(None, [setting.clipping, *ours])) or "nobody clips", advice)


def _precision(setting: Setting) -> Iterator[Fact]:
    dtypes = dict.fromkeys(_dtype(p.dtype) for p in setting.model.parameters() if p.requires_grad)
    yield Fact("precision", f"{setting.precision}; trainable parameters are {' and '.join(dtypes) or 'none'}")


def _reduction(setting: Setting) -> Iterator[Fact]:
    found = reductions(setting.model)
    if not found:
        yield Fact("gradient reduction", "none: one process")
        return
    is_one = len(found) == 1
    values = []
    for (who, dtype), count in found.items():
        what = _dtype(dtype) if isinstance(dtype, torch.dtype) else dtype
        values.append(f"{who}: {what}" + ("" if is_one else f" ({count} tensors)"))
    low = {who for who, dtype in found if dtype in (torch.bfloat16, torch.float16)}
    ways = {
        "DDP": "keep parameters in float32 under autocast, and register no compressing hook",
        "FSDP1": "set reduce_dtype=torch.float32 in MixedPrecision, and register no compressing hook",
        "FSDP2": "set reduce_dtype=torch.float32 in MixedPrecisionPolicy",
    }
    way = "; ".join(ways[who] for who in ways if who in low)
    advice = f"16-bit reduction swallows small gradients; {way}" if low else ""
    if any(who == "nobody" for who, _ in found):
        values.append(f"{world_size()} processes train")
    yield Fact("gradient reduction", ", ".join(values), advice)


def _learning_rates(setting: Setting) -> Iterator[Fact]:
    known = {id(optimizer) for optimizer in setting.optimizers}
    for number, optimizer in enumerate(setting.optimizers):
        name = "learning rate" if len(setting.optimizers) == 1 else f"learning rate {number}"
        own = [pair for pair in setting.schedulers if inner_optimizer(getattr(pair[0], "optimizer", None)) is optimizer]
        yield _constant(name, optimizer, setting.host) if not own else _scheduled(name, own, setting)
    others = [
        pair for pair in setting.schedulers if id(inner_optimizer(getattr(pair[0], "optimizer", None))) not in known
    ]
    if others:
        yield _scheduled("learning rate (other)", others, setting)


def _constant(name: str, optimizer: Optimizer, host: str) -> Fact:
    rates = sorted(set(host_numbers([group["lr"] for group in optimizer.param_groups if "lr" in group])))
    span = " to ".join(f"{rate:.3g}" for rate in dict.fromkeys((rates[0], rates[-1]))) if rates else "not known"
    unseen = (
        ""
        if host == "Lightning"
        else " (a scheduler that is neither prepared nor passed to attach as schedulers= is unseen)"
    )
    return Fact(name, f"constant: {span}, no scheduler", _WARM_UP_ADVICE + " and let the rate decay then" + unseen)


def _scheduled(name: str, schedulers: Sequence[tuple[Any, float | None]], setting: Setting) -> Fact:
    kinds = " and ".join(type(scheduler).__name__ for scheduler, _ in schedulers)
    (scheduler, ratio), num_steps = schedulers[0], setting.num_steps
    if len(schedulers) > 1:
        return Fact(name, f"not known: {kinds} move the rate of one optimizer together")
    if num_steps is None:
        way = "" if setting.host == "Lightning" else "; pass num_steps="
        return Fact(name, f"{kinds}, shares not known: the number of planned steps is not known{way}")
    if ratio is None:
        return Fact(name, f"{kinds}, not known: when the scheduler steps is up to the training loop")
    try:
        return _schedule(name, kinds, peek(scheduler, num_steps=num_steps, steps_per_scheduler_step=ratio))
    except ValueError as error:
        return Fact(name, f"{kinds}, not known: {error}")


def _schedule(name: str, kind: str, schedule: Schedule) -> Fact:
    share, tolerance = schedule.warmup_steps / schedule.num_steps, 1.5 / schedule.num_steps + 0.001
    left = schedule.end / schedule.peak if schedule.peak else 1.0
    is_short, is_long = share < _WARM_UP[0] - tolerance, share > _WARM_UP[1] + tolerance
    advice = []
    if is_short or is_long:
        advice.append(_WARM_UP_ADVICE if is_short else "a warm-up over 5-10 % of the steps is enough")
    if left > 0.9:
        advice.append("let the rate decay after the warm-up, to 0-10 % of its peak")
    warm = f"warm-up {100 * share:.1f} % of {_people(schedule.num_steps)} steps" if share else "no warm-up"
    course = f"ends at {100 * left:.0f} % of it" if left <= 0.9 else "does not decay"
    return Fact(name, f"{kind}: {warm}, peak {schedule.peak:.3g}, {course}", "; ".join(advice))


def _optimizers(setting: Setting) -> Iterator[Fact]:
    may_skip = [callback.state_key for callback in setting.callbacks if callback.may_skip]
    for number, optimizer in enumerate(setting.optimizers):
        name = "optimizer" if len(setting.optimizers) == 1 else f"optimizer {number}"
        kind = type(optimizer).__name__
        is_free = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
        wait = (
            f"to skip a step the host reads one number a step{' (free on a CPU)' if is_free else ', and waits for it'}"
        )
        if skips_on_device(optimizer):
            yield Fact(name, f"{kind}, fused: steps are skipped on the device (found_inf), the host waits for nothing")
        elif "fused" not in optimizer.defaults:
            yield Fact(name, f"{kind}, has no fused form: {wait}")
        else:
            advice = f"{', '.join(may_skip)} may skip steps: {kind}(fused=True) does it without a wait"
            yield Fact(name, f"{kind}, not fused: {wait}", advice if may_skip and not is_free else "")


def _parameters(setting: Setting) -> Iterator[Fact]:
    sizes, named = whole_sizes(setting.model), dict(named_parameters(setting.model))
    counts = {True: 0, False: 0}
    for parameter in named:
        counts[parameter.requires_grad] += sizes.get(parameter, parameter.numel())
    yield Fact("parameters", f"{_people(counts[True])} trainable, {_people(counts[False])} frozen")
    moved = {p for optimizer in setting.optimizers for group in optimizer.param_groups for p in group["params"]}
    left = [name for parameter, name in named.items() if parameter.requires_grad and parameter not in moved]
    if left:
        advice = "they cost a gradient and never move: hand them to an optimizer, or freeze them (requires_grad=False)"
        yield Fact("in no optimizer", _some(left), advice)
    frozen = [name for parameter, name in named.items() if not parameter.requires_grad and parameter in moved]
    if frozen:
        yield Fact("frozen, in an optimizer", f"{_some(frozen)}: not moved")
    strange = sum(parameter not in named for parameter in moved)
    if strange:
        advice = "the model does not have them: make the optimizer after the model is wrapped and moved"
        yield Fact("unknown to the model", f"{strange} of the optimizers' parameters", advice)


def _dimensions(setting: Setting) -> Iterator[Fact]:
    names: dict[Tensor, str] = {p: name for p, name in named_parameters(setting.model) if _is_on_gpu(p)}
    shapes = [(p, shape) for p, shape in compute_shapes(setting.model) if p in names and len(shape) == 2]
    if not shapes:
        return
    odd = [f"{names[p]} ({shape[0]} x {shape[1]})" for p, shape in shapes if shape[0] % _TILE or shape[1] % _TILE]
    if odd:
        advice = f"tensor cores work in tiles: pad to multiples of {_TILE}"
        yield Fact("matrix dimensions", f"no multiple of {_TILE}: {_some(odd)}", advice)
    else:
        yield Fact("matrix dimensions", f"all are multiples of {_TILE}")


def _is_on_gpu(parameter: Tensor) -> bool:
    return parameter.device.type == "cuda"


def _callbacks(setting: Setting) -> Iterator[Fact]:
    for callback in setting.callbacks:
        try:
            reasons = list(getattr(callback, "limitations", lambda setting: [])(setting))
        except Exception as error:
            yield Fact(callback.state_key, f"not known ({type(error).__name__}: {error})")
            continue
        value = f"limited in {len(reasons)} {'way' if len(reasons) == 1 else 'ways'}" if reasons else "ok"
        yield Fact(callback.state_key, value, "; ".join(reasons))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _people(number: int) -> str:
    """124439808 -> "124.4 M"."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**4)):
        if number >= size:
            return f"{number / (size if unit != 'k' else 1000):.1f} {unit}"
    return f"{number:,}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)}: {', '.join(names[:_MAX_NAMES])}{more}"
