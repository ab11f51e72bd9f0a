"""EarlyWarning: what rose first, how long before the others, and whether the loss followed. On the host, plain Python.

Reports of long runs say that the gradient noise scale grows first, then the variance of the loss, then the loss. Here
each is held against its own past, and joined.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

__all__ = ["CHANNELS", "DEFAULT_THRESHOLDS", "EarlyWarning", "Rise", "WarningSign"]

#: What can rise, in the order that reports of long runs give; the last is the loss alarm.
CHANNELS = ("noise_scale", "variance", "layers", "loss")
_NAMES = {
    "noise_scale": "the noise scale",
    "variance": "the scatter of the loss",
    "layers": "a layer's gradient norm",
    "loss": "the loss",
}
#: Largest ln(value / usual value) of healthy runs, rounded up; docs/callbacks/early_warning.md says of which.
DEFAULT_THRESHOLDS: Mapping[str, float] = {"noise_scale": 0.5, "variance": 0.5, "layers": 1.0}
# Of a threshold: a channel is up until it has come down so far.
_RELEASE = 0.5
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Rise:
    """A channel that is up.

    Attributes:
        channel: One of `CHANNELS`.
        step: When it rose.
        ratio: How many times its usual value it was then; NaN for the loss alarm.
    """

    channel: str
    step: int
    ratio: float


@dataclasses.dataclass(frozen=True)
class WarningSign:
    """What `EarlyWarning.update` returns.

    Attributes:
        level: 0: nothing. 1: one of noise scale, scatter and layers is up. 2: several are. 3: the loss alarm.
        rises: What is up, in the order in which it rose.
        text: The same in a sentence.
    """

    level: int
    rises: tuple[Rise, ...]
    text: str


class Series:
    """Values against their own past: ln(value / median of earlier ones), the newest being no part of the past.

    Args:
        window: How many earlier values say what is usual.
        gap: How many of the newest do not count among them, so that a slow rise is not its own past.
        min_values: How many there must be.
    """

    def __init__(self, *, window: int = 50, gap: int = 10, min_values: int = 20) -> None:
        self._gap, self._min_values = gap, min_values
        self.logs: deque[float] = deque(maxlen=window + gap)

    def push(self, value: float) -> float:
        """Take the next value and tell its excess, NaN before there is a past, or for what is no value."""
        if not (math.isfinite(value) and value > 0):
            return math.nan
        past = list(self.logs)[: max(0, len(self.logs) - self._gap)]
        self.logs.append(math.log(value))
        return math.nan if len(past) < self._min_values else math.log(value) - statistics.median(past)


class Channel:
    """Whether an excess is up: over the threshold twice in a row, and down again under half of it.

    Args:
        threshold: ln of a ratio.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.excess: float | None = None
        self.risen_at: int | None = None
        self.ratio = 1.0
        self.num_over = 0

    def take(self, step: int, excess: float) -> None:
        """Take the next excess; NaN tells nothing."""
        if math.isnan(excess):
            return
        self.excess = excess
        self.num_over = self.num_over + 1 if excess > self.threshold else 0
        if self.risen_at is None and self.num_over >= 2:
            self.risen_at, self.ratio = step, math.exp(excess)
        elif self.risen_at is not None and excess < _RELEASE * self.threshold:
            self.risen_at = None

    def state(self) -> dict[str, Any]:
        """Plain types."""
        return {name: getattr(self, name) for name in ("excess", "risen_at", "ratio", "num_over")}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        for name, value in state.items():
            setattr(self, name, value)


