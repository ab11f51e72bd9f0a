"""OptimizerHealth: what an optimizer's updates and its state say of a run; a part of another callback."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from stabilizer import tags
from stabilizer.callbacks.charts import Chart, ChartPage, incident_chart
from stabilizer.callbacks.checks import check_interval
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.optimizer_accumulation import AccumulationWatch
from stabilizer.callbacks.optimizer_followed import FollowedOptimizer
from stabilizer.callbacks.optimizer_meter import HealthMeter
from stabilizer.callbacks.optimizer_rates import RateWatch
from stabilizer.callbacks.run_host import RunHost
from stabilizer.callbacks.update_hooks import AfterStep, layers_of
from stabilizer.numerics.finding import NumericsFinding
from stabilizer.optimizer_health import OptimizerHistory, OptimizerLimits

__all__ = ["OptimizerHealth"]


class OptimizerHealth:
    """Looks at what every optimizer does at every n-th step, and at its learning rate at every step.

    The callback that has it hands its hooks on. Nothing is changed and the host waits for nothing; where parameters are
    sharded, or of low precision, there is one collective at the steps that are looked at.

    Args:
        callback: Whose part this is.
        every_n_steps: Interval in optimizer steps. Such a step copies the parameters, and reads them, the gradients and
            the optimizer's state.
        warmup_steps: First steps, of which only sums that change nothing are told.
        cooldown_steps: Steps in which a kind of finding is not told again.
        limits: From where on a figure is a finding.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        callback: Any,
        *,
        every_n_steps: int = 100,
        warmup_steps: int = 100,
        cooldown_steps: int = 1000,
        limits: OptimizerLimits | None = None,
    ) -> None:
        self._callback = callback
        self.every_n_steps = check_interval("every_n_steps", every_n_steps)
        self.warmup_steps = check_interval("warmup_steps", warmup_steps, minimum=0)
        self.cooldown_steps = check_interval("cooldown_steps", cooldown_steps, minimum=0)
        self.limits = OptimizerLimits() if limits is None else limits
        self._hooks: AfterStep | None = None
        self._watches: dict[int, AccumulationWatch] = {}
        self._followed: dict[int, FollowedOptimizer] = {}
        self._saved: dict[int, dict[str, Any]] = {}
        self._untold: list[NumericsFinding] = []

    def join_run(self, host: RunHost) -> None:
        """A run begins; for `join_run`, so that the first step's micro-batches can be looked at.

        Args:
            host: Of the run.
        """
        for index, optimizer in enumerate(host.optimizers):
            watch = self._watch_of(host, index, optimizer)
            if self._callback.next_step(index) % self.every_n_steps == 0:
                watch.start()

    def begin_step(self, context: StepContext) -> None:
        """Prepare for the step; for `on_gradients`, at every step.

        Args:
            context: Of the step.
        """
        host, index = self._callback.host, context.optimizer_index
        if index in self._followed:
            self._followed[index].drop()
        if host is None or not context.selected_names:
            return
        self._hooks = self._hooks or AfterStep(self, "_after_step")
        optimizer = self._hooks.watch(host, index)
        watch = self._watch_of(host, index, optimizer)
        watch.stop()
        followed = self._followed.get(index)
        if followed is None:
            followed = self._follow(context, optimizer)
        is_due = context.step % self.every_n_steps == 0
        rates = followed.rates.see(optimizer)
        if is_due or rates is not None:
            followed.begin(optimizer, is_whole=is_due, rates=rates)

    def end_step(self, context: StepContext) -> None:
        """Log what was measured, and send it on its way to the host; for `on_step_end`, at every step.

        Args:
            context: Of the step.
        """
        host, followed, outcome = self._callback.host, self._followed.get(context.optimizer_index), context.outcome
        if host is None or followed is None or outcome is None:
            return
        optimizer = host.optimizers[context.optimizer_index]
        followed.finish(optimizer)  # the host's hook may stand before ours
        is_lost = outcome.skipped | outcome.overflowed | context.is_bad
        followed.send(context, is_lost=is_lost)
        meter = followed.meter
        meter.failure.check(agrees=meter.agrees, is_due=context.step % self.every_n_steps == 0)
        if (context.step + 1) % self.every_n_steps == 0:
            self._watch_of(host, context.optimizer_index, optimizer).start()

    def tell(self, before: int | None = None) -> list[NumericsFinding]:
        """Findings of what has reached the host, each once a cooldown; the same on every rank.

        Args:
            before: Only of earlier steps than this, and without waiting; by default of all, waiting for them.
        """
        for followed in self._followed.values():
            self._untold += followed.read(before=before)
        found, self._untold = self._untold, []
        return found

    def forget_layers(self, optimizer_index: int) -> None:
        """The layers of an optimizer are others now, or the run ends: for `attach_view` and `detach_view`.

        Args:
            optimizer_index: Position of the optimizer.
        """
        followed = self._followed.pop(optimizer_index, None)
        if followed is not None:
            self._untold += followed.read(before=None)
            self._saved[optimizer_index] = followed.state_dict()

    def limitations(self) -> list[str]:
        """What cannot be seen in the run at hand, for `limitations`."""
        host: RunHost | None = self._callback.host
        found = []
        for optimizer in () if host is None else host.optimizers:
            if not any("betas" in group and "eps" in group for group in optimizer.param_groups):
                found.append(
                    f"{type(optimizer).__name__} has no second moment: nothing of g^2/v, of spikes in it or silent rows"
                )
        return list(dict.fromkeys(found))

    def charts(self) -> list[Chart]:
        """Charts to arrange in TensorBoard; the incidents of the callback among them."""
        page, ratio, rms = ChartPage.UPDATES, f"{tags.OPTIMIZER_UPDATE_RATIO}/.*", f"{tags.OPTIMIZER_RMS}/.*"
        return [
            Chart(page, "Update over parameter, by layer: usual is about 0.001", lines=(ratio,)),
            Chart(page, "RMS of g^2/v, by layer: far above 1 the update is too large", lines=(rms,)),
            incident_chart(tags.NUMERICS_INCIDENTS),
        ]

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU clones; reads what is on its way to the host."""
        for followed in self._followed.values():
            self._untold += followed.read(before=None)
        found = {**self._saved, **{index: followed.state_dict() for index, followed in self._followed.items()}}
        return {
            "optimizers": {str(index): found[index] for index in sorted(found)},
            "untold": [finding.to_plain() for finding in self._untold],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        self._followed.clear()
        self._saved = {int(index): saved for index, saved in state["optimizers"].items()}
        self._untold = [NumericsFinding.from_plain(plain) for plain in state["untold"]]

    def _after_step(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer has moved."""
        if index in self._followed:
            self._followed[index].finish(optimizer)

    def _watch_of(self, host: RunHost, index: int, optimizer: torch.optim.Optimizer) -> AccumulationWatch:
        if index not in self._watches:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._watches[index] = watch = AccumulationWatch(parameters)
            host.undo.extend([functools.partial(self._forget_watch, index), watch.stop])
        return self._watches[index]

    def _forget_watch(self, index: int) -> None:
        self._watches.pop(index, None)

    def _follow(self, context: StepContext, optimizer: torch.optim.Optimizer) -> FollowedOptimizer:
        index = context.optimizer_index
        layers = layers_of(self._callback, context, optimizer)
        meter = HealthMeter(layers, model=self._callback.host.model, watch=self._watches[index])
        history = OptimizerHistory(
            self.limits, warmup_steps=self.warmup_steps, cooldown_steps=self.cooldown_steps, optimizer_index=index
        )
        followed = FollowedOptimizer(meter, history, RateWatch(self.limits.rate))
        if index in self._saved:
            followed.load_state_dict(self._saved.pop(index))
        self._followed[index] = followed
        return followed

    def __getstate__(self) -> dict[str, Any]:
        state = self.state_dict()
        saved = {int(index): one for index, one in state["optimizers"].items()}
        return {**self.__dict__, "_hooks": None, "_watches": {}, "_followed": {}, "_saved": saved}
