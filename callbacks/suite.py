"""Suite: all of our callbacks on the steps of one optimizer, whatever the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.agreement import Agreement
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import AfterClip, Selection, StepContext
from stabilizer.callbacks.missing import MissingGradients
from stabilizer.errors import logger
from stabilizer.late import LateLog, Sink
from stabilizer.parameters import ParameterIndex
from stabilizer.reduction import rank, world_size
from stabilizer.store import GradientStore
from stabilizer.tags import prefix
from stabilizer.view import LayerView

__all__ = ["Suite", "check_selections"]


def check_selections(callbacks: Sequence[StabilizerCallback], model: nn.Module) -> tuple[str, ...]:
    """Raise for `layers=` and `exclude=` that match nothing in a model, before the first step.

    Args:
        callbacks: All of ours.
        model: The model that will train.

    Returns:
        Names of the parameters that train: at a step, some may be frozen for the moment.

    Raises:
        ValueError: Names the item and what there is.
    """
    names = ParameterIndex(model).names
    for callback in callbacks:
        callback.choose(names)
    return names


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
        self._model, self._optimizer, self._groups = model, optimizer, groups
        self._optimizer_index, self._known_names = optimizer_index, known_names
        self._agreement = Agreement(num_callbacks=len(self.callbacks))
        self._store: GradientStore | None = None
        self._parameters: list[Tensor] = []
        self._selections: list[Selection] = []
        self._contexts: list[StepContext] = []
        self.is_open = False

    def run(self, *, grad_scale: Tensor | None = None, is_scaled: bool = False) -> None:
        """Measure the step's gradients and let all callbacks see them.

        Args:
            grad_scale: What the gradients are still multiplied by, shape (); `None` if they are as they should be.
            is_scaled: Whether a gradient scaler guards this step.
        """
        store = self._current_store()
        self._write(before=self.step)
        self.is_open, self._contexts = True, []
        is_due = world_size() > 1 and self._agreement.is_due(self.step)
        if is_due and self._agreement.apply([type(callback).__name__ for callback in self.callbacks]):
            store.replan()
        if self._agreement.is_off:
            return
        self._agreement.request_replan(store.needs_replan)
        flags = self._agreement.flags(store.device)
        measurement = store.measure(self.step, grad_scale=grad_scale, flags=flags, compare=is_due)
        if store.failure is not None:
            self._report("measuring gradients", store.failure)
            self._agreement.measuring_failed()
            store.failure = None
        if is_due:
            self._agreement.note(measurement)
        self._missing.see(measurement)
        self._contexts = [self._context(number, is_scaled) for number in range(len(self.callbacks))]
        self._each("on_gradients")

    def after_clip(self, coefficient: Tensor | None) -> None:
        """Tell what the host's own clip has left of the gradients.

        Args:
            coefficient: What all gradients were multiplied by, shape (); `None` if no one number says it: the gradients
                are measured again.
        """
        if self._store is None or not self._contexts:
            return
        again = self._store.remeasure() if coefficient is None else None
        for context in self._contexts:
            norms, total = context.store.norms, context.store.total_norm
            if again is not None:
                norms, total = context.store.norms_of(again)
            elif coefficient is not None:
                norms, total = norms * coefficient, total * coefficient
            context.after = AfterClip(norms, total)

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

    def close(self) -> None:
        """End of the run: write everything that is on its way."""
        self.finish()
        self._each("on_run_end")
        self.late.close_step(max(0, self.step - 1))
        if self._store is not None:
            self._missing.conclude()
        self._write(wait=True)
        for callback in self.callbacks:
            callback.detach_view(self._optimizer_index)

    def _current_store(self) -> GradientStore:
        """The store, made anew when the optimizer's trainable parameters have changed (gradual unfreezing)."""
        groups = self._optimizer.param_groups
        parameters: list[Tensor] = [p for group in groups for p in group["params"] if p.requires_grad]
        is_same = len(parameters) == len(self._parameters) and all(
            new is old for new, old in zip(parameters, self._parameters, strict=True)
        )
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
        # A layer of another optimizer, or of another rank, may be asked for too: it is no mistake.
        names = list(dict.fromkeys([*self._known_names, *ParameterIndex(self._model).names, *store.names]))
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
        )

    def _each(self, method: str) -> None:
        """Call a method of every callback that is on; none of them may end the run, unless it is strict."""
        for number, context in enumerate(self._contexts):
            callback = self.callbacks[number]
            if self._agreement.is_disabled(number):
                continue
            try:
                hook: Callable[[StepContext], None] = getattr(callback, method)
                hook(context)
            except Exception as error:
                if callback.strict:
                    raise
                self._report(f"{type(callback).__name__}.{method}", error)
                self._agreement.fail(number)

    def _write(self, *, before: int | None = None, wait: bool = False) -> None:
        try:
            self.late.drain(before=before, wait=wait)
        except Exception as error:
            if any(callback.strict for callback in self.callbacks):
                raise
            self._report("writing to the loggers", error)
            self.late.stop()

    def _report(self, what: str, error: Exception) -> None:
        logger.error(
            "%s failed at step %d on rank %d; it is off from now on, training goes on (strict=True would end the run)",
            what,
            self.step,
            rank(),
            exc_info=error,
        )
