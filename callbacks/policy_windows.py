"""The policy in training at one step, and where its entropy, KL and reward have been going."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.loss_buffers import restored
from stabilizer.observations import StepObservations
from stabilizer.rollout.statistics import MismatchStatistics
from stabilizer.windows import WindowedStatistics

__all__ = ["PolicyStep", "PolicyWindows"]

_SERIES = ("entropy", "kl_ref", "reward")


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyStep:
    """What was observed of one step over all micro-batches and ranks: tensors of shape () on the device, no wait.

    NaN stands for what was not observed.

    Attributes:
        step: The optimizer step.
        mismatch: Of the ratios between training and rollout policy.
        entropy: Mean over tokens.
        entropy_slope: Per step, by least squares over the window.
        entropy_slope_error: Its standard error.
        kl_ref: KL to the reference policy, mean over tokens.
        kl_ref_slope: Per step.
        kl_ref_slope_error: Its standard error.
        reward: Mean over completions.
        reward_slope: Per step.
        reward_slope_error: Its standard error.
        heldout_reward: As told.
        reward_gap: Mean reward over the window less the held-out reward, at steps that have one.
        zero_variance_groups: Share of the groups whose rewards are all the same.
        mid_pass_groups: Share of the groups of which 30 to 70 % have passed.
        policy_lag: How many versions older the policy was that generated, mean.
        max_policy_lag: The largest.
        completion_length: In tokens, mean.
        max_completion_length: The largest.
        clipped: Share of tokens whose ratio was clipped.
        truncated: Share of completions that were cut off.
        behaviour_is_old: 1 where the rollout log-probs are those of the old policy as training computes them.
        num_nonfinite: Values of signals that were not finite, and left out.
    """

    step: int
    mismatch: MismatchStatistics
    entropy: Tensor
    entropy_slope: Tensor
    entropy_slope_error: Tensor
    kl_ref: Tensor
    kl_ref_slope: Tensor
    kl_ref_slope_error: Tensor
    reward: Tensor
    reward_slope: Tensor
    reward_slope_error: Tensor
    heldout_reward: Tensor
    reward_gap: Tensor
    zero_variance_groups: Tensor
    mid_pass_groups: Tensor
    policy_lag: Tensor
    max_policy_lag: Tensor
    completion_length: Tensor
    max_completion_length: Tensor
    clipped: Tensor
    truncated: Tensor
    behaviour_is_old: Tensor
    num_nonfinite: Tensor


class PolicyWindows:
    """The last values of one optimizer's signals, on the device.

    Args:
        window: How many steps with a value are looked at.
    """

    def __init__(self, *, window: int) -> None:
        self._window = window
        self._series = {name: WindowedStatistics(windows=(window,)) for name in _SERIES}

    def update(self, step: int, observed: StepObservations) -> PolicyStep:
        """Take a step.

        Args:
            step: Its number.
            observed: What was observed; a value that is not finite enters no window.
        """
        means, found = observed.means, {}
        for name in _SERIES:
            value = means[name]
            if self._series[name].values.device != value.device:
                self._series[name] = self._series[name].to(value.device)
            self._series[name].update(value, step)
            found[name] = self._series[name].compute()
        slopes: dict[str, Tensor] = {}
        for name, statistics in found.items():
            slope, error = statistics[f"slope_{self._window}"], statistics[f"slope_error_{self._window}"]
            # A slope belongs to the steps at which its value was observed; two values have none with an error.
            is_known = means[name].isfinite() & error.isfinite()
            slopes[f"{name}_slope"] = torch.where(is_known, slope, torch.nan)
            slopes[f"{name}_slope_error"] = torch.where(is_known, error, torch.nan)
        return PolicyStep(
            step=step,
            mismatch=observed.mismatch,
            **means,
            **slopes,
            reward_gap=found["reward"][f"mean_{self._window}"] - means["heldout_reward"],
            max_policy_lag=observed.maxima["policy_lag"],
            max_completion_length=observed.maxima["completion_length"],
            num_nonfinite=observed.num_nonfinite,
        )

    def state_dict(self) -> dict[str, Any]:
        """The windows, as CPU tensors."""
        return {
            name: {key: value.detach().cpu().clone() for key, value in series.state_dict().items()}
            for name, series in self._series.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back; a window of another length gets as much as it holds.

        Args:
            state: Of `state_dict`.
        """
        self._series = {name: restored(state[name], (self._window,)) for name in _SERIES}
