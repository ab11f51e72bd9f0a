"""The moment when an optimizer has moved, before schedulers and averages of weights see it; and its layers."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.run_host import RunHost
from stabilizer.callbacks.watching import is_nested_step, is_state_setup
from stabilizer.optimizer_health import OptimizerLayers
from stabilizer.parameters import ParameterIndex

__all__ = ["AfterStep", "layers_of"]


class AfterStep:
    """Calls a method of an object when an optimizer of torch has moved, once a step.

    Args:
        owner: Kept by a weak reference.
        method: Name of its method, which takes the position of the optimizer, and the optimizer.
    """

    def __init__(self, owner: Any, method: str) -> None:
        self._owner, self._method = weakref.ref(owner), method
        self._watched: dict[int, torch.optim.Optimizer] = {}

    def watch(self, host: RunHost, number: int) -> torch.optim.Optimizer:
        """Watch an optimizer until the run ends; does nothing if that is done already.

        Args:
            host: Of the run.
            number: Position of the optimizer.

        Returns:
            The optimizer.
        """
        optimizer = host.optimizers[number]
        # Some hosts make theirs anew within a run.
        if self._watched.get(number) is not optimizer:
            self._watched[number] = optimizer
            owner, method = self._owner, self._method

            def after(moved: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                target = owner()
                if target is not None and not is_state_setup() and not is_nested_step(moved):
                    getattr(target, method)(number, moved)

            handle = optimizer.register_step_post_hook(after)
            host.undo.extend([handle.remove, functools.partial(self._forget, number)])
        return optimizer

    def _forget(self, number: int) -> None:
        self._watched.pop(number, None)


def layers_of(callback: Any, context: StepContext, optimizer: torch.optim.Optimizer) -> OptimizerLayers:
    """The layers that a callback looks at, with the parameters that an optimizer moves in them.

    Args:
        callback: Whose layers, at work in a run.
        context: Of the step, whose gradients are complete; every rank calls this at the same one.
        optimizer: Of torch.
    """
    host: RunHost = callback.host
    module = getattr(host.engine, "lightning_module", None)
    groups = getattr(module, "stabilizer_groups", getattr(callback.driver, "_groups", None))
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    index = ParameterIndex(host.model, parameters=parameters, groups=groups)
    return OptimizerLayers(index, layers=context.selected_names, granularity=callback.granularity)
