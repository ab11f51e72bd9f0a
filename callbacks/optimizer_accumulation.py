"""AccumulationWatch: how much of a low-precision gradient is lost while micro-batches are added up in it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.optimizer_health import is_low_precision, swallowed_parts

__all__ = ["AccumulationWatch"]


class AccumulationWatch:
    """Looks at every micro-batch's gradient before it is added, in the backward passes of one step.

    A tensor's hook is called with what is about to be added, while `.grad` is still the sum of what was before. FSDP2
    calls no such hook: there nothing is counted.

    Args:
        parameters: Of an optimizer.

    Attributes:
        is_any: Whether there is anything to watch.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        # Not weak references: a tensor that has one cannot be swapped, as `Module.to` does with some.
        self._parameters = list(parameters)
        self._watched = [number for number, one in enumerate(parameters) if is_low_precision(one)]
        self.is_any = bool(self._watched)
        # Elements that did not change and parts that were not 0, by parameter.
        self._counts: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def start(self) -> None:
        """Watch from the next backward pass on."""
        self.stop()
        self._counts.clear()
        own = weakref.ref(self)
        for number in self._watched:
            parameter = self._parameters[number]
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(_Hook(own, number)))

    def stop(self) -> None:
        """Watch no longer."""
        while self._handles:
            self._handles.pop().remove()

    def see(self, number: int, part: Tensor) -> None:
        """Take a gradient that is about to be added.

        Args:
            number: Position of its parameter.
            part: The gradient.
        """
        total = self._parameters[number].grad
        if total is not None and total.shape == part.shape and total.layout == part.layout == torch.strided:
            found = swallowed_parts(total, part)
            self._counts[number] = self._counts[number] + found if number in self._counts else found

    def counts_of(self, parameters: Sequence[Tensor], *, device: torch.device) -> Tensor:
        """What was counted since `start`.

        Args:
            parameters: Some of those that are watched.
            device: Where the result goes.

        Returns:
            Elements that did not change, and parts that were not 0, shape (2, parameters).
        """
        numbers = {id(one): number for number, one in enumerate(self._parameters)}
        none = torch.zeros(2, device=device)
        found = [self._counts.get(numbers.get(id(parameter), -1), none) for parameter in parameters]
        moved = [one.to(device, non_blocking=device.type != "cpu") for one in found]
        return torch.stack(moved, dim=1) if moved else torch.zeros(2, 0, device=device)


class _Hook:
    """What a parameter holds: copies of the model get one that does nothing."""

    def __init__(self, watch: weakref.ref[AccumulationWatch] | None, number: int) -> None:
        self._watch, self._number = watch, number

    def __call__(self, part: Tensor) -> None:
        watch = None if self._watch is None else self._watch()
        if watch is not None:
            watch.see(self._number, part)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None, self._number)

    def __reduce__(self) -> Any:
        return _Hook, (None, self._number)
