"""EarlyWarningCallback: the chain from the noise scale to the loss, as one number and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.base import Order, StabilizerCallback
from stabilizer.callbacks.charts import Chart, ChartPage
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.grad_noise_scale import GradNoiseScaleCallback
from stabilizer.callbacks.incoming import Incoming
from stabilizer.callbacks.loss_mean_var import LossMeanVarCallback
from stabilizer.callbacks.notices import logged, warning_notice
from stabilizer.early_warning import EarlyWarning, WarningSign
from stabilizer.markdown import note
from stabilizer.names import Granularity
from stabilizer.thresholds.arguments import check_whole

__all__ = ["EarlyWarningCallback"]

_CHANNELS = ("noise_scale", "variance")
# Kinds of alarm that mean that the loss itself has gone up.
_LOSS_KINDS = ("jump", "drift", "nonfinite")


class EarlyWarningCallback(StabilizerCallback):
    """Says when noise scale, scatter of the loss or a layer's norm leave what is usual, and what came first.

    It reads what the callbacks beside it have found: `GradNoiseScaleCallback` the noise scale, `LossMeanVarCallback`
    the standard deviation over its short window and its alarms; norms it has itself. What nobody measures is left out.
    It changes nothing. How long before a spike each rises, and how often for nothing, is in
    docs/callbacks/early_warning.md: read it before you rely on it.

    Args:
        every_n_steps: Interval of a look, in optimizer steps.
        thresholds: Of `EarlyWarning`: ln of how many times its usual value a channel may reach in a healthy run.
        horizon_steps: How many steps an alarm of the loss counts.
        layers: Which layers' norms count; see `StabilizerCallback`.
        exclude: Which layers not.
        granularity: What a layer is.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> EarlyWarningCallback(thresholds={"noise_scale": 0.7}).thresholds["noise_scale"]
        0.7
    """

    order = Order.WARN

    def __init__(
        self,
        *,
        every_n_steps: int = 10,
        thresholds: dict[str, float] | None = None,
        horizon_steps: int = 300,
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
        self.horizon_steps = check_whole("horizon_steps", horizon_steps, low=1)
        self.thresholds = self._new_warning(thresholds).thresholds
        self._warnings: dict[int, EarlyWarning] = {}
        self._incoming: dict[int, Incoming[tuple[str, ...]]] = {}
        #: The last sign of every optimizer.
        self.signs: dict[int, WarningSign] = {}

    def on_step_end(self, context: StepContext) -> None:
        """Send the numbers on their way, and look at those that have come."""
        index = context.optimizer_index
        values = [value.to(torch.float32).reshape(1) for value in self._values(context)]
        norms = context.select(context.store.norms)
        incoming = self._incoming.setdefault(index, Incoming())
        incoming.push(context.step, torch.cat([*values, norms]), tuple(context.selected_names))
        self._look(index, context=context)

    def excesses(self, optimizer_index: int = 0) -> dict[str, float]:
        """See `EarlyWarning.excesses`; empty before the first look.

        Args:
            optimizer_index: Position of the optimizer.
        """
        warning = self._warnings.get(optimizer_index)
        return {} if warning is None else warning.excesses()

    def charts(self) -> list[Chart]:
        """The level."""
        title = "Warning level: 1 one sign, 2 several, 3 the loss alarm"
        return [Chart(ChartPage.ALARMS, title, lines=(tags.WARNING_LEVEL,))]

    def limitations(self, setting: Any) -> list[str]:
        """Channels that nobody measures."""
        wanted = {GradNoiseScaleCallback: "the noise scale", LossMeanVarCallback: "the loss and its scatter"}
        missing = {
            kind: what for kind, what in wanted.items() if not any(isinstance(c, kind) for c in setting.callbacks)
        }
        return [f"does not see {what}: add {kind.__name__}" for kind, what in missing.items()]

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        return {**super().hyperparameters(), "thresholds": self.thresholds, "horizon_steps": self.horizon_steps}

    def extra_state(self) -> dict[str, Any]:
        """What is usual in every channel."""
        for index in self._incoming:
            self._look(index, waits=True)
        return {"warnings": {str(index): warning.state_dict() for index, warning in self._warnings.items()}}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._incoming.clear()
        self._warnings = {int(index): self._new_warning(self.thresholds) for index in state["warnings"]}
        for index, warning in self._warnings.items():
            warning.load_state_dict(state["warnings"][str(index)])

    def _new_warning(self, thresholds: Mapping[str, float] | None) -> EarlyWarning:
        return EarlyWarning(thresholds=thresholds, horizon_steps=self.horizon_steps)

    def _values(self, context: StepContext) -> list[Tensor]:
        """Noise scale and standard deviation of the loss; NaN where it is not known."""
        unknown = torch.full_like(context.store.total_norm, torch.nan)
        noise, losses = self._beside(GradNoiseScaleCallback), self._beside(LossMeanVarCallback)
        scale = None if noise is None else noise.latest(context.optimizer_index)
        scatter = None if losses is None else losses.latest_std(context.optimizer_index)
        return [
            unknown if scale is None else scale,
            unknown if scatter is None else scatter.to(unknown.device),
        ]

    def _beside(self, kind: type[Any]) -> Any:
        others = () if self.driver is None else self.driver.callbacks
        return next((other for other in others if isinstance(other, kind) and not other.has_failed), None)

    def _look(self, index: int, *, context: StepContext | None = None, waits: bool = False) -> None:
        losses = self._beside(LossMeanVarCallback)
        alarms = [] if losses is None else [one for one in losses.alarms if one.kind in _LOSS_KINDS]
        mine = [one.step for one in alarms if one.optimizer_index == index]
        for arrived in self._incoming[index].arrived(waits=waits):
            if index not in self._warnings:
                self._warnings[index] = self._new_warning(self.thresholds)
            seen = [step for step in mine if step <= arrived.step]
            values = dict(zip(_CHANNELS, arrived.numbers, strict=False))
            norms = dict(zip(arrived.extra, arrived.numbers[len(_CHANNELS) :], strict=True))
            sign = self._warnings[index].update(arrived.step, values, layers=norms, alarm_step=max(seen, default=None))
            before = self.signs.get(index)
            self.signs[index] = sign
            if context is not None:
                self._tell(context, sign, before)

    def _tell(self, context: StepContext, sign: WarningSign, before: WarningSign | None) -> None:
        context.log(tags.WARNING_LEVEL, float(sign.level))
        if sign.level > (0 if before is None else before.level):
            more = logged(context, tags.WARNING_TEXT)
            self.console.tell(warning_notice(sign, self.state_key, context=context, more=more))
            context.write_text(tags.WARNING_TEXT, note(f"Level {sign.level}", f"{sign.text}."))

    def __getstate__(self) -> dict[str, Any]:
        for index in self._incoming:
            self._look(index, waits=True)
        return {**super().__getstate__(), "_incoming": {}}
