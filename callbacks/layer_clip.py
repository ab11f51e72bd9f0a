"""LayerClipCallback: each layer's gradient against a threshold of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.base import Order
from stabilizer.callbacks.charts import Chart, ChartPage, SharedTitle, skip_chart
from stabilizer.callbacks.clip_memory import Spikes
from stabilizer.callbacks.clipping import ClipCallback, Mode, OnNonfinite, OnSpike
from stabilizer.callbacks.context import StepContext
from stabilizer.errors import warn
from stabilizer.names import Granularity, matching
from stabilizer.thresholds import RuleSpec
from stabilizer.thresholds.arguments import check_number

__all__ = ["LayerClipCallback"]

_REMINDER_STEPS = 500

_RATES = "Share of steps clipped, by layer: watch for one layer alone"
_COEFFICIENTS = "Coefficient by layer: 1 is not clipped, 0.1 left a tenth"


class LayerClipCallback(ClipCallback):
    """Clips each layer's gradient to a threshold that follows the layer's own history.

    One layer's explosion shrinks that layer alone: the gradients of all others stay as they are, bit for bit. A layer
    whose norm g is over its threshold t is multiplied by t / g. Runs before `AdaptiveClipThreshold`, whatever the order
    in the list.

    Args:
        rule: How thresholds follow the norms: a name ("robust_log", "mean_multiple", "quantile", "zscore", "fixed"), a
            mapping with the name and the rule's arguments, or `{class_path, init_args}` for a rule of your own.
        rules: Layer name, or regular expression that matches a whole name -> rule of these layers.
        min_norm: Smallest threshold, in units of the gradient norm: below it nothing is clipped.
        warmup_cap: Threshold of layers that have none yet; `None` leaves these alone.
        clip_value: Layer name or expression -> largest absolute value of an element, applied after all else. It turns
            the direction of the step, and warns of that.
        mode: "act", or "observe": log what would be clipped and change nothing.
        on_spike: What to do with a layer over its threshold: "clip", "zero_layer", "skip_step", "raise" or "ignore".
        on_nonfinite: What to do when any gradient of the model is not finite: "skip_step", "zero_layer" (its layer),
            "raise" or "ignore". Under a gradient scaler it is the scaler that skips.
        max_consecutive_skips: More skipped steps in a row than this end the run with an error.
        every_n_steps: Interval of what is logged, in optimizer steps; clipping looks at every step.
        layers: Which layers: block numbers, names or regular expressions; `None` means all.
        exclude: Which layers not.
        granularity: What a layer is: "block", "module", "parameter", or a mapping of regular expression -> layer name.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> callback = LayerClipCallback(rule={"name": "robust_log", "k": 4.0}, rules={r".*head": "mean_multiple"})
        >>> callback.mode
        'act'
    """

    order = Order.CLIP_LAYERS

    def __init__(
        self,
        *,
        rule: RuleSpec = "robust_log",
        rules: Mapping[str, RuleSpec] | None = None,
        min_norm: float = 0.0,
        warmup_cap: float | None = None,
        clip_value: Mapping[str, float] | None = None,
        mode: Mode = "act",
        on_spike: OnSpike = "clip",
        on_nonfinite: OnNonfinite = "skip_step",
        max_consecutive_skips: int = 50,
        every_n_steps: int = 10,
        layers: list[int | str] | None = None,
        exclude: Sequence[str] = (),
        granularity: Granularity = "block",
        name: str = "",
        strict: bool = False,
    ) -> None:
        super().__init__(
            rule=rule,
            rules=rules,
            min_norm=min_norm,
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
        self.clip_value = None if clip_value is None else _checked_values(clip_value)
        self.clips_values = mode == "act" and self.clip_value is not None
        self.acts, self.clips = self.acts or self.clips_values, self.clips or self.clips_values

    def choose(self, names: Sequence[str]) -> frozenset[str]:
        """Layers that are left, with a look at the patterns of `rules` and `clip_value`."""
        chosen = super().choose(names)
        for argument, patterns in (("rules", self.rules), ("clip_value", self.clip_value)):
            for pattern in patterns or ():
                matching(sorted(chosen), pattern, argument=argument)
        return chosen

    def names_of(self, context: StepContext) -> list[str]:
        """The selected layers."""
        return context.selected_names

    def norms_of(self, context: StepContext) -> Tensor:
        """Norms of the selected layers."""
        return context.select(context.plan.norms())

    def propose(self, context: StepContext, spikes: Spikes) -> None:
        """Clip the layers over their thresholds, or set them to zero."""
        if self.on_spike == "zero_layer":
            context.plan.zero_layers(context.spread(spikes.flags, fill=False))
        else:
            context.plan.clip_layers(context.spread(spikes.coefficients, fill=1.0))

    def on_gradients(self, context: StepContext) -> None:
        """Hold every layer's norm against its threshold."""
        super().on_gradients(context)
        if self.clips_values and self.clip_value is not None:
            self._clip_values(context, self.clip_value)

    def log_spikes(self, context: StepContext, spikes: Spikes, shares: Tensor) -> None:
        """Log thresholds, coefficients and shares by layer."""
        context.log_layers(tags.CLIP_LAYER_THRESHOLD, context.spread(spikes.limits, fill=torch.nan), finite_only=True)
        context.log_layers(tags.CLIP_LAYER_COEFFICIENT, context.spread(spikes.coefficients, fill=torch.nan))
        context.log_layers(tags.CLIP_LAYER_RATE, context.spread(shares, fill=torch.nan))
        context.log(tags.CLIP_LAYER_RATE, shares.mean())
        if self.logs_norms():
            context.log_layers(tags.GRAD_NORM_LAYER, context.store.norms)
            if context.after is not None:
                context.log_layers(tags.GRAD_NORM_LAYER_AFTER, context.after.norms, finite_only=True)

    def charts(self) -> list[Chart]:
        """Norms and thresholds of all layers, how often and how far each was clipped, and skips."""
        return [
            Chart(ChartPage.NORMS, SharedTitle.LAYER_NORMS, lines=(f"{tags.GRAD_NORM_LAYER}/.*",)),
            Chart(ChartPage.NORMS, "Threshold by layer: follows its norm", lines=(f"{tags.CLIP_LAYER_THRESHOLD}/.*",)),
            Chart(ChartPage.CLIPPING, SharedTitle.RATES, lines=(tags.CLIP_LAYER_RATE,)),
            Chart(ChartPage.CLIPPING, _RATES, lines=(f"{tags.CLIP_LAYER_RATE}/.*",)),
            Chart(ChartPage.CLIPPING, _COEFFICIENTS, lines=(f"{tags.CLIP_LAYER_COEFFICIENT}/.*",)),
            *([skip_chart()] if self.acts else []),
        ]

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        return {**super().hyperparameters(), "clip_value": None if self.clip_value is None else dict(self.clip_value)}

    def _clip_values(self, context: StepContext, clip_value: Mapping[str, float]) -> None:
        limits = {
            name: value for pattern, value in clip_value.items() for name in matching(context.selected_names, pattern)
        }
        context.plan.clip_values(limits)
        if context.step in (0, _REMINDER_STEPS):
            again = " is still on: it" if context.step else ""
            warn(
                f"{self.state_key}: clip_value={dict(clip_value)}{again} cuts single elements, which turns the "
                "direction of the step; use it to find a fault, and a threshold on the layer's norm to train"
            )


def _checked_values(clip_value: Any) -> dict[str, float]:
    if not isinstance(clip_value, Mapping) or not clip_value:
        raise ValueError(
            f'clip_value={clip_value!r}: expected a mapping of layer to value, as in {{"lm_head": 0.1}}; None is off'
        )
    return {pattern: check_number(f"clip_value[{pattern!r}]", value, above=0) for pattern, value in clip_value.items()}
