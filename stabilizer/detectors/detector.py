"""All detectors over one series of losses."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from stabilizer.detectors.baseline import Baseline
from stabilizer.detectors.detection import Detection, Scene
from stabilizer.detectors.rules import DriftRule, JumpRule, VarianceRule
from stabilizer.thresholds.arguments import check_number, check_whole

__all__ = ["LossDetector"]

_VERSION = 1
# What is larger is as good as this: no float32 is, and its square is still finite.
_LARGEST = 1e100


class LossDetector:
    """Watches one series of losses for a jump, a drift upwards and a larger variance. Lower is better, always.

    A machine over plain numbers: the same losses in the same order give the same detections, bit for bit, on every rank
    and after a resume. A loss that is not finite is passed over as if it had not been. Nothing is found in the first
    `warmup_steps` losses; from then on there is always a limit. A lasting jump is found, and accepted after about
    `accept_after` steps: from there on the new level is what is usual. A drift is accepted when it is found, a larger
    variance after twice `accept_after` steps.

    How each detector works, and where the defaults come from: docs/callbacks/loss_mean_var.md; see `JumpRule`,
    `DriftRule` and `VarianceRule`.

    Args:
        window: Losses that say what they scatter by, at least twice the short window.
        short_window: Losses that say where they are, at least 20.
        warmup_steps: Losses before the first detection, at least 50.
        jump_target: False alarms of a single step in 10,000 healthy ones that the limit of a jump is calibrated to.
        jump_limits: Smallest and largest limit of a single step, in sigmas.
        drift_slack: Sigmas a step that are no drift.
        drift_limit: Sigmas beyond the slack that add up to a drift.
        variance_limit: Ratio of the short window's variance to the long one's.
        accept_after: Steps of a lasting jump in a row that make it the new level, at least 8.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> detector = LossDetector()
        >>> losses = [1e6] + [2.0 + 0.1 * (-1) ** step for step in range(100)] + [8.0]
        >>> for step, loss in enumerate(losses):
        ...     for found in detector.update(step, loss):
        ...         print(f"{found.kind} at step {found.step}: {found.value} where {found.median} is usual")
        jump at step 101: 8.0 where 2.0 is usual
    """

    def __init__(
        self,
        *,
        window: int = 1000,
        short_window: int = 100,
        warmup_steps: int = 100,
        jump_target: float = 0.2,
        jump_limits: tuple[float, float] = (4.0, 40.0),
        drift_slack: float = 1.0,
        drift_limit: float = 12.0,
        variance_limit: float = 2.5,
        accept_after: int = 32,
    ) -> None:
        check_whole("short_window", short_window, low=20)
        check_whole("window", window, low=2 * short_window)
        check_whole("accept_after", accept_after, low=8)
        low, high = _limits(jump_limits)
        self.warmup_steps = check_whole("warmup_steps", warmup_steps, low=50)
        # What a restart begins with, and what a report shows.
        self._last: deque[tuple[int, float]] = deque(maxlen=accept_after)
        self._num_seen = 0
        self._baseline = Baseline(window=window, short_window=short_window)
        self._jump = JumpRule(
            target=check_number("jump_target", jump_target, above=0, high=100),
            limits=(low, high),
            calm_steps=short_window,
            accept_after=accept_after,
        )
        self._drift = DriftRule(
            slack=check_number("drift_slack", drift_slack, low=0, below=3),
            limit=check_number("drift_limit", drift_limit, above=0),
        )
        self._variance = VarianceRule(
            window=window,
            short_window=short_window,
            limit=check_number("variance_limit", variance_limit, above=1),
            accept_after=2 * accept_after,
        )

    @property
    def last(self) -> list[tuple[int, float]]:
        """The last finite losses with their steps, the oldest first; as many as `accept_after`."""
        return list(self._last)

    @property
    def is_warm(self) -> bool:
        """Whether the next loss can be found to be anything."""
        return self._num_seen >= self.warmup_steps and self._baseline.is_ready

    def update(self, step: int, value: float) -> list[Detection]:
        """Take the next loss.

        Args:
            step: Of the loss.
            value: The loss; what is not finite is passed over.

        Returns:
            What is found in it, at most one of a kind; most often nothing. A lasting condition is found at each of its
            steps: `AlarmFolder` makes one event of them.
        """
        if not math.isfinite(value):
            return []
        value = min(max(float(value), -_LARGEST), _LARGEST)
        is_warm = self.is_warm
        self._num_seen += 1
        self._last.append((step, value))
        if not self._baseline.is_ready:
            self._baseline.push(value, residual=self._baseline.first_residual(value), is_outlier=False)
            self._variance.push(value, is_outlier=False)
            return []
        return self._judge(Scene(step, value, *self._baseline.measure()), is_warm=is_warm)

    def _judge(self, scene: Scene, *, is_warm: bool) -> list[Detection]:
        value, z = scene.value, scene.z
        jump = self._jump.judge(scene, z) if is_warm else None
        is_outlier = is_warm and self._jump.is_outlier(z)
        # A falling loss hides how far the noise reaches.
        self._jump.learn(z + scene.lag / scene.sigma, is_found=jump is not None)
        if self._num_seen == self.warmup_steps:
            self._jump.calibrate()
        drift = self._judge_drift(scene, is_outlier=is_outlier) if is_warm else None
        self._baseline.push(value, residual=value - scene.centre, is_outlier=is_outlier)
        self._variance.push(value, is_outlier=is_outlier)
        variance = self._variance.judge(scene) if is_warm else None
        if self._jump.is_accepted or drift is not None:
            self._baseline.restart([loss for _, loss in self._last])
            self._jump.accept()
            self._drift.accept()
        if self._variance.is_accepted:
            self._baseline.forget_scatter()
            self._variance.accept()
        return [found for found in (jump, drift, variance) if found is not None]

    def _judge_drift(self, scene: Scene, *, is_outlier: bool) -> Detection | None:
        if self._jump.is_lasting:
            # It has been told as a jump.
            self._drift.accept()
            return None
        return None if is_outlier else self._drift.judge(scene)

    def state_dict(self) -> dict[str, Any]:
        """All that the next detections depend on.

        Returns:
            Plain types: numbers, lists and dicts.
        """
        return {
            "version": _VERSION,
            "num_seen": self._num_seen,
            "last": [list(entry) for entry in self._last],
            "baseline": self._baseline.state(),
            "jump": self._jump.state(),
            "drift": self._drift.state(),
            "variance": self._variance.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved. Windows of other lengths take as much as they hold.

        Args:
            state: Of `state_dict`; left as it is.

        Raises:
            ValueError: If it is of another version, or lacks something.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the state of the loss detectors has version {state.get('version')!r}: expected {_VERSION}; start "
                "them anew, without this state"
            )
        missing = [key for key in ("num_seen", "last", "baseline", "jump", "drift", "variance") if key not in state]
        if missing:
            raise ValueError(f"the state of the loss detectors lacks {missing}: give what state_dict() has returned")
        state = copy.deepcopy(dict(state))
        self._num_seen = int(state["num_seen"])
        self._last = deque(((step, value) for step, value in state["last"]), maxlen=self._last.maxlen)
        self._baseline.load(state["baseline"])
        self._jump.load(state["jump"])
        self._drift.load(state["drift"])
        self._variance.load(state["variance"])


def _limits(limits: Any) -> tuple[float, float]:
    try:
        low, high = limits
    except (TypeError, ValueError):
        raise ValueError(f"jump_limits={limits!r}: expected a smallest and a largest limit, in sigmas") from None
    low = check_number("jump_limits[0]", low, above=0)
    return low, check_number("jump_limits[1]", high, low=low)
