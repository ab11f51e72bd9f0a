"""AdaptiveClipThreshold: the total gradient norm against a threshold that follows the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.base import Order
from stabilizer.callbacks.charts import Chart, ChartPage, SharedTitle, skip_chart
from stabilizer.callbacks.clip_memory import Spikes
from stabilizer.callbacks.clipping import ClipCallback, Mode, OnNonfinite, OnSpike
from stabilizer.callbacks.context import StepContext
from stabilizer.names import Granularity
from stabilizer.thresholds import RuleSpec

__all__ = ["AdaptiveClipThreshold"]

# A total scatters less than its layers and is clipped for all of them: only what is far above the usual is.
_MIN_RATIO = 3.0


class AdaptiveClipThreshold(ClipCallback):
    """Clips all gradients together, by a threshold on their total norm that follows its history.

    The total is the one that is left after `LayerClipCallback`; its history is of that. All gradients are multiplied by
    threshold / total, so that they keep their direction.

    Args:
        rule: How the threshold follows the norm: a name ("robust_log", "mean_multiple", "quantile", "zscore", "fixed"),
            a mapping with the name and the rule's arguments, or `{class_path, init_args}` for a rule of your own.
            "robust_log" has `min_ratio=3` here unless you say otherwise: no threshold under 3 times the median.
        max_threshold: Largest threshold, in units of the gradient norm.
        warmup_cap: Threshold until the rule has one; `None` clips nothing until then.
        mode: "act", or "observe": log what would be clipped and change nothing.
        on_spike: What to do with a total over the threshold: "clip", "skip_step", "raise" or "ignore".
        on_nonfinite: What to do when any gradient is not finite: "skip_step", "zero_layer" (its layer), "raise" or
            "ignore". Under a gradient scaler it is the scaler that skips.
        max_consecutive_skips: More skipped steps in a row than this end the run with an error.
        every_n_steps: Interval of what is logged, in optimizer steps; clipping looks at every step.
        layers: Of no use here: the total is that of all layers.
        exclude: Of no use here.
        granularity: What a layer is, for `on_nonfinite="zero_layer"`.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> AdaptiveClipThreshold(rule={"name": "fixed", "threshold": 1.0}).state_key
        'AdaptiveClipThreshold'
    """

    order = Order.CLIP_TOTAL

    def __init__(
        self,
        *,
        rule: RuleSpec = "robust_log",
        max_threshold: float | None = None,
        warmup_cap: float | None = 1.0,
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
        if on_spike == "zero_layer":
            raise ValueError(
                'on_spike="zero_layer": the total belongs to no layer; allowed are clip, skip_step, raise and ignore '
                "(LayerClipCallback zeroes layers)"
            )
        super().__init__(
            rule=_with_floor(rule),
            max_threshold=max_threshold,
            warmup_cap=warmup_cap,
            mode=mode,
            on_spike=on_spike,
            on_nonfinite=on_nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            every_n_steps=every_n_steps,
            layers=layers,
            exclude=exclude,
            granularity=granularity,
            name=name,
            strict=strict,
        )

    def names_of(self, context: StepContext) -> list[str]:
        """The total alone."""
        return ["total"]

    def norms_of(self, context: StepContext) -> Tensor:
        """The total that the clips of layers leave."""
        return context.plan.total_norm().reshape(1)

    def propose(self, context: StepContext, spikes: Spikes) -> None:
        """Clip all gradients."""
        context.plan.clip_total(spikes.coefficients[0])

    def log_spikes(self, context: StepContext, spikes: Spikes, shares: Tensor) -> None:
        """Log threshold, coefficient and share."""
        context.log(tags.CLIP_TOTAL_THRESHOLD, spikes.limits, finite_only=True)
        context.log(tags.CLIP_TOTAL_COEFFICIENT, spikes.coefficients)
        context.log(tags.CLIP_TOTAL_RATE, shares)
        if self.logs_norms():
            context.log(tags.GRAD_NORM_TOTAL, context.store.total_norm)
            if context.after is not None:
                context.log(tags.GRAD_NORM_TOTAL_AFTER, context.after.total_norm, finite_only=True)

    def limitations(self, setting: Any) -> list[str]:
        """Arguments that mean nothing here."""
        found = super().limitations(setting)
        if self.layers is not None or self.exclude:
            found.append("layers and exclude have no effect: the total is that of all layers")
        if self.max_threshold is not None and self.warmup_cap is not None and self.warmup_cap > self.max_threshold:
            found.append(f"warmup_cap={self.warmup_cap} has no effect: max_threshold={self.max_threshold} is smaller")
        return found

    def charts(self) -> list[Chart]:
        """The threshold beside the total, how often and how far the total was clipped, and skips."""
        norms = (f"{tags.GRAD_NORM_TOTAL}(_after)?", tags.CLIP_TOTAL_THRESHOLD)
        title = "Coefficient of the total, after the clip of layers: 1 is not clipped, 0.1 left a tenth"
        return [
            Chart(ChartPage.NORMS, SharedTitle.TOTAL_NORM, lines=norms),
            Chart(ChartPage.CLIPPING, SharedTitle.RATES, lines=(tags.CLIP_TOTAL_RATE,)),
            Chart(ChartPage.CLIPPING, title, lines=(tags.CLIP_TOTAL_COEFFICIENT,)),
            *([skip_chart()] if self.acts else []),
        ]


def _with_floor(rule: RuleSpec) -> RuleSpec:
    if rule == "robust_log":
        return {"name": "robust_log", "min_ratio": _MIN_RATIO}
    if isinstance(rule, Mapping) and rule.get("name") == "robust_log":
        return {"min_ratio": _MIN_RATIO, **rule}
    return rule
