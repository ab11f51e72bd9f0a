"""Plain loops: the suite runs in the optimizer's own step, or before, where the loop says so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Position
from stabilizer.callbacks.hosting import arrange_charts, is_disabled, refuse_optimizers
from stabilizer.callbacks.preflight import Setting, preflight
from stabilizer.callbacks.suite import Suite, check_selections
from stabilizer.callbacks.suites import Suites
from stabilizer.errors import warn
from stabilizer.late import Sink

__all__ = ["LoopHandle"]


class LoopHandle:
    """Callbacks at work in a loop; what `attach` returns. Leaving its `with` block puts everything back.

    Args:
        callbacks: Ours, in any order.
        model: As it trains, wrapped.
        optimizers: Those of torch whose gradients are measured.
        sink: Where values go.
        groups: See `ParameterIndex`.

    Attributes:
        callbacks: As given.
        is_closed: Whether nothing is measured any more.

    Raises:
        ValueError: If a callback or an optimizer cannot be attached.
    """

    def __init__(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        sink: Sink,
        groups: Mapping[str, Any] | None = None,
    ) -> None:
        self.callbacks = list(callbacks)
        _check(self.callbacks)
        refuse_optimizers(optimizers)
        self.is_closed = is_disabled(self.callbacks)
        self._model, self._optimizers, self._groups = model, list(optimizers), groups
        self._suites = Suites(self.callbacks, sink=sink)
        self._undo: list[Callable[[], None]] = []
        self._num_backwards, self._batch_index = 0, -1
        if self.is_closed:
            return
        if groups is None:
            self._suites.known_names = check_selections(self.callbacks, model)
        for callback in self.callbacks:
            callback.driver = self
        self._has_charts = False
        # A module that is compiled in place runs its hooks inside the compiled graph.
        if self._suites.tally.weights and getattr(model, "_compiled_call_impl", None) is None:
            self._undo.append(model.register_forward_pre_hook(self._forward, with_kwargs=True).remove)

    def start(self, setting: Callable[[], Setting]) -> None:
        """Show what there is to know before the first step.

        Args:
            setting: Finds out what is known of this run.
        """
        if not self.is_closed:
            preflight(setting)

    def watch(self, number: int) -> None:
        """Run the suite in the step of an optimizer of torch.

        Args:
            number: Position of the optimizer.
        """
        optimizer = self._optimizers[number]

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not is_state_setup():
                # A scaler leaves the scale to a fused optimizer, and puts it there for the step.
                self.run(number, grad_scale=getattr(optimizer, "grad_scale", None))

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not is_state_setup():
                self.finish(number)

        self._undo.append(optimizer.register_step_pre_hook(before).remove)
        self._undo.append(optimizer.register_step_post_hook(after).remove)

    def measure(self) -> None:
        """Run the callbacks now, on the gradients as they are: for a loop that clips before its optimizer's step.

        Call it when the gradients of a step are complete, on every rank; without it they are measured in
        `optimizer.step()`. The step after it does not measure again.
        """
        for number in range(len(self._optimizers)):
            self.run(number)

    def record_loss(self, loss: Any, *, weight: Tensor | float | None = None) -> None:
        """Take the loss of a micro-batch, instead of the one that `accelerator.backward` was given.

        Args:
            loss: Mean of the micro-batch: a tensor of one element, or a mapping with the key "loss".
            weight: How many tokens or samples it is the mean of.

        Raises:
            ValueError: If it is neither.
        """
        if not self.is_closed:
            self._num_backwards += 1
            self._batch_index += 1
            self._suites.tally.tell(loss, weight=weight)

    def state_dict(self) -> dict[str, Any]:
        """States of all callbacks by their `state_key`, for a checkpoint: plain types and CPU tensors."""
        return {callback.state_key: callback.state_dict() for callback in self.callbacks}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back states; on every rank, and at any time between two steps.

        Args:
            state_dict: What `state_dict` gave. A callback without an entry starts anew, with a warning.

        Raises:
            ValueError: If an entry is not of its callback.
        """
        missing = [callback.state_key for callback in self.callbacks if callback.state_key not in state_dict]
        if missing:
            warn(f"no state of {', '.join(missing)}, which start anew; there is {sorted(state_dict)}")
        self._suites.close(is_end=False)
        for callback in self.callbacks:
            if callback.state_key in state_dict:
                callback.load_state_dict(state_dict[callback.state_key])

    def close(self, *, after_exception: bool = False) -> None:
        """Write everything that is on its way, and put back what was changed; does nothing the second time.

        Args:
            after_exception: Whether an exception is on its way: it is the one to show, not one of ours.
        """
        while self._undo:
            self._undo.pop()()
        if self.is_closed:
            return
        self.is_closed = True
        for callback in self.callbacks:
            callback.driver = None
        for _, suite in self._suites:
            if suite.is_open:  # the loop broke off before its optimizer moved
                suite.abandon()
        self._suites.close(after_exception=after_exception)

    def settle(self) -> None:
        """Close steps whose optimizer has moved: none is left open here."""

    def run(self, number: int, *, grad_scale: Tensor | None = None, is_scaled: bool = False) -> Suite | None:
        """Run the suite of an optimizer unless it has run for the step at hand.

        Args:
            number: Position of the optimizer.
            grad_scale: What its gradients are still multiplied by, shape ().
            is_scaled: Whether a gradient scaler guards the step.
        """
        if self.is_closed:
            return None
        if not self._has_charts:
            # Not earlier: trackers may be made after `attach`.
            self._has_charts = True
            arrange_charts(self._suites.sink, self.callbacks)
        suite = self._suite(number)
        if not suite.is_open:
            suite.run(
                grad_scale=grad_scale,
                is_scaled=is_scaled or grad_scale is not None,
                losses=self._suites.tally.take(),
                position=self.position(),
            )
        return suite

    def finish(self, number: int) -> None:
        """Close the step of an optimizer: it has moved.

        Args:
            number: Its position.
        """
        if not self.is_closed:
            self._num_backwards = 0
            self._suite(number).finish()

    def position(self) -> Position:
        """Where the loop is in its data, as far as it has told."""
        return Position(self._batch_index, self._num_backwards)

    def _suite(self, number: int) -> Suite:
        optimizer = self._optimizers[number]
        return self._suites.get(number, model=self._model, optimizer=optimizer, groups=self._groups)

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._suites.tally.begin(kwargs if kwargs and ("labels" in kwargs or not args) else args)

    def __enter__(self) -> LoopHandle:
        """The handle itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close, whatever has happened."""
        self.close(after_exception=error is not None)


def is_state_setup() -> bool:
    """Whether torch steps the optimizer on zeros, only to have its state made for a checkpoint."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False


def _check(callbacks: Sequence[Any]) -> None:
    wrong = [callback for callback in callbacks if not isinstance(callback, StabilizerCallback)]
    if wrong or not callbacks:
        raise ValueError(
            f"callbacks={wrong[:1] or callbacks}: expected a list of StabilizerCallback, like [GradNormCallback()]"
        )
    keys = [callback.state_key for callback in callbacks]
    for callback in callbacks:
        if keys.count(callback.state_key) > 1:
            raise ValueError(
                f"two callbacks have the key {callback.state_key!r}, under which values and states would collide; "
                'give one a name: name="second"'
            )
        if callback.driver is not None:
            raise ValueError(f"{callback.state_key} is at work already; leave its `with` block first, or make another")
