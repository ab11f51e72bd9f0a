"""NumericsCallback: what broke a step: the data, the numerics or the machine."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.base import Order, StabilizerCallback
from stabilizer.callbacks.charts import Chart
from stabilizer.callbacks.checks import check_interval
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.grad_loc import GradLocCallback
from stabilizer.callbacks.numerics_findings import look_into
from stabilizer.callbacks.numerics_inquiry import Inquiry
from stabilizer.callbacks.numerics_ledger import Ledger
from stabilizer.callbacks.numerics_reports import NumericsReports, Profiling
from stabilizer.callbacks.numerics_signs import RunTimes, Signs
from stabilizer.callbacks.numerics_triggers import Triggers, own_rule
from stabilizer.callbacks.optimizer_health import OptimizerHealth
from stabilizer.callbacks.searches import StepReplay
from stabilizer.callbacks.trigger import Observation
from stabilizer.names import Granularity
from stabilizer.numerics.finding import NumericsFinding
from stabilizer.tally import Weight
from stabilizer.thresholds import RuleSpec, make_rule
from stabilizer.thresholds.arguments import check_number, check_whole

__all__ = ["NumericsCallback"]


class NumericsCallback(StabilizerCallback):
    """Says what broke a step (the data, the numerics or the machine), where and on whose machine; changes nothing.

    A gradient or a loss that is not finite, and a norm far over its threshold, are looked into before the optimizer
    moves: the suspicious micro-batch of the suspicious rank is run again a few times, exactly as it was. What comes out
    the same every time comes from the data or the code (`GradLocCallback`, if it is there, is asked for the token in
    the same step); what comes out differently, from numerics that are not deterministic; what never comes again, from
    the machine, which is named. Megatron-LM's rerun state machine makes the same three cases. Of values that are not
    finite, the module that makes them is told from those that carry them.

    Beside that it watches the loss scale, the share of gradients that half precision loses, the parameters, the time of
    collectives, and the optimizer's state (see `OptimizerHealth`).

    Args:
        max_replays: How often a suspicious micro-batch is run again, at most.
        trigger_ratio: A norm over this many times the threshold in use (that of the clips beside it, or of `rule`) is
            looked into.
        rule: How thresholds follow the norms where no clip keeps any; see `LayerClipCallback`. Default "robust_log".
        warmup_steps: Steps before the first look at a norm that is finite.
        cooldown_steps: Steps in which the same kind of trouble is not looked into again.
        reproduce_tol: Norms of a gradient and its replay that differ by more than this part are not the same.
        check_parameters_every_n_steps: Interval of the look for parameters that are not finite; `None` turns it off.
        profile_on_incident: Whether the step after the first incident is traced by torch's profiler.
        slow_ratio: Collectives that take this many times their median, and more than a second, are told.
        dump_dir: Folder for reports; default `numerics` in the logger's folder.
        max_incidents: Largest number of incidents in a run; nothing is looked into after that.
        every_n_steps: Interval of what is measured and logged while all is well, in optimizer steps.
        layers: Which layers' norms can start a look; see `StabilizerCallback`. The total always can.
        exclude: Which layers not.
        granularity: What a layer is.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> callback = NumericsCallback(max_replays=2)
        >>> callback.findings
        []
    """

    order = Order.VERDICT
    is_gated = False
    localizes = True
    needs_loss = False

    def __init__(
        self,
        *,
        max_replays: int = 3,
        trigger_ratio: float = 10.0,
        rule: RuleSpec | None = None,
        warmup_steps: int = 50,
        cooldown_steps: int = 100,
        reproduce_tol: float = 0.01,
        check_parameters_every_n_steps: int | None = 100,
        profile_on_incident: bool = False,
        slow_ratio: float = 10.0,
        dump_dir: str | None = None,
        max_incidents: int = 20,
        every_n_steps: int = 100,
        layers: list[int | str] | None = None,
        exclude: Sequence[str] = (),
        granularity: Granularity = "block",
        name: str = "",
        strict: bool = False,
    ) -> None:
        super().__init__(
            every_n_steps=every_n_steps,
            layers=layers,
            exclude=exclude,
            granularity=granularity,
            name=name,
            strict=strict,
        )
        self.max_replays = check_whole("max_replays", max_replays, low=1)
        self.trigger_ratio = check_number("trigger_ratio", trigger_ratio, above=1)
        self.warmup_steps = check_interval("warmup_steps", warmup_steps, minimum=0)
        self.rule = rule
        make_rule(own_rule(rule, self.warmup_steps))  # a bad one is an error here
        self.cooldown_steps = check_interval("cooldown_steps", cooldown_steps, minimum=0)
        self.reproduce_tol = check_number("reproduce_tol", reproduce_tol, above=0)
        self.check_parameters_every_n_steps = (
            None
            if check_parameters_every_n_steps is None
            else check_interval("check_parameters_every_n_steps", check_parameters_every_n_steps)
        )
        self.profile_on_incident = profile_on_incident
        self.slow_ratio = check_number("slow_ratio", slow_ratio, above=1)
        self.max_incidents = check_whole("max_incidents", max_incidents, low=1)
        self.loss_weight: Weight | None = "auto"
        self._reports = NumericsReports(dump_dir)
        self._begin()

    def _begin(self) -> None:
        """All that a run leaves behind."""
        self._ledger = Ledger(self._reports, cooldown_steps=self.cooldown_steps, max_incidents=self.max_incidents)
        self._health = OptimizerHealth(self, every_n_steps=self.every_n_steps, warmup_steps=self.warmup_steps)
        self._triggers, self._signs = Triggers(self.rule, warmup_steps=self.warmup_steps), dict[int, Signs]()
        self._times, self._profiling = RunTimes(self.slow_ratio), Profiling()
        self._seen: dict[int, Observation] = {}

    @property
    def findings(self) -> list[NumericsFinding]:
        """What was found, the last hundred, the same on every rank."""
        return self._ledger.findings

    def join_run(self, host: Any) -> None:
        """Time the collectives of this run, and watch its optimizers."""
        self._times = RunTimes(self.slow_ratio)
        host.undo.append(self._times.start())
        self._health.join_run(host)

    def on_gradients(self, context: StepContext) -> None:
        """Hold the norms against what starts a look."""
        index = context.optimizer_index
        self._times.measured()
        self._health.begin_step(context)
        signs = self._signs_of(index)
        if self.host is not None:
            signs.begin_step(context, self.host)
        resting = {kind for kind in signs.pending if self._ledger.is_resting(context, kind)}
        signs.pending = {kind: numbers for kind, numbers in signs.pending.items() if kind not in resting}
        self._seen[index] = seen = self._triggers.look(self, context)
        if not self._ledger.is_full(self):
            flags = [*self._bad(context).values(), self._spikes(context, seen)]
            context.plan.search(torch.stack(flags).any() | bool(signs.pending))

    def localize(self, context: StepContext, steps: StepReplay) -> bool:
        """Look into the step; on every rank."""
        signs, seen = self._signs_of(context.optimizer_index), self._seen[context.optimizer_index]
        inquiry = Inquiry(
            context,
            steps,
            seen,
            ratio=self.trigger_ratio,
            max_replays=self.max_replays,
            tolerance=self.reproduce_tol,
            granularity=self.granularity,
        )
        flags = {**self._bad(context), "spike": self._spikes(context, seen), "is_bad": context.is_bad}
        own: dict[str, dict[str, float]] = {kind: {} for kind, flag in flags.items() if bool(flag)}
        reasons = inquiry.ask({**own, **signs.pending}, self._times)
        signs.pending = {}
        searches = self._searches()
        found = look_into(inquiry, reasons, has_tokens=bool(searches))
        for one in found:
            self._ledger.note(self, context, one, reasons)
        if any(one.finding.verdict == "repeats" for one in found):
            for search in searches:
                steps.ask(search)
        if found and self.profile_on_incident and not self._profiling.is_done:
            base = str(self._reports.base(self, context)) if context.is_logging else None
            self._profiling.arm(found[0].finding, steps.store.reducer.objects(base))
        return False

    def on_step_end(self, context: StepContext) -> None:
        """Let the norms enter the history, log, and tell what has come."""
        index, outcome = context.optimizer_index, context.outcome
        self._profiling.close_step()
        self._ledger.close_step(context, self._searches())
        signs, slow = self._signs_of(index), self._times.close_step(context.step)
        if slow is not None:
            signs.pending["slow_collective"] = slow
        if self.host is not None:
            signs.end_step(context, self.host)
        seen = self._seen.pop(index, None)
        if seen is not None and outcome is not None:
            self._triggers.update(index, seen, valid=~(outcome.overflowed | outcome.skipped | context.is_bad))
        self._health.end_step(context)
        self._tell_health(context, before=context.step)

    def on_run_end(self, context: StepContext) -> None:
        """Tell what has come of the last steps."""
        self._tell_health(context, before=None)

    def detach_view(self, optimizer_index: int) -> None:
        """Keep what was learned, on the CPU."""
        self._profiling.stop()
        self._triggers.let_go(optimizer_index)
        self._seen.pop(optimizer_index, None)
        if optimizer_index in self._signs:
            self._signs[optimizer_index].let_go()
        self._health.forget_layers(optimizer_index)
        super().detach_view(optimizer_index)

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        names = ("max_replays", "trigger_ratio", "warmup_steps", "cooldown_steps", "check_parameters_every_n_steps")
        rule = make_rule(own_rule(self.rule, self.warmup_steps)).describe()
        return {**super().hyperparameters(), "rule": rule, **{name: getattr(self, name) for name in names}}

    def extra_state(self) -> dict[str, Any]:
        """Thresholds, what is pending, what was looked into and found, and the optimizer's health."""
        return {
            "triggers": self._triggers.state_dict(),
            "signs": {str(index): self._signs[index].state_dict() for index in sorted(self._signs)},
            "ledger": self._ledger.state_dict(),
            "has_trace": self._profiling.is_done,
            "health": self._health.state_dict(),
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the layers are known."""
        self._triggers.load_state_dict(state["triggers"])
        self._signs = {}
        for index, saved in state["signs"].items():
            self._signs_of(int(index)).load_state_dict(saved)
        self._ledger.load_state_dict(state["ledger"])
        self._profiling.is_done = bool(state["has_trace"])
        self._health.load_state_dict(state["health"])

    def charts(self) -> list[Chart]:
        """Those of the optimizer's health, and incidents."""
        return self._health.charts()

    def limitations(self, setting: Any) -> list[str]:
        """Where the host waits, and what cannot be seen."""
        found = self._health.limitations()
        if any(parameter.device.type != "cpu" for parameter in setting.model.parameters()):
            found.append("the host reads one number a step before the optimizer moves, and waits for the device")
        return found

    def _searches(self) -> list[GradLocCallback]:
        others = () if self.driver is None else self.driver.callbacks
        return [other for other in others if isinstance(other, GradLocCallback) and not other.has_failed]

    def _signs_of(self, index: int) -> Signs:
        if index not in self._signs:
            self._signs[index] = Signs(
                every_n_steps=self.every_n_steps, check_parameters_every_n_steps=self.check_parameters_every_n_steps
            )
        return self._signs[index]

    def _bad(self, context: StepContext) -> dict[str, Tensor]:
        """What is not finite, shape () each; an overflow under a loss scale is the scaler's business, a loss never."""
        if self._ledger.is_resting(context, "nonfinite"):
            return {}
        found = {} if context.is_scaled else {"nonfinite_gradient": context.is_bad}
        if context.loss is not None:
            found["nonfinite_loss"] = (context.loss.num_nonfinite > 0).reshape(()).to(context.is_bad.device)
        return found

    def _spikes(self, context: StepContext, seen: Observation) -> Tensor:
        if context.step < self.warmup_steps or self._ledger.is_resting(context, "spike"):
            return torch.zeros_like(context.is_bad)
        return ((seen.excess > self.trigger_ratio) & (seen.compared < torch.inf)).any() & ~context.is_bad

    def _tell_health(self, context: StepContext, *, before: int | None) -> None:
        for finding in self._health.tell(before):
            self._ledger.keep(finding)
            self._reports.say(self, context, finding)

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to a run holds device memory and the callback itself; a copy gets its own.
        own = {"_health", "_triggers", "_signs", "_times", "_profiling", "_seen", "_ledger"}
        state = {key: value for key, value in super().__getstate__().items() if key not in own}
        return {**state, "_copied": copy.deepcopy(self.extra_state())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({key: value for key, value in state.items() if key != "_copied"})
        self._begin()
        self.load_extra_state(state["_copied"])
