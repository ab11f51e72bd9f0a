"""Faults of a layer: in its gradient, before any reduction, or in one of its weights while it runs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from stabilizer.callbacks.drill_moments import Schedule
from stabilizer.errors import logger
from stabilizer.faults.changes import flip_bit_, scaled, with_element, with_flipped_bit
from stabilizer.faults.places import ParameterPlace
from stabilizer.localize.copying import tensors_of

__all__ = ["LAYER_KINDS", "LayerFaults"]

#: Faults that are in one layer.
LAYER_KINDS = ("nan_gradient", "inf_gradient", "layer_spike", "bit_flip")


class LayerFaults:
    """Hooks on the modules that own the parameters of faulty layers.

    When such a module runs, the tensor that autograd takes for its parameter is there: the parameter itself, the
    gathered one under FSDP2, a view of the flat one under FSDP1. A hook on that sees the rank's own gradient.

    Args:
        schedule: Of the run.
        places: Parameters of each fault's layer, by the number of the fault.
    """

    def __init__(self, schedule: Schedule, places: Mapping[int, Sequence[ParameterPlace]]) -> None:
        self._schedule = schedule
        self._handles: list[RemovableHandle] = []  # of tensors, until the step is over
        self._hooked: dict[int, Tensor] = {}
        self._flipped: dict[int, Callable[[], None]] = {}  # by the number of the fault: puts a weight back
        # Most faults are in one parameter of the layer.
        self._places = {
            number: list(found)
            if schedule.faults[number].kind == "layer_spike"
            else [found[schedule.draw(number).randrange(len(found))]]
            for number, found in places.items()
        }
        owners = {place.module: None for found in self._places.values() for place in found}
        self._on_owners = [
            hook
            for module in owners
            for hook in (
                module.register_forward_pre_hook(_OwnerHook(self, "before")),
                module.register_forward_hook(_OwnerHook(self, "after"), always_call=True),
            )
        ]

    def before(self, module: nn.Module) -> None:
        """A module is about to run.

        Args:
            module: Owns a parameter of a faulty layer.
        """
        for number, fault, moment in self._schedule.due(*LAYER_KINDS):
            for place in self._places[number]:
                if place.module is not module:
                    continue
                tensor: Tensor = getattr(module, place.attribute)
                if fault.target != "weight":
                    if tensor.requires_grad:
                        self._hook(tensor, place.name)
                elif number not in self._flipped:  # else a checkpointed part runs again in the backward pass
                    draw = self._schedule.draw(number, step=moment.step)
                    self._flipped[number] = flip_bit_(tensor, bit=fault.bit, draw=draw)
                    self._schedule.note(number, f"a flipped bit in {place.name}")

    def after(self, module: nn.Module, output: Any = None) -> None:
        """A module has run: its weights are put back at the end of the backward pass, or now if there will be none.

        Args:
            module: Owns a parameter of a faulty layer.
            output: Of its forward.
        """
        if not self._flipped:
            return
        trained = next((tensor for _, tensor in tensors_of(output) if tensor.requires_grad), None)
        if trained is None:
            self.put_back()
            return
        own = weakref.ref(self)

        def at_end() -> None:
            faults = own()
            if faults is not None:
                faults.put_back()

        def on_gradient(gradient: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(at_end)

        trained.register_hook(on_gradient)

    def put_back(self) -> None:
        """Weights as they were."""
        while self._flipped:
            self._flipped.popitem()[1]()

    def end_step(self) -> None:
        """Take the hooks off the tensors."""
        self.put_back()
        while self._handles:
            self._handles.pop().remove()
        self._hooked.clear()

    def close(self) -> None:
        """Take all hooks off."""
        self.end_step()
        while self._on_owners:
            self._on_owners.pop().remove()

    def change(self, gradient: Tensor, name: str) -> Tensor | None:
        """What a gradient becomes.

        Args:
            gradient: This rank's own.
            name: Of its parameter.

        Returns:
            `None` if it stays as it is.
        """
        changed: Tensor | None = None
        for number, fault, moment in self._schedule.due(*LAYER_KINDS):
            if fault.target == "weight" or all(place.name != name for place in self._places[number]):
                continue
            now, draw = gradient if changed is None else changed, self._schedule.draw(number, step=moment.step)
            if fault.kind == "layer_spike":
                factor = self._schedule.factor(fault, moment)
                changed, what = scaled(now, factor), f"the gradient of {fault.layer or name} times {factor:g}"
            elif fault.kind == "bit_flip":
                changed = with_flipped_bit(now, bit=fault.bit, draw=draw)
                what = f"a flipped bit in the gradient of {name}"
            else:
                value = math.nan if fault.kind == "nan_gradient" else math.inf
                changed, what = with_element(now, value, draw=draw), f"{value} in the gradient of {name}"
            self._schedule.note(number, what)
        return changed

    def _hook(self, tensor: Tensor, name: str) -> None:
        if id(tensor) in self._hooked:
            return
        handle = tensor.register_hook(_tensor_hook(weakref.ref(self), name))
        # Before the hooks that measure this rank's own gradient, which shall see the faulty one.
        # Autograd goes by the order in which they were put into the dictionary, whatever an OrderedDict calls its own.
        hooks: Any = tensor._backward_hooks
        others = [(key, hooks.pop(key)) for key in list(hooks) if key != handle.id]
        hooks.update(others)
        self._hooked[id(tensor)] = tensor
        self._handles.append(handle)


def _tensor_hook(faults: weakref.ref[LayerFaults], name: str) -> Callable[[Tensor], Tensor | None]:
    def hook(gradient: Tensor) -> Tensor | None:
        alive = faults()
        if alive is None:
            return None
        try:
            return alive.change(gradient, name)
        except Exception:
            # Raised here, it would end the user's backward pass.
            logger.exception("drill: a fault could not be put into a gradient")
            return None

    marked: Callable[[Tensor], Tensor | None] = unserializable_hook(hook)
    return marked


class _OwnerHook:
    """On a module; a copy of the model gets one that does nothing."""

    def __init__(self, faults: LayerFaults | None, name: str) -> None:
        self._faults = None if faults is None else weakref.ref(faults)
        self._name = name

    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        """What `register_forward_pre_hook` and `register_forward_hook` want."""
        faults = None if self._faults is None else self._faults()
        if faults is not None:
            getattr(faults, self._name)(module, *output)

    def __deepcopy__(self, memo: Any) -> _OwnerHook:
        """One that does nothing."""
        return _OwnerHook(None, self._name)

    def __reduce__(self) -> Any:
        """One that does nothing."""
        return _OwnerHook, (None, self._name)
