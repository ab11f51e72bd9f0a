"""ClipCallback: what LayerClipCallback and AdaptiveClipThreshold have in common."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.checks import check_choice, check_interval
from stabilizer.callbacks.clip_advice import ClipAdvice, describe_skips, describe_spikes
from stabilizer.callbacks.clip_memory import ClipMemory, Spikes
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.trigger import Limits
from stabilizer.errors import TrainingStoppedError
from stabilizer.names import Granularity, matching
from stabilizer.thresholds import Fixed, LayerThresholds, RuleSpec, make_rule

__all__ = ["ClipCallback", "Mode", "OnNonfinite", "OnSpike"]

Mode: TypeAlias = Literal["act", "observe"]
OnSpike: TypeAlias = Literal["ignore", "clip", "zero_layer", "skip_step", "raise"]
OnNonfinite: TypeAlias = Literal["ignore", "zero_layer", "skip_step", "raise"]


class ClipCallback(StabilizerCallback):
    """Base of the callbacks that clip: thresholds that follow the run, what to do above them, and counting.

    A subclass says which norms it looks at and what it proposes. The arguments are described there.
    """

    is_gated = False
    history = 64
    names_nonfinite = True

    def __init__(
        self,
        *,
        rule: RuleSpec,
        rules: Mapping[str, RuleSpec] | None = None,
        min_norm: float = 0.0,
        warmup_cap: float | None = None,
        max_threshold: float | None = None,
        mode: Mode = "act",
        on_spike: OnSpike = "clip",
        on_nonfinite: OnNonfinite = "skip_step",
        max_consecutive_skips: int = 50,
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
        check_choice("mode", mode, ("act", "observe"))
        check_choice("on_spike", on_spike, ("ignore", "clip", "zero_layer", "skip_step", "raise"))
        check_choice("on_nonfinite", on_nonfinite, ("ignore", "zero_layer", "skip_step", "raise"))
        self.rule, self.rules = rule, None if rules is None else dict(rules)
        self.min_norm, self.warmup_cap, self.max_threshold = min_norm, warmup_cap, max_threshold
        self.mode, self.on_spike, self.on_nonfinite = mode, on_spike, on_nonfinite
        self.max_consecutive_skips = check_interval("max_consecutive_skips", max_consecutive_skips)
        self._make_thresholds(["layer"], rules={})  # a bad number is an error here, not at the first step
        self._described = {pattern: make_rule(spec).describe() for pattern, spec in (self.rules or {}).items()}
        verbs = (on_spike, on_nonfinite)
        self.acts = mode == "act" and verbs != ("ignore", "ignore")
        self.clips = mode == "act" and on_spike in ("clip", "zero_layer")
        self.may_skip, self.may_stop = self.acts and "skip_step" in verbs, self.acts and "raise" in verbs
        self.skips_nonfinite = self.acts and on_nonfinite == "skip_step"
        self.after_every_n_steps = [every_n_steps]
        self._clips: dict[int, ClipMemory] = {}
        self._saved: dict[int, dict[str, Any]] = {}
        self._spikes: dict[int, Spikes] = {}
        self._advice: dict[int, ClipAdvice] = {}

    @abc.abstractmethod
    def names_of(self, context: StepContext) -> list[str]:
        """What the norms are called that `norms_of` gives.

        Args:
            context: Of the step.
        """

    @abc.abstractmethod
    def norms_of(self, context: StepContext) -> Tensor:
        """The norms that have thresholds.

        Args:
            context: Of the step, with what was proposed so far.

        Returns:
            Shape (n,), float32.
        """

    @abc.abstractmethod
    def propose(self, context: StepContext, spikes: Spikes) -> None:
        """Put into the plan what `on_spike` says, except for skipping and raising.

        Args:
            context: Of the step.
            spikes: What was found.
        """

    @abc.abstractmethod
    def log_spikes(self, context: StepContext, spikes: Spikes, shares: Tensor) -> None:
        """Log a step that is done.

        Args:
            context: Of the step.
            spikes: What was found.
            shares: Of the last 1,000 steps in which each norm was over its threshold, shape (n,).
        """

    def on_gradients(self, context: StepContext) -> None:
        """Hold the norms against their thresholds and propose what is to happen."""
        if self.acts:
            self._guard(context)
        clip = self._clip_of(context)
        spikes = clip.find(self.norms_of(context), step=context.step)
        self._spikes[context.optimizer_index] = spikes
        if not self.acts:
            return
        if self.on_spike == "skip_step":
            context.plan.skip(spikes.flags.any())
        elif self.on_spike == "raise":
            context.plan.stop(
                spikes.flags.any(), lambda: describe_spikes(self.state_key, context.step, clip.names, spikes)
            )
        elif self.on_spike != "ignore":
            self.propose(context, spikes)

    def on_step_end(self, context: StepContext) -> None:
        """Let the norms enter the history, count, log, and end a run that does nothing but skip."""
        index, outcome = context.optimizer_index, context.outcome
        spikes = self._spikes.pop(index, None)
        if spikes is None or outcome is None:
            return
        clip = self._clips[index]
        # Of a step that is skipped for a spike, rules that keep spikes apart see the spike alone: a level that lasts is
        # accepted all the same.
        is_lost = outcome.overflowed | outcome.skipped
        spiked = spikes.flags & outcome.skipped & ~context.is_bad
        clip.thresholds.update(spikes.norms, valid=~is_lost, outliers=spiked)
        clip.rates.update(spikes.flags)
        clip.skips.update(outcome.skipped, outcome.overflowed)
        self._advice.setdefault(index, ClipAdvice(self.state_key)).see(context, clip, spikes)
        if context.step % self.every_n_steps == 0 or context.was_searched:
            self.log_spikes(context, self._as_done(spikes), clip.rates.shares)
            if self.acts:
                context.log(tags.SKIP_COUNT, clip.skips.count)
                context.log(tags.SKIP_CONSECUTIVE, clip.skips.consecutive)
                if context.is_scaled:
                    context.log(tags.SKIP_OVERFLOWS, clip.skips.overflows)
        if self.may_skip and (num := clip.skips.in_a_row(context.step)) > self.max_consecutive_skips:
            raise TrainingStoppedError(describe_skips(self.state_key, context, num, limit=self.max_consecutive_skips))

    def thresholds(self, optimizer_index: int = 0) -> dict[str, float]:
        """Thresholds in force for the next step; waits for the device.

        Args:
            optimizer_index: Position of the optimizer.

        Returns:
            By name; infinity where there is none yet; empty before the first step and when the run is over.
        """
        clip = self._clips.get(optimizer_index)
        if clip is None:
            return {}
        limits = clip.thresholds.thresholds(clip.thresholds.typical, step=self.next_step(optimizer_index))
        return dict(zip(clip.names, limits.tolist(), strict=True))

    def limits(self, optimizer_index: int) -> Limits | None:
        """What this step's norms are held against, after `on_gradients`; waits for nothing.

        Args:
            optimizer_index: Position of the optimizer.

        Returns:
            By the names of `names_of`, without caps of a warm-up; `None` if this callback has not looked at the step.
        """
        spikes, clip = self._spikes.get(optimizer_index), self._clips.get(optimizer_index)
        if spikes is None or clip is None:
            return None
        thresholds = torch.where(clip.thresholds.is_warm, spikes.limits, torch.inf)
        return Limits(type(self).__name__, thresholds, lambda: clip.thresholds.typical)

    def num_skipped(self, optimizer_index: int = 0) -> int:
        """How many steps were skipped, also when the run is over; waits for the device.

        Args:
            optimizer_index: Position of the optimizer.
        """
        clip, saved = self._clips.get(optimizer_index), self._saved.get(optimizer_index)
        if clip is not None:
            return int(clip.skips.count)
        return 0 if saved is None else int(saved["skips"]["count"])

    def summary(self, optimizer_index: int) -> list[tuple[str, str]]:
        """Shares of clipped steps, the worst layers first; waits for the device."""
        clip = self._clips.get(optimizer_index)
        return [] if clip is None else clip.summary(self.state_key, verb="clipped" if self.clips else "over")

    def logs_norms(self) -> bool:
        """Whether nobody else of this name logs norms."""
        others = () if self.driver is None else self.driver.callbacks
        return not any(type(other).__name__ == "GradNormCallback" and other.name == self.name for other in others)

    def detach_view(self, optimizer_index: int) -> None:
        """Keep what was learned, on the CPU."""
        clip = self._clips.pop(optimizer_index, None)
        super().detach_view(optimizer_index)
        self._spikes.pop(optimizer_index, None)
        self._advice.pop(optimizer_index, None)
        if clip is not None:
            self._saved[optimizer_index] = clip.state_dict()

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers; rules by their description."""
        names = ("min_norm", "warmup_cap", "max_threshold", "mode", "on_spike", "on_nonfinite", "max_consecutive_skips")
        rule = make_rule(self.rule).describe()
        own = {name: getattr(self, name) for name in names}
        return {**super().hyperparameters(), "rule": rule, "rules": dict(self._described), **own}

    def extra_state(self) -> dict[str, Any]:
        """Thresholds, counts and shares of every optimizer."""
        live = {index: clip.state_dict() for index, clip in self._clips.items()}
        found = {**self._saved, **live}
        return {"clips": {str(index): found[index] for index in sorted(found)}}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the layers are known."""
        for known in (self._clips, self._spikes, self._advice):
            known.clear()
        self._saved = {int(index): saved for index, saved in state["clips"].items()}

    def _as_done(self, spikes: Spikes) -> Spikes:
        """With the coefficients that were, or in "observe" would have been, multiplied with."""
        if self.on_spike == "clip":
            return spikes
        factor = 0.0 if self.on_spike == "zero_layer" else 1.0
        return dataclasses.replace(spikes, coefficients=torch.where(spikes.flags, factor, 1.0))

    def _guard(self, context: StepContext) -> None:
        """Propose what `on_nonfinite` says, but for skipping, which the suite does by itself.

        Under a gradient scaler such a step is the scaler's business.
        """
        if context.is_scaled:
            return
        if self.on_nonfinite == "zero_layer":
            context.plan.zero_layers(context.store.nonfinite)
        elif self.on_nonfinite == "raise":
            context.plan.stop(context.is_bad, lambda: f"step {context.step}: the gradient is not finite")

    def _clip_of(self, context: StepContext) -> ClipMemory:
        index, names = context.optimizer_index, tuple(self.names_of(context))
        clip = self._clips.get(index)
        if clip is None or clip.names != names:
            saved = self._saved.pop(index, None) if clip is None else clip.state_dict()
            device = context.store.norms.device
            # Patterns of another optimizer's layers are no mistake; `choose` has looked at all of them.
            rules = {pattern: spec for pattern, spec in (self.rules or {}).items() if matching(names, pattern)}
            clip = ClipMemory(names, self._make_thresholds(names, rules=rules, device=device), device=device)
            if saved is not None:
                clip.load_state_dict(saved)
            self._clips[index] = clip
            if context.run is not None:
                fixed = [rule for rule, _ in clip.thresholds.parts if isinstance(rule, Fixed)]
                context.run.check(rule.calibrated_for for rule in fixed)
        return clip

    def _make_thresholds(
        self, names: Sequence[str], *, rules: Mapping[str, RuleSpec] | None, device: torch.device | str = "cpu"
    ) -> LayerThresholds:
        return LayerThresholds(
            names,
            rule=self.rule,
            rules=rules,
            min_norm=self.min_norm,
            warmup_cap=self.warmup_cap,
            max_threshold=self.max_threshold,
            device=device,
        )

    def __getstate__(self) -> dict[str, Any]:
        saved = {int(index): state for index, state in self.extra_state()["clips"].items()}
        return {**super().__getstate__(), "_saved": saved, "_clips": {}, "_spikes": {}, "_advice": {}}
