"""Faults of one token's loss: its gradient is multiplied where a search would gate it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer import gating as gates
from stabilizer.callbacks.drill_moments import Moment, Schedule
from stabilizer.errors import logger
from stabilizer.faults import Fault
from stabilizer.faults.changes import of_token
from stabilizer.localize.maps import blocks_of
from stabilizer.localize.tap import Tap

__all__ = ["TokenFaults"]


class TokenFaults:
    """Multiplies a token's gradient at the model's output, or at `token_gate` where its loss calls that.

    Args:
        schedule: Of the run.
        model: As it is run again: the inner one under DDP.

    Raises:
        ValueError: If a fault names a module that is not there.
    """

    def __init__(self, schedule: Schedule, model: nn.Module) -> None:
        self._schedule = schedule
        blocks = blocks_of(model)
        self._taps: dict[int, Tap] = {}
        for number, fault in enumerate(schedule.faults):
            if fault.kind == "token_loss":
                try:
                    self._taps[number] = Tap(model, None if fault.layer is None else str(fault.layer), blocks=blocks)
                except ValueError as error:
                    raise ValueError(f"faults[{number}]: layer: {error}") from None
        self._open = contextlib.ExitStack()

    def begin(self) -> None:
        """A forward begins, whatever stands around it already: a search's gate is then below these."""
        self.end()
        for number, fault, moment in self._schedule.due("token_loss"):
            multiplier: Any = _Multiplier(self._schedule, number, fault, moment, inner=gates._active)
            self._open.enter_context(gates.gating(multiplier))
            self._open.enter_context(self._taps[number].on(multiplier))

    def end(self) -> None:
        """The forward is over, with the loss."""
        self._open.close()


class _Multiplier:
    """What a tap and `token_gate` take for a gate.

    Args:
        schedule: Of the run.
        number: Of the fault.
        fault: It.
        moment: Of the forward.
        inner: The gate of a search, or another fault.
    """

    def __init__(self, schedule: Schedule, number: int, fault: Fault, moment: Moment, *, inner: Any) -> None:
        self._schedule, self._number, self._fault, self._moment = schedule, number, fault, moment
        self._inner = inner
        self._num_by_hand = self._num_tapped = 0

    def apply(self, x: Tensor, *, dims: int, by_hand: bool = False, values: Tensor | None = None) -> Tensor:
        """As of `stabilizer.gate.Gate`."""
        # On a tap the search's own gate stands already; `token_gate` asks the innermost only.
        if by_hand and self._inner is not None:
            x = self._inner.apply(x, dims=dims, by_hand=True, values=values)
        is_first = not (self._num_by_hand if by_hand else self._num_tapped)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if by_hand:
            self._num_by_hand += 1
        else:
            self._num_tapped += 1
        if not is_first:
            return x
        # No view: what is done in place to a view afterwards goes round the hook.
        marked: Tensor = torch.ops.aten._unsafe_view(x, x.shape)
        marked.register_hook(functools.partial(self._see, dims=dims, by_hand=by_hand))
        return marked

    def _see(self, gradient: Tensor, *, dims: int, by_hand: bool) -> Tensor | None:
        if self._num_by_hand and not by_hand:
            return None  # the loss says itself what its tokens are
        assert self._fault.token is not None
        factor = self._schedule.factor(self._fault, self._moment)
        try:
            changed = of_token(gradient, self._fault.token, factor, dims=dims)
        except Exception:
            # Raised here, it would end the user's backward pass.
            logger.exception("drill: a fault could not be put into a token's gradient")
            return None
        if changed is not None:
            self._schedule.note(self._number, f"the loss of token {self._fault.token} times {factor:g}")
        return changed
