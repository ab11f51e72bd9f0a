"""Suite: all of our callbacks on the steps of one optimizer, whatever the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.acting import Actor
from stabilizer.callbacks.agreement import Agreement
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Position, StepContext
from stabilizer.callbacks.contexts import make_context
from stabilizer.callbacks.deferred import Deferred
from stabilizer.callbacks.failures import Failures
from stabilizer.callbacks.hosting import JOINED, is_joined
from stabilizer.callbacks.replays import Replays
from stabilizer.callbacks.run_facts import RunFacts
from stabilizer.callbacks.searches import Searches
from stabilizer.callbacks.step_meters import StepMeters
from stabilizer.callbacks.store_keeper import StoreKeeper
from stabilizer.errors import TrainingStoppedError, warn
from stabilizer.late import LateLog, Sink, answers_soon
from stabilizer.plan import StepPlan
from stabilizer.reduction import world_size
from stabilizer.store import GradientStore
from stabilizer.tally import MicroBatchLoss

__all__ = ["Suite"]


class Suite:
    """Runs callbacks in their order on one store of statistics.

    The host calls `run` when gradients are complete, and `finish` after the optimizer has moved; both on every rank.

    Args:
        callbacks: Ours, in any order.
        model: As it trains, wrapped.
        optimizer: Whose parameters are measured.
        sink: The host's loggers.
        optimizer_index: Position of the optimizer.
        groups: See `ParameterIndex`.
        known_names: Names of parameters that `layers=` may mean though they do not train at this optimizer's steps.
        facts: Of the run; one for all of its suites.
        replays: The micro-batches of the step at hand; one for all of its suites.
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
        facts: RunFacts | None = None,
        replays: Replays | None = None,
    ) -> None:
        self.callbacks = sorted(callbacks, key=lambda callback: (callback.order, callback.state_key))
        self.step = max(callback.next_step(optimizer_index) for callback in callbacks)
        self.late, self.optimizer = LateLog(sink), optimizer
        self._model, self._optimizer_index, self._facts = model, optimizer_index, facts
        self._agreement = Agreement(num_callbacks=len(self.callbacks))
        self._failures = Failures(self.callbacks, self._agreement)
        self._meters = StepMeters(self.callbacks)
        self._keeper = StoreKeeper(
            self.callbacks,
            model=model,
            optimizer_index=optimizer_index,
            groups=groups,
            known_names=known_names,
            num_flags=self._agreement.num_flags,
        )
        self._contexts: list[StepContext] = []
        self._deferred, self._actor = Deferred(self._failures), Actor(self.callbacks, model)
        self._searches = Searches(self.callbacks, replays, model=model, number=optimizer_index)
        self._position, self.is_open, self._is_told = Position(), False, False

    def run(
        self,
        *,
        grad_scale: Tensor | None = None,
        is_scaled: bool = False,
        losses: Sequence[MicroBatchLoss] = (),
        position: Position | None = None,
    ) -> None:
        """Measure the step's gradients, let all callbacks see them, and do what they propose.

        Args:
            grad_scale: What the gradients are still multiplied by, shape (); `None` if they are as they should be.
            is_scaled: Whether a gradient scaler guards this step.
            losses: Of this rank's micro-batches.
            position: Where the host is in its data.

        Raises:
            TrainingStoppedError: If a callback was told to end the run in such a case; on every rank.
        """
        if self._is_joined():
            return
        store = self._keeper.current(self.optimizer, step=self.step)
        self._failures.write(self.late, before=self.step, step=self.step)
        self.is_open, self._contexts = True, []
        self._position = Position() if position is None else position
        self._meters.check_window(self.step, self._position)
        if store is None:
            return
        is_due = world_size() > 1 and self._agreement.is_due(self.step)
        if is_due and self._agreement.apply(self.callbacks):
            store.replan()
        self._failures.settle()
        if self._agreement.is_off:
            return
        self._agreement.request_replan(store.needs_replan)
        flags = self._agreement.flags(store.device)
        self._searches.close_micro_batches(store)
        sums = self._meters.pack(self.step, losses, self._searches.gradients, store=store)
        measurement = store.measure(self.step, grad_scale=grad_scale, flags=flags, sums=sums, compare=is_due, keep=True)
        if is_due:
            self._agreement.note(measurement)
        failures = self._meters.read(measurement)
        plan = self._actor.begin(store, measurement, grad_scale=grad_scale, is_scaled=is_scaled)
        if store.failure is not None:
            self._failures.of_measuring(store.failure, step=self.step)
            # Without anything to propose, but in whatever the other ranks exchange.
            self._decide(has_failed=True)
            self._act(losses)
            return
        self._searches.compare(store)
        self._keeper.missing.see(measurement)
        self._meters.tell(failures, self._failures)
        if self._facts is not None:
            accumulation = self._position.divisor or self._position.num_micro_batches
            self._facts.conclude(self._model, accumulation=accumulation, sink=self.late.sink, step=self.step)
        self._settle(store, plan, flags=flags, grad_scale=grad_scale, is_scaled=is_scaled)
        self._act(losses)

    def _settle(
        self, store: GradientStore, plan: StepPlan, *, flags: Tensor, grad_scale: Tensor | None, is_scaled: bool
    ) -> None:
        """Let all callbacks propose, search the step if that was asked for, and decide."""
        self._propose(plan, is_scaled=is_scaled)
        if self._decide(has_failed=self._failures.is_undecided):
            if self._searches.run(self._contexts, plan, store, self._failures, grad_scale=grad_scale):
                # Other gradients than those that were measured.
                measurement = store.measure(self.step, grad_scale=grad_scale, flags=flags, keep=True)
                plan = self._actor.begin(store, measurement, grad_scale=grad_scale, is_scaled=is_scaled)
                self._propose(plan, is_scaled=is_scaled)
            self._decide(has_failed=self._failures.is_undecided or store.failure is not None)

    def _is_joined(self) -> bool:
        if not is_joined(self._model, self.optimizer):
            return False
        if not self._is_told:
            self._is_told = True
            self._searches.stop()
            warn(JOINED)
        return True

    def before_step(self) -> None:
        """Keep the optimizer from its step if that was decided; the last thing before it moves."""
        if self.is_open:
            self._guarded("before_step", lambda: self._actor.before_step(self.optimizer))

    def after_clip(self, *, max_norm: float | None, is_unscaled: bool = False) -> None:
        """Tell that the host has clipped.

        Args:
            max_norm: Its limit, if it clipped by the total norm and nothing else has touched the gradients since they
                were measured; `None` if the gradients must be measured again.
            is_unscaled: Whether the host has divided the gradients by the loss scale before the clip.
        """
        if self._keeper.store is not None and not self._agreement.is_off:
            self._actor.after_host_clip(self._contexts, max_norm=max_norm, is_unscaled=is_unscaled)

    def total_norm(self) -> Tensor | None:
        """Of the step at hand; see `GradientStore.total_norm`."""
        return self._keeper.store.total_norm() if self.is_open and self._keeper.store is not None else None

    def finish(self) -> None:
        """Close the step: the optimizer has moved."""
        if not self.is_open:
            return
        self.is_open = False
        outcome = self._actor.outcome() if self._contexts else None
        for context in self._contexts:
            context.outcome = outcome
        for callback in self.callbacks[:1]:  # one console serves all
            callback.console.count_step(self._contexts, may_skip=self._actor.may_skip)
        try:
            self._each("on_step_end")
        finally:
            self._actor.end(self.optimizer)
            self._searches.end_step(next_step=self.step + 1)
            self.late.close_step(self.step)
            for callback in self.callbacks:
                callback.advance(self._optimizer_index, self.step)
            self.step += 1
        self._deferred.call(step=self.step - 1)

    def abandon(self) -> None:
        """Forget the step at hand: the optimizer has not moved."""
        if self.is_open:
            self.is_open = False
            self._actor.end(self.optimizer)
            self.late.forget()
            self._deferred.clear()
            self._meters.drop()
            self._searches.end_step(next_step=self.step, is_kept=False)

    def close(self, *, is_end: bool = True, after_exception: bool = False) -> None:
        """Write everything that is on its way, and let go of the model.

        Args:
            is_end: Whether the run ends; else it goes on from a checkpoint, with another suite.
            after_exception: Whether the run breaks off: a device that hangs is not waited for then.
        """
        answers = not after_exception or self._keeper.store is None or answers_soon(self._keeper.store.device)
        self.abandon()
        try:
            if self._contexts and is_end and answers:
                self._each("on_run_end")
                self.late.close_step(self._contexts[0].step)
            if self._keeper.store is not None and is_end and answers:
                self._keeper.missing.conclude()
            self._failures.write(self.late, wait=answers, after_exception=after_exception, step=self.step)
        finally:
            if is_end and answers:
                self.callbacks[0].console.collect(self.callbacks, self._optimizer_index)
            self._actor.close()
            self._searches.close()
            for callback in self.callbacks:
                owner = type(callback) if answers else StabilizerCallback
                owner.detach_view(callback, self._optimizer_index)

    def _propose(self, plan: StepPlan, *, is_scaled: bool) -> None:
        store = self._keeper.store
        assert store is not None
        self._contexts = [
            make_context(
                callback,
                number,
                store=store,
                plan=plan,
                selection=self._keeper.selections[number],
                late=self.late,
                optimizer_index=self._optimizer_index,
                is_scaled=is_scaled,
                is_bad=self._actor.is_bad,
                position=self._position,
                run=self._facts,
                defer=functools.partial(self._deferred.add, number),
                **self._meters.found_for(callback),
            )
            for number, callback in enumerate(self.callbacks)
        ]
        self._each("on_gradients")

    def _decide(self, *, has_failed: bool) -> bool:
        """Whether the step is to be searched first."""
        may_search = self._failures.may_search
        decide = functools.partial(self._actor.decide, self.optimizer, has_failed=has_failed, may_search=may_search)
        return bool(self._guarded("decide", decide))

    def _act(self, losses: Sequence[MicroBatchLoss]) -> None:
        self._guarded("act", lambda: self._actor.act(self._contexts, losses=losses, position=self._position))
        for context in self._contexts:
            context.is_bad = self._actor.is_bad

    def _guarded(self, what: str, function: Callable[[], Any]) -> Any:
        """Do what was decided; a fault of ours there turns off whoever acts."""
        try:
            return function()
        except TrainingStoppedError:
            raise
        except Exception as error:
            for number, callback in enumerate(self.callbacks):
                if callback.acts or callback.localizes:
                    self._failures.of_callback(number, what, error, step=self.step)
            return None

    def _each(self, method: str) -> None:
        """Call a method of every callback that is on; none of them may end the run, unless it is strict."""
        for number, context in enumerate(self._contexts):
            callback = self.callbacks[number]
            is_gated = callback.is_gated and method != "on_run_end" and context.step % callback.every_n_steps
            if callback.has_failed or is_gated:
                continue
            try:
                getattr(callback, method)(context)
            except TrainingStoppedError:
                raise
            except Exception as error:
                self._failures.of_callback(number, method, error, step=self.step)
