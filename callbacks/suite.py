"""Suite: all of our callbacks on the steps of one optimizer, whatever the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.agreement import Agreement
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import AfterClip, Position, Selection, StepContext
from stabilizer.callbacks.failures import Failures
from stabilizer.callbacks.hosting import JOINED, is_joined
from stabilizer.callbacks.loss_meter import LossMeter
from stabilizer.callbacks.missing import MissingGradients
from stabilizer.errors import warn
from stabilizer.late import LateLog, Sink, answers_soon
from stabilizer.parameters import ParameterIndex, named_parameters
from stabilizer.reduction import world_size
from stabilizer.store import GradientStore
from stabilizer.tags import prefix
from stabilizer.tally import MicroBatchLoss
from stabilizer.view import LayerView

__all__ = ["Suite"]


class Suite:
    """Runs callbacks in their order on one store of statistics.

    The host calls `run` when a step's gradients are complete, and `finish` after the optimizer has moved; both on every
    rank.

    Args:
        callbacks: Ours, in any order.
        model: As it trains, wrapped.
        optimizer: Whose parameters are measured.
        sink: The host's loggers.
        optimizer_index: Position of the optimizer.
        groups: See `ParameterIndex`.
        known_names: Names of parameters that `layers=` may mean though they do not train at this optimizer's steps.
    """

    def __init__(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sink: Sink,
        optimizer_index: int = 0,
        groups: Mapping[str, Any] | None = None,
        known_names: Sequence[str] = (),
    ) -> None:
        self.callbacks = sorted(callbacks, key=lambda callback: callback.order)
        self.step = max(callback.next_step(optimizer_index) for callback in callbacks)
        self.late = LateLog(sink)
        self.optimizer = optimizer
        self._model, self._groups = model, groups
        self._optimizer_index, self._known_names = optimizer_index, known_names
        self._agreement = Agreement(num_callbacks=len(self.callbacks))
        self._failures = Failures(self.callbacks, self._agreement)
        self._meter = LossMeter(self.callbacks)
        self._store: GradientStore | None = None
        self._parameters: list[Tensor] = []
        self._selections: list[Selection] = []
        self._contexts: list[StepContext] = []
        self._grad_scale: Tensor | None = None
        self._position = Position()
        self._num_clips = 0
        self._has_said_nothing = self._has_warned_of_join = False
        self.is_open = False

    def run(
        self,
        *,
        grad_scale: Tensor | None = None,
        is_scaled: bool = False,
        losses: Sequence[MicroBatchLoss] = (),
        position: Position | None = None,
    ) -> None:
        """Measure the step's gradients and let all callbacks see them.

        Args:
            grad_scale: What the gradients are still multiplied by, shape (); `None` if they are as they should be.
            is_scaled: Whether a gradient scaler guards this step.
            losses: Of this rank's micro-batches.
            position: Where the host is in its data.
        """
        if is_joined(self._model, self.optimizer):
            if not self._has_warned_of_join:
                self._has_warned_of_join = True
                warn(JOINED)
            return
        store = self._current_store()
        self._write(before=self.step)
        self.is_open, self._contexts = True, []
        self._grad_scale, self._num_clips = grad_scale, 0
        self._position = Position() if position is None else position
        self._meter.check_window(self.step, self._position)
        if store is None:
            return
        is_due = world_size() > 1 and self._agreement.is_due(self.step)
        if is_due and self._agreement.apply(self.callbacks):
            store.replan()
        if self._agreement.is_off:
            return
        self._agreement.request_replan(store.needs_replan)
        flags = self._agreement.flags(store.device)
        sums = self._meter.pack(self.step, losses, device=store.device)
        measurement = store.measure(self.step, grad_scale=grad_scale, flags=flags, sums=sums, compare=is_due)
        if is_due:
            self._agreement.note(measurement)
        failure = self._meter.read(measurement.sums)
        if store.failure is not None:
            self._failures.of_measuring(store.failure, step=self.step)
            return
        self._missing.see(measurement)
        for number, callback in enumerate(self.callbacks):
            if failure is not None and callback.loss_weight is not None:
                self._failures.of_callback(number, "loss", failure, step=self.step)
        self._contexts = [self._context(number, is_scaled) for number in range(len(self.callbacks))]
        self._each("on_gradients")

    def after_clip(self, *, max_norm: float | None, is_unscaled: bool = False) -> None:
        """Tell that the host has clipped.

        Args:
            max_norm: Its limit, if it clipped by the total norm and nothing else has touched the gradients since they
                were measured; `None` if the gradients must be measured again.
            is_unscaled: Whether the host has divided the gradients by the loss scale before the clip.
        """
        self._num_clips += 1
        if is_unscaled:
            self._grad_scale = None
        intervals = {interval for callback in self.callbacks for interval in callback.after_every_n_steps}
        is_due = any(self.step % interval == 0 for interval in intervals)
        if self._store is None or self._agreement.is_off or not is_due:
            return
        # Measuring again is a collective. Whether it must be is known from what is the same on every rank, never from
        # whether this rank's own measurement has come out.
        is_known = max_norm is not None and self._num_clips == 1 and 2 in {c.norm_type for c in self.callbacks}
        again = None if is_known else self._store.remeasure(grad_scale=self._grad_scale)
        total = self.total_norm()
        for context in self._contexts:
            norms, context_total = context.store.norms, context.store.total_norm
            if again is not None:
                norms, context_total = context.store.norms_of(again)
            elif total is not None and max_norm is not None:
                # What `torch.nn.utils.clip_grad_norm_` multiplies by; it sees gradients with the scale still in them.
                seen = total if self._grad_scale is None else total * self._grad_scale.to(total.device)
                coefficient = torch.clamp(max_norm / (seen + 1e-6), max=1.0)
                norms, context_total = norms * coefficient, context_total * coefficient
            context.after = AfterClip(norms, context_total)

    def total_norm(self) -> Tensor | None:
        """L2 norm of all gradients of the step at hand, shape (); `None` if no callback has it measured."""
        views = (context.store for context in self._contexts if context.store.norm_type == 2)
        return next((view.total_norm for view in views), None)

    def finish(self) -> None:
        """Close the step: the optimizer has moved."""
        if not self.is_open:
            return
        self.is_open = False
        self._each("on_step_end")
        self.late.close_step(self.step)
        for callback in self.callbacks:
            callback.advance(self._optimizer_index, self.step)
        self.step += 1

    def abandon(self) -> None:
        """Forget the step at hand: the optimizer has not moved."""
        if self.is_open:
            self.is_open = False
            self.late.forget()
            self._meter.drop()

    def close(self, *, is_end: bool = True, after_exception: bool = False) -> None:
        """Write everything that is on its way, and let go of the model.

        Args:
            is_end: Whether the run ends; else it goes on from a checkpoint, with another suite.
            after_exception: Whether the run breaks off: a device that hangs is not waited for then.
        """
        answers = not after_exception or self._store is None or answers_soon(self._store.device)
        try:
            if self._contexts and is_end and answers:
                self._each("on_run_end")
                self.late.close_step(self._contexts[0].step)
            if self._store is not None and is_end and answers:
                self._missing.conclude()
            self._write(wait=answers)
        finally:
            for callback in self.callbacks:
                detach = (
                    callback.detach_view if answers else functools.partial(StabilizerCallback.detach_view, callback)
                )
                detach(self._optimizer_index)

    def _current_store(self) -> GradientStore | None:
        """The store, made anew when the optimizer's trainable parameters have changed (gradual unfreezing)."""
        groups = self.optimizer.param_groups
        parameters: list[Tensor] = [p for group in groups for p in group["params"] if p.requires_grad]
        is_same = len(parameters) == len(self._parameters) and all(
            new is old for new, old in zip(parameters, self._parameters, strict=True)
        )
        if not parameters:
            if not self._has_said_nothing:
                self._has_said_nothing = True
                warn(
                    f"optimizer {self._optimizer_index} ({type(self.optimizer).__name__}) has no parameter that "
                    "requires a gradient at its step: there is nothing to measure"
                )
            return None
        if self._store is None or not is_same:
            self._store, self._parameters = self._make_store(parameters), parameters
        return self._store

    def _make_store(self, parameters: list[Tensor]) -> GradientStore:
        index = ParameterIndex(self._model, parameters=parameters, groups=self._groups)
        intervals = {callback.max_abs_every_n_steps for callback in self.callbacks}
        store = GradientStore(
            index,
            granularities=[callback.granularity for callback in self.callbacks],
            norm_types={callback.norm_type for callback in self.callbacks},
            ring=max(callback.history for callback in self.callbacks),
            max_abs_every_n_steps=[interval for interval in intervals if interval is not None],
            num_flags=self._agreement.num_flags,
        )
        store.agree_on_step(self.step)
        # A layer of another optimizer, or of another rank, may be asked for too: it is no mistake.
        known = [*self._known_names, *(name for _, name in named_parameters(self._model))]
        names = list(dict.fromkeys([*known, *store.names]))
        self._selections = []
        for callback in self.callbacks:
            view = store.view(callback.granularity, callback.norm_type)
            callback.attach_view(self._optimizer_index, view)
            self._selections.append(Selection(view, callback.choose(names)))
        self._missing = MissingGradients(index)
        return store

    def _context(self, number: int, is_scaled: bool) -> StepContext:
        callback, store = self.callbacks[number], self._store
        assert store is not None
        view: LayerView = store.view(callback.granularity, callback.norm_type)
        return StepContext(
            store=view,
            selection=self._selections[number],
            late=self.late,
            tag_prefix=prefix(callback.name, self._optimizer_index),
            optimizer_index=self._optimizer_index,
            is_scaled=is_scaled,
            position=self._position,
            loss=self._meter.loss_for(callback),
            owner=number,
        )

    def _each(self, method: str) -> None:
        """Call a method of every callback that is on; none of them may end the run, unless it is strict."""
        for number, context in enumerate(self._contexts):
            callback = self.callbacks[number]
            is_gated = callback.is_gated and method != "on_run_end" and context.step % callback.every_n_steps
            if callback.has_failed or is_gated:
                continue
            try:
                hook: Callable[[StepContext], None] = getattr(callback, method)
                hook(context)
            except Exception as error:
                self._failures.of_callback(number, method, error, step=self.step)

    def _write(self, *, before: int | None = None, wait: bool = False) -> None:
        try:
            self.late.drain(before=before, wait=wait)
        except Exception as error:
            if any(callback.strict for callback in self.callbacks):
                raise
            self._failures.report("writing to the loggers", error, step=self.step)
            self.late.stop()
        failures, self.late.failures = self.late.failures, []
        for number, failure in failures:
            self._failures.of_callback(number, "later", failure, step=self.step)
