"""RolloutMismatchCallback: how far the policy in training is from the one that generated, and how the policy fares."""

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
from stabilizer.callbacks.mismatch_alarms import MismatchAlarm, MismatchLimits
from stabilizer.callbacks.mismatch_alerts import MismatchAlerts
from stabilizer.callbacks.policy_windows import PolicyStep, PolicyWindows
from stabilizer.names import Granularity
from stabilizer.observation_tally import ObservationTally
from stabilizer.thresholds.arguments import check_number, check_whole

__all__ = ["RolloutMismatchCallback"]


class RolloutMismatchCallback(StabilizerCallback):
    """Logs raw importance ratios of training against rollout policy, and signals of the policy, from what it is told.

    A loop tells of each micro-batch by `handle.observe(...)`, a LightningModule by this callback's `observe(...)`, both
    before the optimizer step. Sums over all tokens, micro-batches and ranks are exchanged with the norms, in the one
    collective of the step. What is not observed is not logged. A value that is not finite is counted, told, and left
    out. What the figures mean, and each limit, is in docs/callbacks/rollout_mismatch.md.

    A warning is told only ("log", "record", functions); an alarm does all of `on_alarm`, on every rank at the same
    step: on a CPU at once, on an accelerator two steps later. With "log" and "record" alone nobody waits for it.

    Args:
        every_n_steps: Interval of what is logged, in optimizer steps; alarms look at every step.
        k3_limits: From which estimate k3 of KL(rollout || train) on it is a warning, and an alarm; `None` is off, here
            and below.
        ess_limits: At or under which effective sample size, as a share of the tokens.
        max_log_ratio: From which |log-ratio| of a single token on it is an alarm.
        ln2_share: From which share of tokens with a |log-ratio| over ln 2 on it is an alarm.
        shift_limits: From which |mean log-ratio| on, if the log-ratios scatter less than that around it.
        ratio_bounds: Ratios outside these are counted.
        pass_reward: From what reward on a completion has passed.
        window: Steps that slopes are taken over, at least 3.
        cooldown_steps: Steps in which a kind of alarm is not told again, unless it gets worse; it is counted.
        on_alarm: What to do, as of `LossMeanVarCallback`; functions are given a `MismatchAlarm`.
        layers: Of no use here: a log-prob belongs to no layer.
        exclude: Of no use here.
        granularity: Of no use here.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from stabilizer.callbacks import attach
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> mismatch = RolloutMismatchCallback()
        >>> with attach(None, model=model, optimizer=optimizer, callbacks=[mismatch]) as handle:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     train, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.1, -1.9]])
        ...     handle.observe(logp_train=train, logp_rollout=rollout, entropy=0.7)
        ...     optimizer.step()
        Stabilizer preflight...
        >>> print(f"{mismatch.last().mismatch.kl_k3:.4f} {mismatch.last().entropy:.1f}")
        0.0050 0.7
    """

    is_gated = False

    def __init__(
        self,
        *,
        every_n_steps: int = 1,
        k3_limits: Sequence[float] | None = (0.01, 0.05),
        ess_limits: Sequence[float] | None = (0.5, 0.3),
        max_log_ratio: float | None = 11.5,
        ln2_share: float | None = 0.01,
        shift_limits: Sequence[float] | None = (0.05, 0.1),
        ratio_bounds: Sequence[float] = (0.5, 5.0),
        pass_reward: float = 0.5,
        window: int = 100,
        cooldown_steps: int = 100,
        on_alarm: Sequence[AlarmAction] = ("log",),
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
        self.window = check_whole("window", window, low=3)
        self.cooldown_steps = check_interval("cooldown_steps", cooldown_steps, minimum=0)
        self.limits = MismatchLimits(
            k3=k3_limits, ess=ess_limits, largest=max_log_ratio, share=ln2_share, shift=shift_limits
        )
        self.observations = self._tally = ObservationTally(
            bounds=_bounds(ratio_bounds), pass_reward=check_number("pass_reward", pass_reward)
        )
        self._alerts = MismatchAlerts(on_alarm, limits=self.limits, cooldown_steps=self.cooldown_steps)
        self.on_alarm = self._alerts.actions.names
        self.lowers_lr = "lower_lr" in self.on_alarm
        self._windows: dict[int, PolicyWindows] = {}
        self._last: dict[int, PolicyStep] = {}

    def observe(
        self,
        *,
        logp_train: Tensor | None = None,
        logp_rollout: Tensor | None = None,
        mask: Tensor | None = None,
        **signals: Any,
    ) -> None:
        """Tell of a micro-batch, before the optimizer step: any number of times, any part of it, on any rank.

        Nothing is kept but sums, on the device; gradients do not flow. Outside a run it does nothing. In a validation
        step it would count for the next optimizer step.

        Args:
            logp_train: Log-probs of the sampled tokens under the policy in training, shape (B, T).
            logp_rollout: The same under the policy that generated, as its engine gave them, shape (B, T).
            mask: Which tokens count, bool or 0 and 1, shape (B, T); default all.
            **signals: Numbers, tensors or lists. Over tokens, (B, T), or a mean: `entropy`, `kl_ref`, `clipped`
                (whether a token's ratio was clipped). Over completions, (B,), or a mean: `reward`,
                `completion_length`, `truncated` (whether it was cut off), `policy_lag` (in versions; (B, T) too),
                `heldout_reward`, `behaviour_is_old` (whether `logp_rollout` is the old policy's, as training computes
                it). `rewards` (N,) with `num_generations`: in groups, one after another. A mean weighs by the tokens,
                or the completions, of the mask, and 1 without one.

        Raises:
            ValueError: If a name is not known, or a shape does not fit.
        """
        if self.driver is not None and not getattr(self.driver, "is_closed", False) and not self.has_failed:
            self._tally.observe(logp_train=logp_train, logp_rollout=logp_rollout, mask=mask, **signals)

    def on_gradients(self, context: StepContext) -> None:
        """Lower the learning rates while that lasts."""
        self._alerts.begin_step(context)

    def on_step_end(self, context: StepContext) -> None:
        """Keep what was observed of this step, now that it is one, and log where it is due."""
        observed, index = context.observed, context.optimizer_index
        assert observed is not None  # `observations` is set
        if index not in self._windows:
            self._windows[index] = PolicyWindows(window=self.window)
        self._last[index] = self._windows[index].update(context.step, observed)
        if context.step % self.every_n_steps == 0:
            self._log(context, self._last[index], is_seen=observed.num_calls > 0)
        self._alerts.end_step(context, observed, owner=self)

    def on_run_end(self, context: StepContext) -> None:
        """Tell of the last steps."""
        self._alerts.end_run(context, owner=self)

    def detach_view(self, optimizer_index: int) -> None:
        """Forget the last step when a run ends."""
        self._alerts.forget_run()
        super().detach_view(optimizer_index)

    @property
    def alarms(self) -> Sequence[MismatchAlarm]:
        """The alarms and warnings of this run, the last 100 of them, oldest first."""
        return tuple(self._alerts.alarms)

    def last(self, optimizer_index: int = 0) -> PolicyStep | None:
        """What was observed of the last step, on the device; `None` before the first one.

        A callback of one's own with a later `order` than this one reads the same step in `on_step_end`.

        Args:
            optimizer_index: Position of the optimizer.
        """
        return self._last.get(optimizer_index)

    def limitations(self, setting: Any) -> list[str]:
        """Alarms that nothing can be done about, and arguments that mean nothing here."""
        found = list(self._alerts.actions.missing(self.driver, setting.callbacks))
        if self.layers is not None or self.exclude or self.granularity != "block":
            found.append("layers, exclude and granularity have no effect: a log-prob belongs to no layer")
        return found

    def charts(self) -> list[Chart]:
        """The estimates of KL in one chart, ratios in another, entropy and KL to the reference in a third; alarms."""
        page = ChartPage.POLICY
        return [
            Chart(page, "Rollout against training, KL: should stay near 0", lines=(f"{tags.ROLLOUT}/kl_k[123]",)),
            Chart(
                page, "Rollout against training, ratios: all near 1", lines=(f"{tags.ROLLOUT}/(min|mean|max)_ratio",)
            ),
            Chart(page, "Policy, entropy and KL: watch for a collapse", lines=(f"{tags.POLICY}/(entropy|kl_ref)",)),
            alarm_chart(),
        ]

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        limits = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self.limits).items()}
        return {
            **super().hyperparameters(),
            "limits": limits,
            "ratio_bounds": list(self._tally.bounds),
            "pass_reward": self._tally.pass_reward,
            "window": self.window,
            "cooldown_steps": self.cooldown_steps,
            "on_alarm": self._alerts.actions.specs,
        }

    def extra_state(self) -> dict[str, Any]:
        """The windows, what alarms depend on, and what the next step has been told already."""
        return {
            "windows": {str(index): windows.state_dict() for index, windows in self._windows.items()},
            "alerts": self._alerts.state_dict(),
            "told": self._tally.state_dict(),
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._last = {}
        self._windows = {int(index): PolicyWindows(window=self.window) for index in state["windows"]}
        for index, windows in self._windows.items():
            windows.load_state_dict(state["windows"][str(index)])
        self._alerts.load_state_dict(state["alerts"])
        self._tally.load_state_dict(state["told"])

    def _log(self, context: StepContext, found: PolicyStep, *, is_seen: Tensor) -> None:
        """What was not observed is NaN, and left out when it has reached the host."""
        values = {f"{tags.POLICY}/{name}": getattr(found, name) for name in tags.POLICY_SIGNALS}
        for name in tags.POLICY_SLOPES:
            values[f"{tags.POLICY}/{tags.of_window(name, self.window)}"] = getattr(found, name)
        # Counts are 0 of nothing, not NaN.
        values[f"{tags.POLICY}/num_nonfinite"] = torch.where(is_seen, found.num_nonfinite, torch.nan)
        has_tokens = found.mismatch.num_tokens + found.mismatch.num_nonfinite > 0
        statistics = torch.stack([getattr(found.mismatch, name) for name in tags.ROLLOUT_STATISTICS])
        names = [f"{tags.ROLLOUT}/{name}" for name in tags.ROLLOUT_STATISTICS]
        values.update(zip(names, statistics.masked_fill(~has_tokens, torch.nan).unbind(), strict=True))
        context.log_many(values, finite_only=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_last": {}}


def _bounds(bounds: Any) -> tuple[float, float]:
    if isinstance(bounds, str) or not isinstance(bounds, Sequence) or len(bounds) != 2:
        raise ValueError(f"ratio_bounds={bounds!r}: expected two ratios with 1 between them, such as (0.5, 5.0)")
    return check_number("ratio_bounds", bounds[0], above=0, high=1), check_number("ratio_bounds", bounds[1], low=1)