class EarlyWarning:
    """Joins noise scale, scatter of the loss, layers and loss alarms.

    Args:
        thresholds: Channel -> largest ln(value / usual value) that is healthy; those that are left out are the
            `DEFAULT_THRESHOLDS`. Freeze your own on healthy runs of your model.
        horizon_steps: How long an alarm of the loss counts, and how long before it a rise is its forerunner.

    Raises:
        ValueError: If a threshold is of no channel or not above zero.

    Example:
        >>> warning = EarlyWarning(horizon_steps=200)
        >>> for step in range(0, 600, 10):
        ...     noise = 100.0 if step < 500 else 400.0
        ...     sign = warning.update(step, {"noise_scale": noise, "variance": 0.1})
        >>> sign.level, sign.text
        (1, 'the noise scale rose at step 510 (4 times its usual value)')
    """

    def __init__(self, *, thresholds: Mapping[str, float] | None = None, horizon_steps: int = 300) -> None:
        chosen = {**DEFAULT_THRESHOLDS, **(thresholds or {})}
        for channel, threshold in chosen.items():
            if channel not in DEFAULT_THRESHOLDS:
                raise ValueError(f"thresholds: {channel!r}: allowed are {', '.join(DEFAULT_THRESHOLDS)}")
            if not 0 < threshold < math.inf:
                raise ValueError(f"thresholds: {channel}={threshold!r}: expected ln of a ratio, above zero")
        self.thresholds = chosen
        self.horizon_steps = horizon_steps
        self._channels = {channel: Channel(threshold) for channel, threshold in chosen.items()}
        self._series: dict[str, Series] = {}
        self._alarm_step: int | None = None

    def update(
        self,
        step: int,
        values: Mapping[str, float],
        *,
        layers: Mapping[str, float] | None = None,
        alarm_step: int | None = None,
    ) -> WarningSign:
        """Take the next values.

        Args:
            step: That they belong to.
            values: "noise_scale", "variance" -> value; those that nobody measures are left out.
            layers: Layer -> gradient norm; the one that is farthest from its usual norm counts.
            alarm_step: Of the last alarm of the loss, if there was any.
        """
        for channel, value in values.items():
            self._channels[channel].take(step, self._push(channel, value))
        farthest = [self._push(f"layers/{name}", norm) for name, norm in (layers or {}).items()]
        known = [excess for excess in farthest if not math.isnan(excess)]
        self._channels["layers"].take(step, max(known, default=math.nan))
        if alarm_step is not None:
            self._alarm_step = alarm_step
        if self._alarm_step is not None and step - self._alarm_step > self.horizon_steps:
            self._alarm_step = None
        rises = [
            Rise(name, channel.risen_at, channel.ratio)
            for name, channel in self._channels.items()
            if channel.risen_at is not None
        ]
        level = min(2, len(rises))
        if self._alarm_step is not None:
            rises.append(Rise("loss", self._alarm_step, math.nan))
            level = 3
        ordered = tuple(sorted(rises, key=lambda rise: rise.step))
        return WarningSign(level, ordered, _sentence(ordered))

    def excesses(self) -> dict[str, float]:
        """ln(value / usual value) of every channel now, NaN where it is not known; to freeze thresholds on."""
        found = {name: channel.excess for name, channel in self._channels.items()}
        return {name: math.nan if excess is None else excess for name, excess in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that the next signs depend on, plain types."""
        channels = {name: channel.state() for name, channel in self._channels.items()}
        series = {name: list(one.logs) for name, one in self._series.items()}
        return {"version": _VERSION, "channels": channels, "series": series, "alarm_step": self._alarm_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`.

        Raises:
            ValueError: If it is of another version.
        """
        if state.get("version") != _VERSION:
            raise ValueError(f"early warning: a state of version {state.get('version')!r}: expected {_VERSION}")
        for name, channel in self._channels.items():
            channel.load(state["channels"][name])
        self._series = {name: Series() for name in state["series"]}
        for name, one in self._series.items():
            one.logs.extend(state["series"][name])
        self._alarm_step = state["alarm_step"]

    def _push(self, name: str, value: float) -> float:
        return self._series.setdefault(name, Series()).push(value)


def _sentence(rises: tuple[Rise, ...]) -> str:
    if not rises:
        return "nothing is out of the ordinary"
    first, *rest = rises
    parts = [f"{_NAMES[first.channel]} {_verb(first)} at step {first.step}{_how_far(first)}"]
    parts += [f"{_NAMES[one.channel]} {_verb(one)} {one.step - first.step} steps later{_how_far(one)}" for one in rest]
    return "; ".join(parts)


def _verb(rise: Rise) -> str:
    return "alarmed" if rise.channel == "loss" else "rose"


def _how_far(rise: Rise) -> str:
    return f" ({rise.ratio:.2g} times its usual value)" if math.isfinite(rise.ratio) else ""
