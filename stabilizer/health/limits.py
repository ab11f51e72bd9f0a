"""What the norms are held against."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["Limits"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Thresholds of all findings; `LayerHealthCallback` says what each is.

    Raises:
        ValueError: If one is out of range.

    Example:
        >>> Limits(window=100).vanishing_alarm
        0.01
    """

    window: int = 200
    decay_r_squared: float = 0.8
    decay_half_depth: float = 0.25
    vanishing_warning: float = 0.1
    vanishing_alarm: float = 0.01
    explosion_ratio: float = 10.0
    explosion_k: float = 6.0
    together_share: float = 0.75
    parts_ratio: float = 10.0
    drift_ratio: float = 2.0
    drift_windows: int = 4
    loss_window: int | None = 1000
    plateau_errors: float = 2.0

    def __post_init__(self) -> None:
        _check_count("window", self.window, minimum=8)
        _check_count("drift_windows", self.drift_windows, minimum=2)
        if self.loss_window is not None:
            _check_count("loss_window", self.loss_window, minimum=8)
        for name in ("decay_r_squared", "decay_half_depth", "vanishing_warning", "vanishing_alarm", "together_share"):
            _check_number(name, getattr(self, name), low=0.0, high=1.0)
        for name in ("explosion_ratio", "parts_ratio", "drift_ratio"):
            _check_number(name, getattr(self, name), low=1.0, high=math.inf)
        for name in ("explosion_k", "plateau_errors"):
            _check_number(name, getattr(self, name), low=0.0, high=math.inf)
        if self.vanishing_alarm > self.vanishing_warning:
            raise ValueError(
                f"vanishing_alarm={self.vanishing_alarm!r}: expected at most vanishing_warning="
                f"{self.vanishing_warning!r}: an alarm is the worse of the two"
            )


def _check_count(name: str, value: object, *, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}={value!r}: expected a whole number, at least {minimum}")


def _check_number(name: str, value: object, *, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low < float(value) < high:  # type: ignore[arg-type]
        between = f"between {low:g} and {high:g}" if math.isfinite(high) else f"over {low:g}"
        raise ValueError(f"{name}={value!r}: expected a number {between}")
