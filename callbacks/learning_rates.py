"""Smaller learning rates for one step, put back before anybody looks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["LearningRates"]


class LearningRates:
    """Scales an optimizer's learning rates just before it moves, and puts them back as soon as it has.

    Schedulers compute the next rate from the one that they find, and some hosts call them before they tell us that the
    optimizer has moved: an own hook behind its step puts the rates back in time.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> rates = LearningRates()
        >>> rates.scale(optimizer, 0.1)
        >>> optimizer.param_groups[0]["lr"]
        0.05
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["lr"]
        0.5
    """

    def __init__(self) -> None:
        self._groups: list[tuple[dict[str, Any], Any]] = []
        self._hooked: weakref.ref[torch.optim.Optimizer] | None = None
        self._unhook: Any = None

    def scale(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply; does nothing if that is done already.

        Args:
            optimizer: Which moves next.
            factor: In (0, 1].
        """
        if self._groups or factor == 1:
            return
        self._hook(optimizer)
        scaled: set[int] = set()
        for group in optimizer.param_groups:
            rate = group.get("lr")
            # Groups that got their rate from the optimizer's default share one tensor.
            if rate is None or id(rate) in scaled:
                continue
            if isinstance(rate, Tensor):
                # In place: a captured graph reads this very tensor.
                scaled.add(id(rate))
                self._groups.append((group, rate.clone()))
                rate.mul_(factor)
            else:
                self._groups.append((group, rate))
                group["lr"] = rate * factor

    def put_back(self) -> None:
        """Undo it, if that is not done yet: the step may have raised."""
        groups, self._groups = self._groups, []
        for group, rate in groups:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        if self._hooked is not None and self._hooked() is optimizer:
            return
        if self._unhook is not None:
            self._unhook()
        own = weakref.ref(self)

        def after_step(*_: Any) -> None:
            rates = own()
            if rates is not None:
                rates.put_back()

        # It stays until it is of no use: torch does not let a hook be taken away while it calls the hooks.
        handle = optimizer.register_step_post_hook(after_step)
        self._hooked, self._unhook = weakref.ref(optimizer), weakref.finalize(self, handle.remove)
