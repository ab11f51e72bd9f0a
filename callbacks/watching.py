"""How a loop is watched: what its model is given, and which optimizer steps are none."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

__all__ = ["CLOSURE", "ForwardHook", "has_closure", "is_nested_step", "is_state_setup"]

CLOSURE = (
    "optimizer.step(closure) computes gradients inside the step, where they cannot be seen before the optimizer uses "
    "them: its steps are not measured. Call backward() and then optimizer.step()"
)


class ForwardHook:
    """Tells a handle of batches. Copies of the model (an average of its weights, say) get one that does nothing.

    Args:
        handle: Kept by a weak reference; `None` for none.
    """

    def __init__(self, handle: Any = None) -> None:
        self._handle = None if handle is None else weakref.ref(handle)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What `register_forward_pre_hook` wants."""
        handle = None if self._handle is None else self._handle()
        if handle is not None:
            handle.see_batch(module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> ForwardHook:
        """One that does nothing."""
        return ForwardHook()

    def __reduce__(self) -> Any:
        """One that does nothing."""
        return ForwardHook, ()


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an optimizer's step is given a closure.

    Args:
        args: Positional arguments of the step, the first of which is the optimizer, as torch's hooks get them.
        kwargs: Its other arguments.
    """
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))


def is_state_setup() -> bool:
    """Whether torch steps the optimizer on zeros, only to have its state made for a checkpoint."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step is inside another of its own: a class whose `step` calls `super().step()`.

    torch runs the hooks for each of them.

    Args:
        optimizer: Whose hook asks.
    """
    frame: FrameType | None = sys._getframe(1)
    num_steps = 0
    while frame is not None:
        is_torch_s = frame.f_code.co_name == "wrapper" and frame.f_code.co_filename.endswith("optimizer.py")
        num_steps += is_torch_s and any(value is optimizer for value in frame.f_locals.get("args", ()))
        frame = frame.f_back
    return num_steps > 1
