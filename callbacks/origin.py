"""Which rank a bad gradient comes from: once it is reduced, every rank has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BackwardWatch"]


class BackwardWatch:
    """Looks at this rank's own backward passes near their end, where the model begins.

    What is not finite anywhere in a backward pass is not finite at the model's beginning either. There is one hook on
    the output of one module: it reduces one activation's gradient to a flag on the device, changes nothing, waits for
    nothing, and works under any sharding, which does not concern activations.

    Args:
        model: As it trains. A compiled one is left alone: a hook would have it compiled anew.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_bad: Tensor | None = None
        self._remove: Callable[[], None] | None = None
        module = None if _is_compiled(model) else _first_trainable(model)
        if module is not None:
            self._remove = module.register_forward_hook(self._after_forward).remove

    def take(self) -> Tensor | None:
        """Whether anything was not finite since the last call, shape (), bool; `None` if nothing was seen."""
        found, self._is_bad = self._is_bad, None
        return found

    def close(self) -> None:
        """Take the hook away."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if (
            torch.is_grad_enabled()
            and isinstance(output, Tensor)
            and output.requires_grad
            and output.is_floating_point()
        ):
            # Some outputs take no hook (views that somebody changes in place): then there is nothing to see.
            with contextlib.suppress(RuntimeError):
                output.register_hook(self._see)

    def _see(self, gradient: Tensor) -> None:
        # Of a DTensor this rank's part: anything else would be a collective in the middle of a backward pass.
        sharded: Any = gradient
        local: Tensor = sharded.to_local() if hasattr(gradient, "to_local") else gradient
        # One reduction without a copy of the activation; float32 holds what half precision would not.
        found = ~torch.isfinite(torch.linalg.vector_norm(local.detach(), dtype=torch.float32))
        self._is_bad = found if self._is_bad is None else self._is_bad | found


def _first_trainable(model: nn.Module) -> nn.Module | None:
    modules = (module for module in model.modules() if not any(module.children()))
    return next((m for m in modules if any(p.requires_grad for p in m.parameters(recurse=False))), None)


def _is_compiled(model: nn.Module) -> bool:
    """Whether any part of a model was compiled, in place or wrapped."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )
