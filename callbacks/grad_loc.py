"""GradLocCallback: from a gradient spike to the tokens behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from stabilizer import tags
from stabilizer.callbacks.base import Order, StabilizerCallback
from stabilizer.callbacks.charts import Chart, incident_chart
from stabilizer.callbacks.checks import check_choice, check_interval
from stabilizer.callbacks.clip_limits import limits_beside
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.incident_reports import IncidentReports
from stabilizer.callbacks.incidents import try_incident
from stabilizer.callbacks.notices import spike_notice
from stabilizer.callbacks.searches import StepReplay, search_limitations
from stabilizer.callbacks.trigger import Limits, Observation, Trigger
from stabilizer.errors import logger
from stabilizer.localize.incident import Incident
from stabilizer.localize.parts import part_norms
from stabilizer.localize.taps import find_tap
from stabilizer.names import Granularity
from stabilizer.tally import Weight
from stabilizer.thresholds import RuleSpec, make_rule
from stabilizer.thresholds.arguments import check_number, check_whole

__all__ = ["GradLocCallback", "OnFound", "PositionMap"]

OnFound: TypeAlias = Literal["report", "drop_tokens", "skip_step"]
PositionMap: TypeAlias = Literal["auto", "always", "never"]


_RETRY_STEPS = 10


class GradLocCallback(StabilizerCallback):
    """Finds the tokens behind a gradient spike, and proves it: without them the norm is normal.

    While all is well it keeps references to the step's micro-batches, their random states, and the norm of each rank's
    own gradient of each. At a spike it runs the suspicious micro-batches once more, exactly as they were, and searches
    with gated backward passes of the kept graph (Tencent Hunyuan's GradLoc bisects with edited loss masks instead). The
    model needs an output embedding, a module named in `tap`, or `stabilizer.token_gate` in its loss.

    Args:
        trigger_ratio: A norm over this many times the threshold in use (that of the clips beside it, or of `rule`)
            starts a search; so does a gradient that is not finite.
        rule: How thresholds follow the norms where no clip keeps any; see `LayerClipCallback`. Default "robust_log".
        warmup_steps: Steps before the first search for a norm.
        max_probes: Largest number of passes (backward passes of one micro-batch) of a search.
        max_seconds: Longest search; `None` for no limit.
        cooldown_steps: Steps after a search without another one.
        reproduce_tol: A replay whose norm differs by more than this part is none: hardware, or code that differs from
            run to run.
        on_found: "report" changes nothing; "drop_tokens" goes on with the gradient of all other tokens; "skip_step"
            skips the step.
        position_map: Whether to keep the map of gradients over layers and positions: "auto" where the tokens alone do
            not explain the spike, "always", or "never".
        tap: Name of the module whose output is gated; default the output embedding.
        tokenizer: Something with `decode`, to show text. Without it no text leaves the model.
        dump_dir: Folder for incidents; default `incidents` in the logger's folder.
        dump_batch: Whether to save the micro-batch too.
        max_incidents: Largest number of incidents in the folder.
        max_dump_mb: Largest size of the folder, in MB.
        redact: Keys of the batch that are never saved.
        every_n_steps: Interval of the search for spikes, in optimizer steps.
        layers: Which layers can start a search; see `StabilizerCallback`. The total always can.
        exclude: Which layers not.
        granularity: What a layer is.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> GradLocCallback(trigger_ratio=5.0).on_found
        'report'
    """

    order = Order.LOCALIZE
    is_gated = False
    localizes = True
    needs_loss = False
    history = 256

    def __init__(
        self,
        *,
        trigger_ratio: float = 3.0,
        rule: RuleSpec | None = None,
        warmup_steps: int = 50,
        max_probes: int = 16,
        max_seconds: float | None = None,
        cooldown_steps: int = 100,
        reproduce_tol: float = 0.01,
        on_found: OnFound = "report",
        position_map: PositionMap = "auto",
        tap: str | None = None,
        tokenizer: Any = None,
        dump_dir: str | None = None,
        dump_batch: bool = False,
        max_incidents: int = 20,
        max_dump_mb: float = 256,
        redact: Sequence[str] = (),
        every_n_steps: int = 1,
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
        check_choice("on_found", on_found, ("report", "drop_tokens", "skip_step"))
        check_choice("position_map", position_map, ("auto", "always", "never"))
        self.trigger_ratio = check_number("trigger_ratio", trigger_ratio, above=1)
        self.rule = rule
        make_rule(rule or "robust_log")  # a bad one is an error here
        self.warmup_steps = check_interval("warmup_steps", warmup_steps, minimum=0)
        self.max_probes = check_whole("max_probes", max_probes, low=2)
        self.max_seconds = None if max_seconds is None else check_number("max_seconds", max_seconds, above=0)
        self.cooldown_steps = check_interval("cooldown_steps", cooldown_steps, minimum=0)
        self.reproduce_tol = check_number("reproduce_tol", reproduce_tol, above=0)
        if isinstance(redact, str):
            raise ValueError(f"redact={redact!r}: expected a list, such as [{redact!r}]")
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer={tokenizer!r}: expected an object with decode(ids), as transformers' have")
        self.on_found, self.position_map, self.tap, self.tokenizer = on_found, position_map, tap, tokenizer
        self.may_skip = on_found == "skip_step"
        self.acts = on_found != "report"
        self.loss_weight: Weight = "auto"
        self.reports = IncidentReports(
            dump_dir,
            dump_batch=dump_batch,
            max_incidents=check_whole("max_incidents", max_incidents, low=1),
            max_dump_mb=check_number("max_dump_mb", max_dump_mb, above=0),
            redact=redact,
            position_map=position_map,
        )
        #: What was found in this run, oldest first.
        self.incidents: list[Incident] = []
        self._triggers: dict[int, Trigger] = {}
        self._seen: dict[int, Observation] = {}
        self._searched: dict[int, int] = {}
        self._asked: set[int] = set()  # optimizers whose next step somebody wants to have searched
        self._saved: dict[int, dict[str, Any]] = {}
        self._num_incidents = 0  # of the whole run, those before a checkpoint included

    def on_gradients(self, context: StepContext) -> None:
        """Hold the norms against what starts a search."""
        index = context.optimizer_index
        trigger, total, layers = self._trigger_of(context)
        norms = torch.cat([context.store.total_norm.reshape(1), context.select(context.store.norms)])
        weight = None if context.loss is None else context.loss.weight
        seen = trigger.look(norms, step=context.step, weight=weight, total=total, layers=layers)
        self._seen[index] = seen
        is_asked = index in self._asked
        spikes = (seen.excess > self._ratio(index)) & (seen.compared < torch.inf)
        if self._is_resting(context) and not is_asked:
            return
        flag = torch.zeros_like(context.is_bad) if context.is_scaled else context.is_bad
        if context.step >= self.warmup_steps or is_asked:
            # An overflow is the scaler's business, whatever layers it leaves finite.
            flag = flag | (spikes.any() & ~(context.is_bad & context.is_scaled))
        context.plan.search(flag)

    def localize(self, context: StepContext, steps: StepReplay) -> bool:
        """Search the step; on every rank."""
        index, seen = context.optimizer_index, self._seen[context.optimizer_index]
        worst = seen.worst(self._ratio(index))
        if steps.replayer is None:
            self.console.tell(spike_notice(context.step, index, source=self.state_key))
            return False
        tap, layers, scale = steps.tap(self.tap), context.store.layer_names, steps.grad_scale
        parts = part_norms(steps.store, layers=layers, granularity=self.granularity, grad_scale=scale)
        result = steps.localizer(tap).run(
            seen.suspicion(worst, layer_names=layers, unit_layers=context.store.unit_layers),
            max_passes=self.max_probes,
            max_seconds=self.max_seconds,
            tolerance=self.reproduce_tol,
            rebuilds=self.on_found == "drop_tokens",
            grad_scale=scale,
            tokenizer=self.tokenizer,
            redact=self.reports.redact,
        )
        result.parts = parts
        self._num_incidents += 1
        # A search that could not run is tried again sooner.
        rest = self.cooldown_steps if result.num_passes else min(self.cooldown_steps, _RETRY_STEPS)
        self._searched[index] = context.step + rest - self.cooldown_steps
        if self.on_found == "skip_step" and result.findings:
            context.plan.skip(torch.ones_like(context.is_bad))
        incident = try_incident(context, seen, worst=worst, result=result, tap=tap, on_found=self.on_found)
        self.incidents += [] if incident is None else [incident]
        # A collective, whatever this rank can tell.
        self.reports.write(self, context, steps, incident, result)
        return result.is_rebuilt

    def request_search(self, optimizer_index: int = 0) -> bool:
        """Have the next step searched if any norm is over its threshold, whatever the ratio and the cooldown."""
        self._asked.add(optimizer_index)
        return True

    def on_step_end(self, context: StepContext) -> None:
        """Let the norms enter the history, and log."""
        index, outcome = context.optimizer_index, context.outcome
        seen = self._seen.pop(index, None)
        asked, self._asked = self._asked, self._asked - {index}
        if seen is None or outcome is None:
            return
        self._triggers[index].update(seen, valid=~(outcome.overflowed | outcome.skipped | context.is_bad))
        if self.incidents and ((last := self.incidents[-1]).step, last.optimizer_index) == (context.step, index):
            context.log(tags.GRADLOC_INCIDENTS, float(self._num_incidents))
            context.log(tags.GRADLOC_PASSES, float(last.num_passes))
            context.log(tags.GRADLOC_SECONDS, last.seconds)
        elif index in asked:
            logger.info("%s: asked to look at step %d: no norm is over its threshold", self.state_key, context.step)

    def detach_view(self, optimizer_index: int) -> None:
        """Keep what was learned, on the CPU."""
        trigger = self._triggers.pop(optimizer_index, None)
        if trigger is not None:
            self._saved[optimizer_index] = trigger.state_dict()
        self._seen.pop(optimizer_index, None)
        super().detach_view(optimizer_index)

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        names = ("trigger_ratio", "warmup_steps", "cooldown_steps", "on_found")
        rule = make_rule(self.rule or "robust_log").describe()
        return {**super().hyperparameters(), "rule": rule, **{name: getattr(self, name) for name in names}}

    def extra_state(self) -> dict[str, Any]:
        """Thresholds of its own, usual numbers of tokens, and when it has searched last."""
        found = {**self._saved, **{index: trigger.state_dict() for index, trigger in self._triggers.items()}}
        searched = {str(index): step for index, step in self._searched.items()}
        own = {"searched": searched, "asked": sorted(self._asked), "num_incidents": self._num_incidents}
        return {"triggers": {str(index): found[index] for index in sorted(found)}, **own}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the layers are known."""
        self._triggers.clear()
        self._saved = {int(index): saved for index, saved in state["triggers"].items()}
        self._searched = {int(index): int(step) for index, step in state["searched"].items()}
        self._asked = set(state.get("asked", ()))
        self._num_incidents = int(state["num_incidents"])

    def charts(self) -> list[Chart]:
        """Incidents."""
        return [incident_chart(tags.GRADLOC_INCIDENTS)]

    def check_model(self, model: Any) -> None:
        """Raise for a `tap` that the model does not have."""
        find_tap(model, self.tap)

    def limitations(self, setting: Any) -> list[str]:
        """Where the gate would not stand as one expects, and where the host waits."""
        return search_limitations(setting.model, tap=self.tap)

    def _ratio(self, index: int) -> float:
        return 1.0 if index in self._asked else self.trigger_ratio

    def _is_resting(self, context: StepContext) -> bool:
        """Whether this step is not looked at; the same on every rank."""
        last = self._searched.get(context.optimizer_index)
        is_resting = last is not None and context.step - last <= self.cooldown_steps
        return is_resting or bool(context.step % self.every_n_steps) or self.reports.is_full(self, self._num_incidents)

    def _trigger_of(self, context: StepContext) -> tuple[Trigger, Limits | None, Limits | None]:
        """The trigger of an optimizer, and what the clips beside this callback hold the norms against."""
        index, names = context.optimizer_index, tuple(context.selected_names)
        total, layers = limits_beside(self, context) if self.rule is None else (None, None)
        trigger = self._triggers.get(index)
        if trigger is None or trigger.names[1:] != names:
            saved = self._saved.pop(index, None) if trigger is None else trigger.state_dict()
            trigger = Trigger(
                names,
                rule=self.rule or "robust_log",
                owns_total=total is None,
                owns_layers=layers is None,
                device=context.store.norms.device,
            )
            if saved is not None:
                trigger.load_state_dict(saved)
            self._triggers[index] = trigger
        return trigger, total, layers

    def __getstate__(self) -> dict[str, Any]:
        saved = {int(index): state for index, state in self.extra_state()["triggers"].items()}
        return {**super().__getstate__(), "_saved": saved, "_triggers": {}, "_seen": {}}
