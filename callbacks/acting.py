"""Actor: does to a step's gradients what the callbacks have proposed, once, and lets the optimizer skip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import AfterClip, Position, StepContext, StepOutcome
from stabilizer.callbacks.learning_rates import LearningRates
from stabilizer.callbacks.nonfinite import NonfiniteReports
from stabilizer.callbacks.origin import BackwardWatch
from stabilizer.errors import TrainingStoppedError, warn
from stabilizer.measurement import Measurement
from stabilizer.plan import StepPlan
from stabilizer.reduction import world_size
from stabilizer.skipping import drop_gradients_, skip_on_device, skips_on_device, stop_skipping
from stabilizer.store import GradientStore
from stabilizer.tally import MicroBatchLoss

__all__ = ["Actor"]


class Actor:
    """One suite's hands.

    What the host reads and what ranks exchange follow from attributes of the callbacks and from reduced numbers; both
    are the same on every rank. Ranks that may act agree before they do, in one collective of five numbers: what one of
    them could not decide, none of them does.

    Args:
        callbacks: All of ours.
        model: As it trains.

    Attributes:
        is_bad: Whether any gradient of the step is not finite, shape (), bool; the same on every rank after `act`.
        may_skip: Whether any callback may skip a step.
    """

    def __init__(self, callbacks: Sequence[StabilizerCallback], model: nn.Module) -> None:
        self._acts = any(callback.acts for callback in callbacks)
        self.may_skip = any(callback.may_skip for callback in callbacks)
        self._may_stop = any(callback.may_stop for callback in callbacks)
        self._skips_nonfinite = any(callback.skips_nonfinite for callback in callbacks)
        self._clips_values = any(callback.clips_values for callback in callbacks)
        self._names_nonfinite = any(callback.names_nonfinite for callback in callbacks)
        self._lowers_lr = any(callback.lowers_lr for callback in callbacks)
        self._localizes = any(callback.localizes for callback in callbacks)
        self._measures_squares = any(callback.norm_type == 2 for callback in callbacks)
        self._intervals = {interval for callback in callbacks for interval in callback.after_every_n_steps}
        asks = (self._acts, self.may_skip, self._may_stop, self._names_nonfinite, self._localizes, self._lowers_lr)
        self._rates = LearningRates()
        self._agrees = any(asks) and world_size() > 1
        self._model: nn.Module | None = model
        self._reports = NonfiniteReports(callbacks[0])
        self._watch: BackwardWatch | None = None
        self._plan: StepPlan | None = None
        self._grad_scale: Tensor | None = None
        self._is_scaled = False
        self.is_bad = torch.zeros((), dtype=torch.bool)
        self._skips: bool | None = None  # None: the host does not know
        self._read_flags: list[bool] | None = None
        self._num_clips = 0
        self._has_warned = False

    def begin(
        self, store: GradientStore, measurement: Measurement, *, grad_scale: Tensor | None, is_scaled: bool
    ) -> StepPlan:
        """Start with a step.

        Args:
            store: Holds the gradients.
            measurement: Of this step.
            grad_scale: What they are still multiplied by, shape ().
            is_scaled: Whether a gradient scaler guards the step.

        Returns:
            A plan for the callbacks' proposals.
        """
        self._store, self._measurement = store, measurement
        self._grad_scale, self._is_scaled = grad_scale, is_scaled
        self._plan, self.is_bad = StepPlan(measurement.squares), measurement.is_bad
        self._skips, self._num_clips = None, 0
        return self._plan

    def decide(self, optimizer: torch.optim.Optimizer, *, has_failed: bool, may_search: bool = True) -> bool:
        """Make one decision of what all ranks have proposed, and read of it what the host must know.

        Args:
            optimizer: Whose step it is.
            has_failed: Whether this rank could not decide. Then no rank clips; what is not finite is skipped still.
            may_search: Whether this rank can take part in a search; if one cannot, none does.

        Returns:
            Whether the step is to be searched first, on every rank alike.
        """
        plan = self._plan
        assert plan is not None
        is_stopped, searches = self._agree(plan, has_failed=has_failed, may_search=may_search)
        # The host waits where it must; on a CPU it never does.
        waits = self._may_stop or self._localizes or (self.may_skip and not skips_on_device(optimizer))
        self._read_flags = None
        if self._store.device.type == "cpu" or waits:
            self._warn_of_wait(optimizer)
            self._read_flags = self._read(plan, is_stopped, searches)
            self._skips = self._read_flags[0]
        return self._read_flags is not None and self._read_flags[3]

    def act(self, contexts: Sequence[StepContext], *, losses: Sequence[MicroBatchLoss], position: Position) -> None:
        """Change the gradients as decided.

        Args:
            contexts: Of all callbacks; they get what the optimizer gets, where the host does not clip as well.
            losses: Of this rank's micro-batches: a loss that is not finite tells where a bad gradient comes from.
            position: Where the host is in its data.

        Raises:
            TrainingStoppedError: If a callback wants the run to end; on every rank, before the update.
        """
        plan, step = self._plan, self._measurement.step
        assert plan is not None
        if self._read_flags is not None:
            skips, is_bad, is_stopped, _, *flags = self._read_flags
            if is_bad and self._names_nonfinite and not self._is_scaled:
                self._report(step, losses, position=position, skips=skips, is_stopped=is_stopped)
            stops = [stop.describe() for stop, flag in zip(plan.stops, flags, strict=True) if flag]
            if is_stopped:
                stops = stops or ["another rank has asked for it"]
                raise TrainingStoppedError("; ".join([*stops, *self._reports.about(step)]))
        elif self._names_nonfinite and not self._is_scaled:
            self._reports.tell_late(contexts, outcome=self._outcome(skips=self._skips_nonfinite))
        self._watch_backward(self._read_flags is not None)
        if not self._skips:
            self._store.apply_(plan, grad_scale=self._grad_scale)
        self._store.release()
        self._note_after(contexts)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the optimizer from its step if the plan says so; as late as the host allows, for hooks of the user.

        Args:
            optimizer: Whose step comes next.
        """
        plan = self._plan
        if plan is not None:
            self._rates.scale(optimizer, plan.lr_factor)
        if plan is None or plan.skip is None or self._skips is False:
            return
        if skips_on_device(optimizer):
            skip_on_device(optimizer, plan.skip)
        elif self._skips:
            drop_gradients_(optimizer)

    def after_host_clip(self, contexts: Sequence[StepContext], *, max_norm: float | None, is_unscaled: bool) -> None:
        """Take note of the host's own clip, which comes after ours.

        Args:
            contexts: As of `act`.
            max_norm: Its limit, if it clipped by the total norm and nothing else has touched the gradients since.
            is_unscaled: Whether the host has divided the gradients by the loss scale before the clip.
        """
        self._num_clips += 1
        if is_unscaled:
            self._grad_scale = None
        if self._plan is None or not self._is_due():
            return
        # Measuring again is a collective. Whether it must be is known from what is the same on every rank, never from
        # whether this rank's own measurement has come out.
        is_known = max_norm is not None and self._num_clips == 1 and self._measures_squares and not self._clips_values
        if not is_known:
            self._measure_again(contexts)
            return
        assert max_norm is not None
        # What `torch.nn.utils.clip_grad_norm_` multiplies by; it sees gradients with the scale still in them.
        seen = self._plan.squares_after.sum().sqrt().to(torch.float32)
        seen = seen if self._grad_scale is None else seen * self._grad_scale.to(seen.device)
        coefficient = torch.clamp(max_norm / (seen + 1e-6), max=1.0)
        for context in contexts:
            norms, total = context.store.norms_after(self._plan)
            context.after = AfterClip(norms * coefficient, total * coefficient)

    def outcome(self) -> StepOutcome:
        """What has become of the step, now that the optimizer has moved or not."""
        assert self._plan is not None
        none = torch.zeros_like(self.is_bad)
        overflowed = self.is_bad if self._is_scaled else none
        return StepOutcome(none if self._plan.skip is None else self._plan.skip & ~overflowed, overflowed)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Let go of a step, done or not.

        Args:
            optimizer: Whose step it was.
        """
        stop_skipping(optimizer)
        self._rates.put_back()
        if self._plan is not None:
            self._store.release()  # where an error came in between
        self._plan = None

    def close(self) -> None:
        """Take away what watches the model, and let go of it."""
        self._model = None
        if self._watch is not None:
            self._watch.close()

    def _agree(self, plan: StepPlan, *, has_failed: bool, may_search: bool) -> tuple[Tensor, Tensor]:
        """Make one decision of those of all ranks.

        Returns:
            Whether a callback of any rank wants the run to end, and whether one wants a search, shape (), bool.
        """
        none = torch.zeros_like(self.is_bad)
        stops = [stop.flag for stop in plan.stops]
        is_stopped = torch.stack(stops).any() if stops else none
        searches = none if plan.search is None or not may_search else plan.search
        is_void = torch.ones_like(none) if has_failed else none
        if self._agrees:
            own = torch.stack([is_void, self.is_bad, self._skip_flag(plan), is_stopped, searches]).to(torch.float32)
            # One rank that cannot take part outweighs all that want to.
            own[4] -= 0.0 if may_search else world_size()
            is_void, self.is_bad, skip, is_stopped, searches = (self._store.sum(own) > 0).unbind()
            plan.skip = skip if self.may_skip else None
        if self._agrees or has_failed:
            plan.cancel(is_void)
            plan.skip = None if plan.skip is None else plan.skip & ~is_void
            is_stopped, searches = is_stopped & ~is_void, searches & ~is_void
            # Ranks must not differ: while rates are lowered, and only then, the host waits for this.
            plan.lr_factor = 1.0 if plan.lr_factor < 1 and bool(is_void) else plan.lr_factor
        if self._skips_nonfinite:
            # Whoever could not decide: a NaN is a NaN. Under a scaler too, for ranks that see no infinity of their own.
            plan.request_skip(self.is_bad)
        return is_stopped, searches

    def _skip_flag(self, plan: StepPlan) -> Tensor:
        return torch.zeros_like(self.is_bad) if plan.skip is None else plan.skip

    def _read(self, plan: StepPlan, is_stopped: Tensor, searches: Tensor) -> list[bool]:
        """The one read of a step: whether it is skipped, bad, the last, searched; and who wants it to be the last."""
        flags: list[bool] = torch.stack(
            [self._skip_flag(plan), self.is_bad, is_stopped, searches, *(stop.flag for stop in plan.stops)]
        ).tolist()
        return flags

    def _report(
        self, step: int, losses: Sequence[MicroBatchLoss], *, position: Position, skips: bool, is_stopped: bool
    ) -> None:
        if self._reports.count(step) or is_stopped:
            is_bad_backward = None if self._watch is None else self._watch.take()
            self._reports.diagnose(self._store, losses=losses, is_bad_backward=is_bad_backward)
            if not is_stopped:
                self._reports.tell(step, outcome=self._outcome(skips=skips), batch=position.batch_index)

    def _outcome(self, *, skips: bool) -> str:
        if skips:
            return "the step is skipped"
        is_zeroed = self._plan is not None and self._plan.zeroed is not None
        return "it is set to zero there" if is_zeroed else "the gradient is left as it is"

    def _watch_backward(self, knows: bool) -> None:
        """Watch the next backward passes, where ranks can ask one another, and forget those of this step."""
        if self._watch is None and self._model is not None and self._agrees and self._names_nonfinite and knows:
            self._watch = BackwardWatch(self._model)
        if self._watch is not None:
            self._watch.take()

    def _is_due(self) -> bool:
        return any(self._measurement.step % interval == 0 for interval in self._intervals)

    def _note_after(self, contexts: Sequence[StepContext]) -> None:
        if not self._acts or not self._is_due():
            return
        assert self._plan is not None
        if self._clips_values:
            self._measure_again(contexts)
            return
        for context in contexts:
            context.after = AfterClip(*context.store.norms_after(self._plan))

    def _measure_again(self, contexts: Sequence[StepContext]) -> None:
        again = self._store.remeasure(grad_scale=self._grad_scale)
        skip = None if self._plan is None else self._plan.skip
        for context in contexts:
            norms, total = context.store.norms_of(again)
            if skip is not None:
                norms, total = norms.masked_fill(skip, torch.nan), total.masked_fill(skip, torch.nan)
            context.after = AfterClip(norms, total)

    def _warn_of_wait(self, optimizer: torch.optim.Optimizer) -> None:
        is_free = self._store.device.type == "cpu" or skips_on_device(optimizer)
        if self._has_warned or is_free or not self.may_skip:
            return
        self._has_warned = True
        warn(
            f"{type(optimizer).__name__} cannot be told on the device to leave out a step: the host reads one number a "
            "step to know whether it is skipped. With fused=True it waits for nothing"
        )
