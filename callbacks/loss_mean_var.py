"""LossMeanVarCallback: where the loss is, how much it scatters, whether it falls; and what is done when it jumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.alarm_actions import AlarmAction
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.charts import Chart, ChartPage, alarm_chart
from stabilizer.callbacks.checks import check_interval
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.loss_alarms import LossAlarm
from stabilizer.callbacks.loss_alerts import LossAlerts
from stabilizer.callbacks.loss_buffers import LossBuffer, merged, restored
from stabilizer.callbacks.nonfinite_losses import NonfiniteLosses
from stabilizer.losses import LossExtremes, means
from stabilizer.names import Granularity
from stabilizer.tally import Weight
from stabilizer.windows import WindowedStatistics

__all__ = ["LossMeanVarCallback"]

# Losses are put into the windows in one go, at least that often.
_MAX_BUFFERED = 64


class LossMeanVarCallback(StabilizerCallback):
    """Logs mean and standard deviation of the loss over windows, and its slope over the longest one.

    A step's loss is the mean over all micro-batches and ranks, each weighted by its tokens or samples. The slope is in
    loss per step, by least squares, with its standard error. Smallest and largest loss of a micro-batch are those since
    they were logged the last time, with the rank of the largest. A loss that is not finite is counted and told; its
    step enters no window.

    Every step's loss is watched for a jump, a drift upwards and a larger variance (`stabilizer.detectors.LossDetector`:
    how each works and what it costs in false alarms is in docs/callbacks/loss_mean_var.md). A falling loss never
    alarms. What is done then is `on_alarm`, on every rank at the same step: on a CPU at once, on an accelerator two
    steps later, when the loss has reached the host. With "log" and "record" alone nobody waits for it.

    Args:
        windows: How many steps the windows hold, at least 2 each.
        every_n_steps: Interval of what is logged, in optimizer steps.
        weight: What weighs a micro-batch: "tokens" (labels other than -100), "samples", or "auto": tokens if the batch
            has labels for every position, else samples.
        warmup_steps: First steps of a run, which are shown by their mean alone and alarm nobody (at least 50 for the
            detectors): so few losses, most of them from the first fall, say little. A loss that is not finite always
            does.
        cooldown_steps: Steps between two alarms of one kind; what happens between is counted.
        on_alarm: What to do, a list of "log" (warn, and write the text); "record" (a line of JSON in `path`, default
            `loss_alarms.jsonl` in the logger's folder); "save_checkpoint" (through the host, `max_saves` of a run, kept
            apart from others); "localize" (have GradLocCallback look at the next step); "lower_lr" (by `factor` for
            `num_steps`; no scheduler sees it); "stop" (raise `TrainingStoppedError`); and functions of a `LossAlarm`,
            called on every rank. One with arguments is a mapping: `{"name": "lower_lr", "factor": 0.1}`.
        jump_target: False alarms of one step in 10,000 that the limit of a jump is calibrated to on the run.
        drift_limit: Sigmas beyond the slack of 1 a step that add up to a drift.
        variance_limit: Ratio of the short window's variance to the long one's.
        layers: Of no use here: a loss belongs to no layer.
        exclude: Of no use here.
        granularity: Of no use here.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> LossMeanVarCallback(windows=(50, 500), weight="samples").windows
        (50, 500)
    """

    is_gated = False

    def __init__(
        self,
        *,
        windows: Sequence[int] = (100, 1000),
        every_n_steps: int = 10,
        weight: Weight = "auto",
        warmup_steps: int = 100,
        cooldown_steps: int = 100,
        on_alarm: Sequence[AlarmAction] = ("log",),
        jump_target: float = 0.2,
        drift_limit: float = 12.0,
        variance_limit: float = 2.5,
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
        if weight not in ("auto", "tokens", "samples"):
            raise ValueError(f'weight={weight!r}: allowed are "auto", "tokens" and "samples"')
        self.windows = WindowedStatistics(windows=windows).windows
        self.loss_weight = weight
        self.extremes_every_n_steps = self.every_n_steps
        self.warmup_steps = check_interval("warmup_steps", warmup_steps, minimum=0)
        self.cooldown_steps = check_interval("cooldown_steps", cooldown_steps, minimum=0)
        self.jump_target, self.drift_limit, self.variance_limit = jump_target, drift_limit, variance_limit
        self._alerts = LossAlerts(
            on_alarm,
            windows=self.windows,
            warmup_steps=self.warmup_steps,
            cooldown_steps=self.cooldown_steps,
            jump_target=jump_target,
            drift_limit=drift_limit,
            variance_limit=variance_limit,
        )
        self.on_alarm = self._alerts.actions.names
        if "record" in self.on_alarm:
            self.extremes_every_n_steps = 1  # to name the rank
        self.lowers_lr = "lower_lr" in self.on_alarm
        self._alarms: dict[int, NonfiniteLosses] = {}
        self._statistics: dict[int, WindowedStatistics] = {}
        self._num_nonfinite: dict[int, Tensor] = {}
        self._buffers: dict[int, LossBuffer] = {}
        self._extremes: dict[int, LossExtremes] = {}  # since they were logged the last time

    def on_gradients(self, context: StepContext) -> None:
        """Lower the learning rates while that lasts."""
        self._alerts.begin_step(context)

    def on_step_end(self, context: StepContext) -> None:
        """Keep this step's loss, now that it is a step, and log where it is due."""
        loss, index = context.loss, context.optimizer_index
        assert loss is not None  # `loss_weight` is set
        buffer = self._buffers.setdefault(index, LossBuffer())
        buffer.add(context, loss)
        if loss.extremes is not None:
            self._extremes[index] = merged(self._extremes.get(index), loss.extremes)
        is_due = context.step % self.every_n_steps == 0
        if is_due or len(buffer.steps) >= min(_MAX_BUFFERED, self.windows[0]):
            self._flush(index, context)
        if is_due:
            self._log(context)
        self._alerts.end_step(context, loss, owner=self)

    def on_run_end(self, context: StepContext) -> None:
        """Log what the last steps have added, and tell of alarms in them."""
        self._alerts.end_run(context, owner=self)
        if self._buffers.get(context.optimizer_index, LossBuffer()).steps:
            self._flush(context.optimizer_index, context)
            self._log(context)

    @property
    def alarms(self) -> Sequence[LossAlarm]:
        """The alarms of this run, the last 100 of them, oldest first."""
        return tuple(self._alerts.alarms)

    def latest_std(self, optimizer_index: int = 0) -> Tensor | None:
        """Standard deviation over the shortest window, shape (), on the device; `None` before the first step.

        Args:
            optimizer_index: Position of the optimizer.
        """
        found = self._statistics.get(optimizer_index)
        return None if found is None else found.compute()[f"std_{self.windows[0]}"]

    def statistics(self, optimizer_index: int = 0) -> dict[str, float]:
        """What the windows hold now; waits for the device.

        Args:
            optimizer_index: Position of the optimizer.

        Returns:
            `mean_<w>` and `std_<w>` of every window, `slope_<w>` and `slope_error_<w>` of the longest; empty before the
            first step.
        """
        self._flush(optimizer_index, None)
        found = self._statistics.get(optimizer_index)
        return {} if found is None else {name: float(value) for name, value in found.compute().items()}

    def limitations(self, setting: Any) -> list[str]:
        """Losses that nobody tells of, and arguments that mean nothing here."""
        found = []
        found += self._alerts.actions.missing(self.driver, setting.callbacks)
        if setting.host == "plain loop":
            found.append("sees only what handle.record_loss(loss) is given: loss.backward() cannot be watched")
        if self.layers is not None or self.exclude or self.granularity != "block":
            found.append("layers, exclude and granularity have no effect: a loss belongs to no layer")
        return found

    def charts(self) -> list[Chart]:
        """The mean of every window in a band of one standard deviation, and alarms."""
        bands = [
            Chart(
                ChartPage.WINDOWS,
                f"Loss, last {window} steps: mean and one standard deviation; watch for a wider band",
                band=tuple(tags.of_window(tag, window) for tag in (tags.LOSS_MEAN, tags.LOSS_LOWER, tags.LOSS_UPPER)),
            )
            for window in self.windows
        ]
        return [*bands, alarm_chart()]

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        names = ("warmup_steps", "cooldown_steps", "jump_target", "drift_limit", "variance_limit")
        own = {"windows": list(self.windows), "weight": self.loss_weight, "on_alarm": self._alerts.actions.specs}
        return {**super().hyperparameters(), **own, **{name: getattr(self, name) for name in names}}

    def extra_state(self) -> dict[str, Any]:
        """The windows of every optimizer."""
        for index in self._buffers:
            self._flush(index, None)
        return {
            "windows": {
                str(index): {name: value.detach().cpu().clone() for name, value in found.state_dict().items()}
                for index, found in self._statistics.items()
            },
            "nonfinite": {str(index): value.detach().cpu().clone() for index, value in self._num_nonfinite.items()},
            "extremes": {
                str(index): {name: value.detach().cpu().clone() for name, value in vars(found).items()}
                for index, found in self._extremes.items()
            },
            "alerts": self._alerts.state_dict(),
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take the windows back; windows of other lengths get as much as they hold."""
        self._buffers.clear()
        self._alarms.clear()  # what was said after the checkpoint has not been said of what comes now
        self._statistics = {}
        for index, saved in state["windows"].items():
            self._statistics[int(index)] = restored(saved, self.windows)
        self._num_nonfinite = {int(index): value.clone() for index, value in state["nonfinite"].items()}
        self._extremes = {int(index): LossExtremes(**saved) for index, saved in state.get("extremes", {}).items()}
        self._alerts.load_state_dict(state.get("alerts", {}))

    def _flush(self, index: int, context: StepContext | None) -> None:
        buffer = self._buffers.get(index)
        if buffer is None or not buffer.steps:
            return
        self._buffers[index] = LossBuffer()
        numbers = torch.stack([loss.numbers for loss in buffer.losses])
        counts, device = numbers[:, 2], numbers.device
        found = self._statistics.get(index)
        if found is None or found.values.device != device:
            found = self._statistics[index] = (found or WindowedStatistics(windows=self.windows)).to(device)
        first, last = buffer.steps[0], buffer.steps[-1]
        if last - first + 1 == len(buffer.steps):
            found.update(means(numbers), torch.arange(first, last + 1, device=device))
        else:
            for mean, step in zip(means(numbers), buffer.steps, strict=True):
                found.update(mean, step)
        before = self._num_nonfinite.get(index)
        self._num_nonfinite[index] = counts.sum() + (0 if before is None else before.to(device))
        if "log" in self.on_alarm and context is not None:
            by_rank = buffer.nonfinite_by_rank()
            alarm = self._alarms.setdefault(index, NonfiniteLosses(cooldown_steps=self.cooldown_steps))
            parts = [counts, numbers[:, 1], *([] if by_rank is None else [by_rank])]
            context.later(torch.cat(parts), alarm.reader(buffer.steps, buffer.batches, console=self.console))

    def _log(self, context: StepContext) -> None:
        index = context.optimizer_index
        values = self._statistics[index].compute()
        # Two losses have no slope with an error.
        is_warm = context.step >= max(self.warmup_steps, 2)
        for window in self.windows:
            mean, std = values[f"mean_{window}"], values[f"std_{window}"]
            # At the same steps as the mean, or TensorBoard draws no band: the first loss has one of no width.
            width = std.nan_to_num(0.0)
            context.log(tags.of_window(tags.LOSS_MEAN, window), mean)
            context.log(tags.of_window(tags.LOSS_LOWER, window), mean - width)
            context.log(tags.of_window(tags.LOSS_UPPER, window), mean + width)
            if is_warm:
                context.log(tags.of_window(tags.LOSS_STD, window), std)
        longest = self.windows[-1]
        if is_warm:
            context.log(tags.of_window(tags.LOSS_SLOPE, longest), values[f"slope_{longest}"])
            context.log(tags.of_window(tags.LOSS_SLOPE_ERROR, longest), values[f"slope_error_{longest}"])
        context.log(tags.LOSS_NONFINITE, self._num_nonfinite[index])
        extremes = self._extremes.pop(index, None)
        if extremes is not None:
            # Of losses that are not finite there is neither.
            context.log(tags.LOSS_MIN, extremes.minimum, finite_only=True)
            context.log(tags.LOSS_MAX, extremes.maximum, finite_only=True)
            context.log(tags.LOSS_MAX_RANK, extremes.max_rank)

    def __getstate__(self) -> dict[str, Any]:
        for index in list(self._buffers):
            self._flush(index, None)
        return super().__getstate__()
