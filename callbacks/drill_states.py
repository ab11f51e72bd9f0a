"""Faults of what is no tensor of the model: learning rates, and a gradient scaler's scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from stabilizer.callbacks.drill_moments import Schedule

__all__ = ["RateFaults", "ScaleFaults"]


class RateFaults:
    """Raises learning rates from a step's first forward until its optimizer has moved.

    A scheduler finds them as it left them. The hook is one that torch calls after an optimizer's own: whoever has
    multiplied the raised rates meanwhile puts those back first.

    Args:
        schedule: Of the run.
        optimizers: All of the run.
    """

    def __init__(self, schedule: Schedule, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._schedule, self._optimizers = schedule, list(optimizers)
        # By optimizer: group, rate as it was, raised rate.
        self._saved: dict[torch.optim.Optimizer, list[tuple[dict[str, Any], Any, Any]]] = {}
        self._step = -1  # in which they were raised last
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def begin(self) -> None:
        """A forward begins."""
        due = list(self._schedule.due("learning_rate_jump"))
        if due and due[0][2].step == self._step:
            return  # a later micro-batch of the step
        self.put_back()
        for number, fault, moment in due:
            assert fault.factor is not None
            self._step = moment.step
            for optimizer in self._optimizers:
                self._raise(optimizer, fault.factor)
            self._schedule.note(number, f"learning rates times {fault.factor:g}")

    def put_back(self) -> None:
        """Undo it, where an optimizer has not moved."""
        for optimizer in list(self._saved):
            self._after_step(optimizer)

    def close(self) -> None:
        """Undo it, and take the hook away."""
        self.put_back()
        self._handle.remove()

    def _raise(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        saved, seen = self._saved.setdefault(optimizer, []), set[int]()
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):
                # Groups may share one tensor; a captured graph reads this very one.
                if id(rate) not in seen:
                    seen.add(id(rate))
                    saved.append((group, rate.clone(), None))
                    rate.mul_(factor)
            else:
                saved.append((group, rate, rate * factor))
                group["lr"] = rate * factor

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate, raised in reversed(self._saved.pop(optimizer, [])):
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            elif group["lr"] == raised:  # else somebody has set another one meanwhile
                group["lr"] = rate


class ScaleFaults:
    """Holds the scale of a gradient scaler.

    Args:
        schedule: Of the run.
        host: A `stabilizer.callbacks.run_host.RunHost`.
    """

    def __init__(self, schedule: Schedule, host: Any) -> None:
        self._schedule, self._host = schedule, host
        self._saved: tuple[Tensor, Tensor] | None = None  # the scaler's own, and what it was

    def begin(self) -> None:
        """A forward begins: the scaler has made its last change."""
        due = list(self._schedule.due("stuck_loss_scale"))
        if not due:
            self.put_back()
        scale = self._scale() if due else None
        for number, fault, _ in due if scale is not None else ():
            assert scale is not None
            assert fault.factor is not None
            if self._saved is None:
                self._saved = scale, scale.clone()
            scale.fill_(fault.factor)
            self._schedule.note(number, f"the loss scale is held at {fault.factor:g}")

    def put_back(self) -> None:
        """Let go of the scale, as it was before."""
        if self._saved is not None:
            (scale, before), self._saved = self._saved, None
            scale.copy_(before)

    def _scale(self) -> Tensor | None:
        engine = self._host.engine
        plugin = getattr(engine, "precision_plugin", None) if self._host.kind == "lightning" else engine
        scaler = getattr(plugin, "scaler", None)
        if scaler is None:
            scaler = getattr(self._host.replays.replayer, "scaler", None)
        if scaler is None or not scaler.is_enabled():
            return None
        if scaler._scale is None:
            # It is made with the first loss that is scaled.
            scaler._lazy_init_scale_growth_tracker(next(self._host.model.parameters()).device)
        scale: Tensor = scaler._scale
        return scale
