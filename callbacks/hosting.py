"""What all hosts have in common: what they refuse, how gradients are scaled, how a method is shadowed."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.charts import layout_of
from stabilizer.errors import logger, warn
from stabilizer.parameters import named_parameters

__all__ = [
    "JOINED",
    "arrange_charts",
    "check_callbacks",
    "check_selections",
    "is_disabled",
    "is_joined",
    "is_off",
    "refuse_optimizers",
    "refuse_same_keys",
    "scale_still_in",
    "stand_before",
    "warn_of_two_clips",
]

JOINED = (
    "join has been entered (of DDP, or accelerator.join_uneven_inputs): from here on nothing is measured. A rank "
    "without batches cannot take part, and torch does not tell when the join ends. Give all ranks the same number of "
    "batches (drop_last, even_batches) instead"
)


def is_off() -> bool:
    """Whether the environment turns everything off."""
    return os.environ.get("STABILIZER_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def is_disabled(callbacks: Sequence[StabilizerCallback]) -> bool:
    """Whether the environment turns everything off; says so.

    Args:
        callbacks: Those that will do nothing.
    """
    if not is_off():
        return False
    names = sorted({type(callback).__name__ for callback in callbacks})
    warn(f"STABILIZER_DISABLE is set: {', '.join(names)} do nothing in this run")
    return True


def refuse_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise for optimizers whose steps have no one gradient.

    Args:
        optimizers: All of a run.

    Raises:
        ValueError: For LBFGS.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            "optimizer LBFGS evaluates the loss up to max_iter times a step, so that a step has no one gradient; "
            "use a first-order optimizer or remove the stabilizer callbacks"
        )


def check_selections(callbacks: Sequence[StabilizerCallback], model: nn.Module) -> tuple[str, ...]:
    """Raise for `layers=` and `exclude=` that match nothing in a model, before the first step.

    Args:
        callbacks: All of ours.
        model: The model that will train.

    Returns:
        Names of all parameters: some may be frozen for the moment.

    Raises:
        ValueError: Names the item and what there is.
    """
    names = tuple(name for _, name in named_parameters(model))
    for callback in callbacks:
        callback.choose(names)
        callback.check_model(model)
    return names


def is_joined(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the ranks have entered `DDP.join`, where one without batches answers DDP's collectives, not ours.

    torch keeps the mark when the join has ended, on every rank alike.

    Args:
        model: As it trains.
        optimizer: May take part too.
    """
    return any(getattr(getattr(thing, "_join_config", None), "enable", False) for thing in (model, optimizer))


def scale_still_in(scaler: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The loss scale, if the gradients have not been divided by it yet (fused optimizers do it in their step).

    Args:
        scaler: A `torch.amp.GradScaler`, or `None`.
        optimizer: The one whose gradients are meant, not wrapped.

    Returns:
        Shape (), or `None`.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    if scale is None:
        return None
    # The scaler's own note of what it has done for this optimizer since its last update.
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return scale if stage.name == "READY" else None


def arrange_charts(suites: Any, *, num_optimizers: int) -> None:
    """Arrange the charts of all callbacks and show their arguments, on the process that logs.

    Args:
        suites: `Suites` of a run.
        num_optimizers: How many are measured.
    """
    if not suites.sink.is_logging:
        return
    try:
        charts = [(callback.name, callback.charts()) for callback in suites.callbacks]
        if layout := layout_of(charts, num_optimizers=num_optimizers):
            suites.sink.charts(layout)
    except Exception:
        logger.exception("arranging the charts of TensorBoard failed; training goes on without them")
    suites.facts.begin(suites.sink)


def warn_of_two_clips(callbacks: Sequence[StabilizerCallback], theirs: str) -> bool:
    """Say in which order clips act, where a host clips beside a callback of ours.

    Args:
        callbacks: All of ours.
        theirs: What the host does, as in "Trainer(gradient_clip_val=1.0)".

    Returns:
        Whether there was anything to say.
    """
    acting = sorted((callback for callback in callbacks if callback.clips), key=lambda callback: callback.order)
    if not acting:
        return False
    ours = " and then ".join(dict.fromkeys(type(callback).__name__ for callback in acting))
    several = len({type(callback) for callback in acting}) > 1
    warn(
        f"two clips act on every step: first {ours}, then {theirs} on what {'they leave' if several else 'it leaves'}. "
        "Thresholds follow the gradients before both. Take one of them away, unless the second is meant as a last limit"
    )
    return True


def stand_before(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Let a function stand before a method of one object.

    Args:
        owner: The object.
        name: Of the method.
        function: Takes the method that was there, and its arguments.

    Returns:
        Takes it away again.
    """
    had_own, original, is_on = name in vars(owner), getattr(owner, name), True

    @functools.wraps(original)
    def stands(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not owner:  # a copy of the owner, which shall not act on the original
            return getattr(type(self), name)(self, *args, **kwargs)
        return function(original, *args, **kwargs) if is_on else original(*args, **kwargs)

    # A method, since others (learning-rate schedulers) expect to find one.
    method = types.MethodType(stands, owner)
    setattr(owner, name, method)

    def remove() -> None:
        nonlocal is_on
        is_on = False
        if vars(owner).get(name) is not method:
            return  # somebody else stands before us now and holds us: from here on we only pass through
        if had_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    return remove


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise for what is no callback of ours, is at work already, or has another one's name.

    Args:
        callbacks: What a loop was given.

    Raises:
        ValueError: Names the callback and the way out.
    """
    wrong = [callback for callback in callbacks if not isinstance(callback, StabilizerCallback)]
    if wrong:
        raise ValueError(f"callbacks={wrong[:1]}: expected a list of StabilizerCallback, like [GradNormCallback()]")
    keys = [callback.state_key for callback in callbacks]
    for callback in callbacks:
        if keys.count(callback.state_key) > 1:
            raise ValueError(
                f"two callbacks have the key {callback.state_key!r}, under which values and states would collide; "
                'give one a name: name="second"'
            )
        if callback.driver is not None:
            raise ValueError(f"{callback.state_key} is at work already; leave its `with` block first, or make another")


def refuse_same_keys(own: Sequence[StabilizerCallback], others: Sequence[StabilizerCallback]) -> None:
    """Raise for a callback whose name another handle on the same accelerator has taken.

    Args:
        own: Of the new handle.
        others: Of the handles that are there.

    Raises:
        ValueError: Names it and the way out.
    """
    taken = {callback.state_key for callback in others}
    for callback in own:
        if callback.state_key in taken:
            raise ValueError(
                f"another handle on this accelerator has {callback.state_key!r}, under which values and states would "
                'collide; give this one a name, as in name="second", or attach once with all optimizers in a list'
            )
