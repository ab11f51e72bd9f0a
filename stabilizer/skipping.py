"""Leaving out an optimizer's step without a trace: parameters, moments and step counts stay as they are, bit by bit.

Not by gradients of zero: an optimizer moves on zeros, by its moments and by weight decay, and 0 * NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["drop_gradients_", "skip_on_device", "skips_on_device", "stop_skipping"]

_MARK = "_stabilizer_found_inf"


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can be told on the device to leave out a step, so that the host need not know.

    Args:
        optimizer: Not wrapped. torch's fused ones can (`fused=True` for all of their parameter groups).
    """
    groups = optimizer.param_groups
    takes_found_inf = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    # A first step has no dampening: one that is skipped must not leave a momentum behind, see `_make_momentum`.
    is_damped = any(group.get("dampening") for group in groups)
    return takes_found_inf and not is_damped and all(group.get("fused") is True for group in groups)


def skip_on_device(optimizer: torch.optim.Optimizer, flag: Tensor) -> None:
    """Tell a fused optimizer whether to leave out its next step; the host does not wait.

    It is the way in which gradient scalers do it: the kernel sees the flag, changes nothing, and the step counts are
    put back. Where a scaler has left a flag of its own, either of them is enough.

    Args:
        optimizer: One that `skips_on_device`.
        flag: Whether, shape (), bool or a number.
    """
    _make_momentum(optimizer)
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    ours = flag.to(device, torch.float32, non_blocking=device.type != "cpu")
    state: Any = optimizer
    others = getattr(optimizer, "found_inf", None)
    if others is None:
        setattr(optimizer, _MARK, True)
        state.found_inf = ours
    else:
        state.found_inf = torch.maximum(others.to(device, non_blocking=device.type != "cpu"), ours)


def stop_skipping(optimizer: torch.optim.Optimizer) -> None:
    """Take back what `skip_on_device` has left on the optimizer; a scaler takes its own away.

    Args:
        optimizer: As given there.
    """
    if vars(optimizer).pop(_MARK, False):
        vars(optimizer).pop("found_inf", None)


def drop_gradients_(optimizer: torch.optim.Optimizer) -> None:
    """Leave no gradient to an optimizer, so that its step does nothing.

    Args:
        optimizer: Any of torch's: a parameter without a gradient is no concern of theirs.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _make_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give a fused SGD its momentum before its first step.

    It makes the buffers itself, without any values in them, and fills them only if the step is not skipped: the next
    step would take what happens to be in memory for a momentum. From zeros the first step gives the same bits.
    """
    for group in optimizer.param_groups:
        # Fused optimizers of other kinds make moments of zeros.
        if not group.get("momentum") or not isinstance(optimizer, torch.optim.SGD):
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
