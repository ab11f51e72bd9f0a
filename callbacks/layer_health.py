"""LayerHealthCallback: what the gradient norms of the layers, and the loss, say of a run."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.charts import Chart, ChartPage
from stabilizer.callbacks.checks import check_interval
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.layer_monitor import LayerMonitor
from stabilizer.callbacks.notices import finding_notice, logged
from stabilizer.errors import logger
from stabilizer.health import KINDS, Finding, FindingLog, Limits, describe, make_layout
from stabilizer.markdown import note
from stabilizer.names import Granularity, layer_names
from stabilizer.parameters import named_parameters
from stabilizer.reduction import rank
from stabilizer.tally import Weight
from stabilizer.view import LayerView

__all__ = ["LayerHealthCallback"]

_MIN_BLOCKS = 4


class LayerHealthCallback(StabilizerCallback):
    """Says what the gradient norms of the layers mean: what does not train, what exploded, and what to check next.

    At every `every_n_steps`-th step the last steps are examined on the device, and numbers go to the host, where a
    later step reads them; nothing waits, and training is never changed. `finding/<kind>` is logged at these steps: 0
    for none, 1 info, 2 warning, 3 alarm. A finding is told once (warnings and alarms as a warning, all as text in
    the loggers and in `findings`), and again after `cooldown_steps` or when it gets worse.

    Kinds: `exponential_decay` and `vanishing` with depth; `explosion_all`, `explosion_shallow`, `explosion_one` and
    `explosion_some` by the layers that are far over their usual norms at a step; `parts_apart`: attention and MLP of a
    block; `no_gradient`; `total_drift`; `loss_plateau`. docs/callbacks/layer_health.md has what each means.

    Args:
        every_n_steps: Steps between two examinations.
        window: Steps that medians and baselines are taken of.
        warmup_steps: First steps of a run, of which nothing is kept.
        cooldown_steps: Steps in which a kind of finding is not told again, unless it gets worse.
        decay_r_squared: Least R^2 of ln norm against block index, for a decay to be exponential.
        decay_half_depth: Half-depth of a decay under this share of the number of blocks is found.
        vanishing_warning: Norm of the deep blocks over that of the shallow ones, or the other way round, under which it
            is a warning.
        vanishing_alarm: The same for an alarm.
        explosion_ratio: Least norm over its usual value at which a layer explodes.
        explosion_k: Least distance of ln norm from its usual value there, in robust standard deviations.
        together_share: Share of the layers that must be raised for all to explode together.
        parts_ratio: How far a block's attention / MLP may be from that of the other blocks, as a factor.
        drift_ratio: Growth of the total norm from the first to the last window that is a drift, as a factor.
        drift_windows: Windows of the drift, one after another.
        loss_window: Steps of each of the two windows in which the loss should fall; `None` is off.
        plateau_errors: A loss falls if its slope is under minus so many standard errors.
        layers: Which layers: block numbers, names or regular expressions; `None` means all.
        exclude: Which layers not.
        granularity: What a layer is: "block", "module", "parameter", or a mapping of regular expression -> layer name.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> callback = LayerHealthCallback(window=100, exclude=["lm_head"])
        >>> callback.findings
        []
    """

    is_gated = False
    needs_loss = False
    more_granularities = ("module",)

    def __init__(
        self,
        *,
        every_n_steps: int = 50,
        window: int = 200,
        warmup_steps: int = 100,
        cooldown_steps: int = 1000,
        decay_r_squared: float = 0.8,
        decay_half_depth: float = 0.25,
        vanishing_warning: float = 0.1,
        vanishing_alarm: float = 0.01,
        explosion_ratio: float = 10.0,
        explosion_k: float = 6.0,
        together_share: float = 0.75,
        parts_ratio: float = 10.0,
        drift_ratio: float = 2.0,
        drift_windows: int = 4,
        loss_window: int | None = 1000,
        plateau_errors: float = 2.0,
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
        self.warmup_steps = check_interval("warmup_steps", warmup_steps, minimum=0)
        self.cooldown_steps = check_interval("cooldown_steps", cooldown_steps, minimum=0)
        self.limits = Limits(
            window=window,
            decay_r_squared=decay_r_squared,
            decay_half_depth=decay_half_depth,
            vanishing_warning=vanishing_warning,
            vanishing_alarm=vanishing_alarm,
            explosion_ratio=explosion_ratio,
            explosion_k=explosion_k,
            together_share=together_share,
            parts_ratio=parts_ratio,
            drift_ratio=drift_ratio,
            drift_windows=drift_windows,
            loss_window=loss_window,
            plateau_errors=plateau_errors,
        )
        self.loss_weight: Weight | None = None if loss_window is None else "auto"
        self._logs: dict[int, FindingLog] = {}
        self._module_views: dict[int, LayerView] = {}
        self._monitors: dict[int, LayerMonitor] = {}
        self._saved: dict[int, dict[str, Any]] = {}
        # Numbers on their way to the host, and the steps that they belong to.
        self._readings: deque[tuple[StepContext, Any]] = deque()

    @property
    def findings(self) -> list[Finding]:
        """Findings that were told, the last hundred of every optimizer, the same on every rank."""
        return [finding for index in sorted(self._logs) for finding in self._logs[index].findings]

    def on_step_end(self, context: StepContext) -> None:
        """Keep this step's norms, examine the last ones where it is due, and tell of what has been found before."""
        self._tell(before=context.step)
        monitor = self._monitor(context)
        if context.step >= self.warmup_steps:
            monitor.append(context)
        if context.step % self.every_n_steps:
            return
        reading = monitor.examine(context.step)
        levels = context.store.norms.new_zeros(len(KINDS)) if reading is None else reading.levels
        for number, kind in enumerate(KINDS):
            context.log(f"{tags.FINDING}/{kind}", levels[number])
        if reading is not None:
            self._readings.append((context, reading))

    def charts(self) -> list[Chart]:
        """Findings."""
        title = "Findings: 0 none, 1 info, 2 warning, 3 alarm"
        return [Chart(ChartPage.ALARMS, title, lines=(f"{tags.FINDING}/.*",))]

    def on_run_end(self, context: StepContext) -> None:
        """Tell of what has been found at the last steps."""
        self._tell(before=None)

    def limitations(self, setting: Any) -> list[str]:
        """Models without depth, and losses that nobody tells of."""
        found = []
        names = [name for parameter, name in named_parameters(setting.model) if parameter.requires_grad]
        layers = list(dict.fromkeys(layer_names(names, self.granularity)))
        num_blocks = len(make_layout(layers, modules=[]).blocks)
        if num_blocks < _MIN_BLOCKS:
            found.append(
                f"nothing of depth: {num_blocks} repeated blocks, exponential_decay and vanishing need {_MIN_BLOCKS}"
            )
        if self.limits.loss_window is not None and setting.host == "plain loop":
            found.append("loss_plateau sees only what handle.record_loss(loss) is given")
        return found

    def attach_more_views(self, optimizer_index: int, views: Sequence[LayerView]) -> None:
        """Take the modules, at the first step and when layers are unfrozen."""
        self._keep(optimizer_index)
        [self._module_views[optimizer_index]] = views

    def detach_view(self, optimizer_index: int) -> None:
        """Keep the history on the CPU."""
        self._tell(before=None)
        self._keep(optimizer_index)
        self._module_views.pop(optimizer_index, None)
        super().detach_view(optimizer_index)

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        own = {"warmup_steps": self.warmup_steps, "cooldown_steps": self.cooldown_steps}
        return {**super().hyperparameters(), **own, **dataclasses.asdict(self.limits)}

    def extra_state(self) -> dict[str, Any]:
        """The history and the findings of every optimizer; reads what is on its way to the host."""
        self._tell(before=None)
        snapshots = {**self._saved, **{index: monitor.state_dict() for index, monitor in self._monitors.items()}}
        return {
            "history": {str(index): snapshots[index] for index in sorted(snapshots)},
            "findings": {str(index): self._logs[index].state_dict() for index in sorted(self._logs)},
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Keep the history until the layers are known."""
        self._readings.clear()
        self._monitors.clear()
        self._saved = {int(index): saved for index, saved in state["history"].items()}
        self._logs = {}
        for index, saved in state["findings"].items():
            self._log(int(index)).load_state_dict(saved)

    def _monitor(self, context: StepContext) -> LayerMonitor:
        index = context.optimizer_index
        if index not in self._monitors:
            monitor = LayerMonitor(context, self._module_views[index], limits=self.limits)
            if index in self._saved:
                monitor.load_state_dict(self._saved.pop(index))
            self._monitors[index] = monitor
        return self._monitors[index]

    def _keep(self, index: int) -> None:
        """Put a history away: of a run that ends, or of layers that change."""
        monitor = self._monitors.pop(index, None)
        if monitor is not None:
            self._saved[index] = monitor.state_dict()

    def _log(self, index: int) -> FindingLog:
        return self._logs.setdefault(index, FindingLog(cooldown_steps=self.cooldown_steps))

    def _tell(self, *, before: int | None) -> None:
        """Read what has reached the host of earlier steps; without `before` all of it, and wait for it."""
        while self._readings:
            context, reading = self._readings[0]
            if before is not None and (context.step >= before or not reading.is_ready):
                return
            self._readings.popleft()
            for finding in self._log(context.optimizer_index).see(context.step, describe(reading.read())):
                self._say(context, finding)

    def _say(self, context: StepContext, finding: Finding) -> None:
        if context.is_logging:
            context.write_text(tags.FINDING_TEXT, note(f"{finding.severity}: {finding.kind}", finding.text))
        if finding.severity != "info":
            more = logged(context, tags.FINDING_TEXT)
            index = context.optimizer_index
            self.console.tell(finding_notice(finding, self.state_key, optimizer_index=index, more=more))
        elif rank() == 0:
            number = f"optimizer {context.optimizer_index}: " if context.optimizer_index else ""
            logger.info("%s%s: %s", number, finding.kind, finding.text)

    def __getstate__(self) -> dict[str, Any]:
        saved = {int(index): snapshot for index, snapshot in self.extra_state()["history"].items()}
        return {**super().__getstate__(), "_saved": saved, "_monitors": {}, "_module_views": {}, "_readings": deque()}
