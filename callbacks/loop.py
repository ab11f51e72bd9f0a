"""Plain loops: the suite runs in the optimizer's own step, or before, where the loop says so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Position
from stabilizer.callbacks.hosting import (
    arrange_charts,
    check_callbacks,
    check_selections,
    refuse_optimizers,
    scale_still_in,
    stand_before,
)
from stabilizer.callbacks.loop_replay import LoopReplayer, LossFunction
from stabilizer.callbacks.loop_telling import LoopTelling
from stabilizer.callbacks.observing import Observing
from stabilizer.callbacks.run_host import HostKind, RunHost, join_all
from stabilizer.callbacks.suite import Suite
from stabilizer.callbacks.suites import Suites
from stabilizer.callbacks.watching import CLOSURE, ForwardHook, has_closure, is_nested_step, is_state_setup
from stabilizer.errors import warn
from stabilizer.late import Sink

__all__ = ["LoopHandle"]


class LoopHandle(Observing, LoopTelling):
    """Callbacks at work in a loop; what `attach` returns. Leaving its `with` block puts everything back.

    Args:
        callbacks: Ours, in any order.
        model: As it trains, wrapped.
        optimizers: Those of torch whose gradients are measured.
        sink: Where values go.
        groups: See `ParameterIndex`.
        loss_fn: See `attach`.

    Attributes:
        callbacks: As given.
        is_closed: Whether nothing is measured any more.
        is_idle: Whether nothing ever was: there were no callbacks, or the environment turns them off.

    Raises:
        ValueError: If a callback or an optimizer cannot be attached.
    """

    is_idle = False
    kind: HostKind = "plain"
    # Whether a call of the model is what begins a micro-batch.
    watches_forward = True

    def __init__(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        sink: Sink,
        groups: Mapping[str, Any] | None = None,
        loss_fn: LossFunction | None = None,
    ) -> None:
        self.callbacks = list(callbacks)
        check_callbacks(self.callbacks)
        refuse_optimizers(optimizers)
        self.is_closed = False
        self._model, self._optimizers, self._groups = model, list(optimizers), groups
        self._undo: list[Callable[[], None]] = []
        self._suites = Suites(self.callbacks, sink=sink)
        self._replayer = self._make_replayer(loss_fn)
        self._suites.replays.replayer = self._replayer
        self._num_backwards, self._batch_index = 0, -1
        self._stepping: set[int] = set()
        self._has_charts = self._has_warned_of_closure = False
        if groups is None:
            self._suites.known_names = check_selections(self.callbacks, model)
        for callback in self.callbacks:
            callback.driver = self
        # A module that is compiled in place runs its hooks inside the compiled graph.
        if getattr(model, "_compiled_call_impl", None) is None:
            if self.watches_forward:
                self._forward_hook = model.register_forward_pre_hook(ForwardHook(self), with_kwargs=True)
                self._undo.append(self._forward_hook.remove)
            self._undo.append(self._suites.replays.follow_broadcasts(model))

    @classmethod
    def idle(cls, callbacks: Sequence[StabilizerCallback]) -> LoopHandle:
        """A handle that does nothing.

        Args:
            callbacks: Those that will not work.
        """
        handle = cls.__new__(cls)
        handle.callbacks, handle.is_closed, handle.is_idle, handle._undo = list(callbacks), True, True, []
        return handle

    def join(self, engine: Any = None) -> None:
        """Let the callbacks join the run: all is in place.

        Args:
            engine: See `RunHost`.

        Raises:
            ValueError: If one of them cannot work here.
        """
        try:
            host = RunHost(self.kind, engine, self._model, self._optimizers, self._suites.replays, self._undo)
            join_all(self.callbacks, host)
        except BaseException:
            self.close(after_exception=True)
            raise

    def watch(self, number: int) -> None:
        """Run the suite in the step of an optimizer of torch.

        Args:
            number: Position of the optimizer.
        """
        optimizer = self._optimizers[number]

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if is_state_setup():
                return
            if has_closure(args, kwargs):
                self._warn_of_closure()
                return
            if number in self._stepping:
                if is_nested_step(optimizer):
                    return
                if self._suites.abandon(number):  # the step before raised
                    self._suites.tally.put_back(number)
            self._stepping.add(number)
            # A scaler leaves the scale to a fused optimizer, and puts it there for the step.
            found_inf = getattr(optimizer, "found_inf", None)
            self.run(number, grad_scale=getattr(optimizer, "grad_scale", None), is_scaled=found_inf is not None)
            self.before_step(number)

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if number in self._stepping:
                self._stepping.discard(number)
                self.finish(number)

        self._undo.append(optimizer.register_step_pre_hook(before).remove)
        self._undo.append(optimizer.register_step_post_hook(after).remove)
        self._undo.append(stand_before(optimizer, "zero_grad", functools.partial(self._zero_grad, number)))

    def measure(self, *, scaler: Any = None) -> None:
        """Run the callbacks now, on the gradients as they are: for a loop that clips before its optimizer's step.

        Call it when the gradients of a step are complete, on every rank; without it they are measured in
        `optimizer.step()`. The step after it does not measure again. A second call says that the loop has skipped the
        step of the first.

        Args:
            scaler: The loop's `GradScaler`, if it has one: its scale is taken out of the norms, and its overflows are
                its own.
        """
        if not self.is_closed:
            self._replayer.scaler = scaler
        for number in range(0 if self.is_closed else len(self._optimizers)):
            if self._suites.abandon(number):
                self._suites.tally.put_back(number)
            scale = scale_still_in(scaler, self._optimizers[number])
            self.run(number, grad_scale=scale, is_scaled=scaler is not None)

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
            callback.driver = callback.host = None
        for number, _ in list(self._suites):  # a loop that broke off before its optimizer moved
            self._suites.abandon(number)
        self._suites.close(after_exception=after_exception)
        self._suites.replays.stop()
        del self._model, self._optimizers, self._groups, self._replayer

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
            arrange_charts(self._suites, num_optimizers=len(self._optimizers))
        suite = self._suite(number)
        if not suite.is_open:
            suite.run(
                grad_scale=grad_scale,
                is_scaled=is_scaled or grad_scale is not None,
                losses=self._suites.tally.take(number),
                position=self.position(),
            )
        return suite

    def before_step(self, number: int) -> None:
        """Keep an optimizer from its step if that was decided.

        Args:
            number: Position of the optimizer.
        """
        if not self.is_closed:
            self._suite(number).before_step()

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

    def _make_replayer(self, loss_fn: LossFunction | None) -> LoopReplayer:
        return LoopReplayer(self._model, loss_fn=loss_fn)

    def _zero_grad(self, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Gradients that no step has used are thrown away, and so are their losses.
        if not self.is_closed:
            self._suites.abandon(number)
            self._suites.tally.clear()
            self._suites.replays.discard()
            self._num_backwards = 0
        return original(*args, **kwargs)

    def _warn_of_closure(self) -> None:
        if not self._has_warned_of_closure:
            self._has_warned_of_closure = True
            self._suites.replays.stop()
            warn(CLOSURE)

    def _suite(self, number: int) -> Suite:
        optimizer = self._optimizers[number]
        return self._suites.get(number, model=self._model, optimizer=optimizer, groups=self._groups)

    def see_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of what the model is given.

        Args:
            module: The model.
            args: Positional arguments of its forward.
            kwargs: Its other arguments.
        """
        replays = self._suites.replays
        if self.is_closed or not torch.is_grad_enabled() or replays.is_running:
            return
        if replays.is_on:
            arguments = self._replayer.arguments(args, kwargs)
            if arguments is not None:
                replays.begin(*arguments)
        if not module.training:
            return
        batch = kwargs if kwargs and ("labels" in kwargs or not args) else args
        self._suites.facts.see_batch(batch)
        if self._suites.tally.weights:
            self._suites.tally.begin(batch)
        elif not replays.is_on:
            self._forward_hook.remove()  # the first batch has told all that is asked for

    def __enter__(self) -> LoopHandle:
        """The handle itself."""
        if self.is_closed and not self.is_idle:
            raise ValueError("this handle is closed; attach again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close, whatever has happened."""
        self.close(after_exception=error is not None)
