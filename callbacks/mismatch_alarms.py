"""When training and rollout policy are too far apart: the limits, and what is said."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from stabilizer.callbacks.alarms import Alarm
from stabilizer.thresholds.arguments import check_number

__all__ = ["KINDS", "MismatchAlarm", "MismatchLimits", "MismatchRow", "Verdict"]

Severity: TypeAlias = Literal["warning", "alarm"]
#: Each is `rollout_<kind>` in tags.
KINDS = ("k3", "ess", "max", "ln2", "shift", "nonfinite")

# How many standard errors a mean log-ratio must be from 0 to be a shift; and after how many tokens of a sequence noise
# is taken to be new noise.
_MIN_ERRORS, _NUM_CORRELATED = 6.0, 64
_ADVICE = {
    "k3": "Compare precision, kernels and weights of the two engines; rollout.TokenClip and SeqClip bound the weights",
    "ess": "Few tokens carry the step: truncate or mask their weights (rollout.TokenClip), or generate anew",
    "max": "Single tokens are all but impossible to one of the policies: mask them (rollout.TokenClip, mode='icepop')",
    "ln2": "Many tokens are off: is the rollout engine's precision, sampling (top-p, top-k) or version another one?",
    "shift": "All tokens are off alike: temperature, top-p or another normalizer is applied on one side only",
    "nonfinite": "They are left out of all statistics: look at what the engine returns for tokens of the mask",
}


class MismatchRow(NamedTuple):
    """Figures of a step on the host, over all ranks.

    Attributes:
        num_calls: How often something was observed.
        num_tokens: Tokens with finite log-probs.
        num_sequences: Rows with such tokens.
        num_nonfinite: Tokens without.
        num_bad_signals: Values of signals that were not finite.
        k3: Estimate k3 of KL(rollout || train).
        ess: Effective sample size as a share of the tokens.
        largest: Largest |log-ratio|.
        share: Share of tokens with a |log-ratio| over ln 2.
        mean: Mean log-ratio.
        std: Its standard deviation over tokens.
        behaviour_is_old: Whether the rollout log-probs are the old policy's, as training computes them: their share.
    """

    num_calls: float
    num_tokens: float
    num_sequences: float
    num_nonfinite: float
    num_bad_signals: float
    k3: float
    ess: float
    largest: float
    share: float
    mean: float
    std: float
    behaviour_is_old: float


class Verdict(NamedTuple):
    """A figure over its limit."""

    kind: str
    severity: Severity
    value: float
    limit: float


class MismatchLimits:
    """Holds the figures of a step against limits.

    Of tokens that the rollout policy has sampled the mean log-ratio is -KL(rollout || train), which k3 estimates too.
    A shift is a mean that no such divergence explains: it is at least as large as the log-ratios scatter (so most
    tokens are off to one side), at least 6 standard errors from 0 (where tokens of a sequence, up to 64 of them, count
    as one: their noise may be one), and over its own limit. In expectation two sound policies with a k3 under the
    shift's limit have none, whatever the shape of the noise.

    Args:
        k3: From which k3 on it is a warning, and an alarm; `None` is off, here and below.
        ess: Under which effective sample size.
        largest: From which largest |log-ratio| on it is an alarm.
        share: From which share of |log-ratio| > ln 2 on.
        shift: From which |mean log-ratio| on.

    Raises:
        ValueError: If one is out of range.

    Example:
        >>> limits = MismatchLimits()
        >>> row = MismatchRow(1, 1e4, 50, 0, 0, k3=0.017, ess=0.99, largest=0.3, share=0, mean=-0.19, std=0.02,
        ...     behaviour_is_old=0)
        >>> [(found.kind, found.severity) for found in limits.judge(row)]
        [('k3', 'warning'), ('shift', 'alarm')]
    """

    def __init__(
        self,
        *,
        k3: Sequence[float] | None = (1e-2, 5e-2),
        ess: Sequence[float] | None = (0.5, 0.3),
        largest: float | None = 11.5,
        share: float | None = 0.01,
        shift: Sequence[float] | None = (0.05, 0.1),
    ) -> None:
        self.k3, self.shift = (_pair(name, value, sign=1.0) for name, value in (("k3", k3), ("shift", shift)))
        self.ess = _pair("ess", ess, sign=-1.0)
        self.largest = None if largest is None else check_number("max_log_ratio", largest, above=0)
        self.share = None if share is None else check_number("ln2_share", share, above=0, high=1)

    def judge(self, row: MismatchRow) -> list[Verdict]:
        """What is over its limit.

        Args:
            row: Of a step.

        Returns:
            At most one of each kind.
        """
        found = []
        num_bad = row.num_nonfinite + row.num_bad_signals
        if num_bad:
            found.append(Verdict("nonfinite", "alarm", num_bad, 0.0))
        if not row.num_tokens:
            return found
        found += _graded("k3", row.k3, self.k3)
        # Smaller is worse.
        small = _graded("ess", -row.ess, None if self.ess is None else (-self.ess[0], -self.ess[1]))
        found += [one._replace(value=-one.value, limit=-one.limit) for one in small]
        found += _graded("max", row.largest, None if self.largest is None else (math.inf, self.largest))
        found += _graded("ln2", row.share, None if self.share is None else (math.inf, self.share))
        is_uniform = abs(row.mean) >= row.std
        num_independent = max(row.num_sequences, row.num_tokens / _NUM_CORRELATED)
        is_certain = abs(row.mean) * math.sqrt(num_independent) >= _MIN_ERRORS * row.std
        if is_uniform and is_certain:
            signed = _graded("shift", abs(row.mean), self.shift)
            found += [one._replace(value=math.copysign(one.value, row.mean)) for one in signed]
        return found


@dataclasses.dataclass(frozen=True)
class MismatchAlarm(Alarm):
    """Two policies that are too far apart at a step, the same on every rank.

    Attributes:
        kind: `rollout_` and one of `KINDS`.
        severity: "warning" or "alarm".
        step: The optimizer step.
        value: The figure; how many values were not finite for `rollout_nonfinite`.
        limit: What it is held against.
        first_step: The first step of this kind that had not been told yet.
        count: How many steps this alarm stands for.
        num_tokens: Tokens with finite log-probs.
        is_old: Whether the rollout log-probs are the old policy's, as training computes them.
        recent: The last values up to this one, as pairs of step and value.
        epoch: As the host counts; -1 if it does not.
        batch_index: Number of the step's last batch; -1 if it is not known.
        optimizer_index: Position of the optimizer.

    Example:
        >>> alarm = MismatchAlarm("rollout_shift", "alarm", 7, -0.19, limit=0.1, first_step=7, num_tokens=512)
        >>> print(alarm.text)
        step 7: rollout_shift (alarm): the mean log-ratio of 512 tokens is -0.19 (17 % less likely in training) and ...
    """

    subject: ClassVar[str] = "rollout"
    series: ClassVar[str] = "values"

    kind: str
    severity: Severity
    step: int
    value: float
    limit: float
    first_step: int
    count: int = 1
    num_tokens: int = 0
    is_old: bool = False
    recent: tuple[tuple[int, float], ...] = ()
    epoch: int = -1
    batch_index: int = -1
    optimizer_index: int = 0

    @property
    def is_warning(self) -> bool:
        """Whether it is only told."""
        return self.severity == "warning"

    @property
    def score(self) -> float:
        """What is logged under the alarm's tag."""
        return self.value

    @property
    def text(self) -> str:
        """In one line: what, against what, since when, and what to look at."""
        where = f"step {self.step}" + (f" (batch {self.batch_index})" if self.batch_index >= 0 else "")
        value, num = self.value, self.num_tokens
        percent = abs(math.expm1(value)) * 100 if abs(value) < 10 else math.inf
        likely = "less" if value < 0 else "more"
        kind = self.kind.removeprefix("rollout_")
        what = {
            "k3": f"K3 of rollout and training policy is {value:.3g} over {num} tokens, the limit is {self.limit:g}",
            "ess": f"the effective sample size is {value:.3g} of {num} tokens, the limit is {self.limit:g}",
            "max": f"a token has a |log-ratio| of {value:.3g}, the limit is {self.limit:g}",
            "ln2": f"{value:.2%} of {num} tokens are off by more than a factor of 2, the limit is {self.limit:.2%}",
            "shift": f"the mean log-ratio of {num} tokens is {value:.3g} ({percent:.2g} % {likely} likely in training) "
            f"and they hardly scatter around it; the limit is {self.limit:g}",
            "nonfinite": f"{value:.0f} log-probs or signals are not finite",
        }[kind]
        since = f"; since step {self.first_step}" if self.first_step < self.step else ""
        folded = f"; stands for {self.count} such steps" if self.count > 1 else ""
        whose = (
            "; the rollout log-probs are those of the old policy as training computes them, so this is how far it has "
            "moved, and nothing is known of the engine"
            if self.is_old and kind != "nonfinite"
            else ""
        )
        return f"{where}: {self.kind} ({self.severity}): {what}{since}{folded}{whose}. {self.advice}"

    @property
    def advice(self) -> str:
        """What to look at."""
        return _ADVICE[self.kind.removeprefix("rollout_")]


def _graded(kind: str, value: float, limits: tuple[float, float] | None) -> list[Verdict]:
    if limits is not None and value >= limits[1]:
        return [Verdict(kind, "alarm", value, limits[1])]
    return [Verdict(kind, "warning", value, limits[0])] if limits is not None and value >= limits[0] else []


def _pair(name: str, value: Any, *, sign: float) -> tuple[float, float] | None:
    """A warning's limit and an alarm's, which is as bad or worse."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name}_limits={value!r}: expected two numbers, of a warning and of an alarm")
    warning, alarm = (check_number(f"{name}_limits", one, above=0) for one in value)
    if sign * warning > sign * alarm:
        raise ValueError(f"{name}_limits={value!r}: expected the limit of the warning first, which is crossed earlier")
    return warning, alarm
