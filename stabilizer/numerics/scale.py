"""The history of a loss scale: growing, shrinking, or stuck."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

__all__ = ["ScaleHistory", "Trend"]

Trend: TypeAlias = Literal["growing", "shrinking", "steady"]

_STEPS = 128
# Of torch's GradScaler: from 2^16, eight overflows in a row are its way to find a scale; sixteen lead to 1.
_MAX_OVERFLOWS = 16
# Under 1 small gradients are made smaller still; healthy runs end between 2^8 and 2^20.
_FLOOR = 1.0
_MAX_STEPS_AT_FLOOR = 10
# float16 ends at 65504: what stands a larger scale for long does not go through float16.
_CEILING = 2.0**32


class ScaleHistory:
    """Keeps the loss scales of the last steps, and says once when they are stuck.

    Stuck is: `16` overflows in a row; or `10` steps in a row with a scale under 1, whatever the reason; or a scale over
    2^32, which grows on because nothing here is ever in float16.

    Example:
        >>> history = ScaleHistory()
        >>> found = [history.see(2.0 ** (8 - step), overflowed=True) for step in range(20)]
        >>> found.index("overflows"), found.count("overflows"), history.trend
        (15, 1, 'shrinking')
    """

    def __init__(self) -> None:
        self._scales: deque[float] = deque(maxlen=_STEPS)
        self.num_overflows = self.num_at_floor = 0
        self._told = ""

    @property
    def trend(self) -> Trend:
        """Where the scale of the last 128 steps goes: a change by a factor of 4 or more is one."""
        if not self._scales:
            return "steady"
        ratio = self._scales[-1] / self._scales[0] if self._scales[0] > 0 else 1.0
        return "growing" if ratio >= 4 else "shrinking" if ratio <= 0.25 else "steady"

    @property
    def evidence(self) -> dict[str, float]:
        """Plain numbers."""
        first, last = (self._scales[0], self._scales[-1]) if self._scales else (math.nan, math.nan)
        return {
            "loss_scale": last,
            "loss_scale_before": first,
            "num_steps": float(len(self._scales)),
            "num_overflows": float(self.num_overflows),
            "num_steps_at_floor": float(self.num_at_floor),
        }

    def see(self, scale: float, *, overflowed: bool) -> str:
        """Take a step.

        Args:
            scale: That it was run with.
            overflowed: Whether the scaler has left it out.

        Returns:
            "overflows", "floor" or "ceiling" at the step at which it has become stuck; else nothing.
        """
        self._scales.append(scale)
        self.num_overflows = self.num_overflows + 1 if overflowed else 0
        self.num_at_floor = self.num_at_floor + 1 if scale < _FLOOR else 0
        stuck = ""
        if self.num_overflows >= _MAX_OVERFLOWS:
            stuck = "overflows"
        elif self.num_at_floor >= _MAX_STEPS_AT_FLOOR:
            stuck = "floor"
        elif scale > _CEILING:
            stuck = "ceiling"
        is_new = bool(stuck) and stuck != self._told
        # Told again only after it has been in order.
        self._told = stuck
        return stuck if is_new else ""

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        counts = {"num_overflows": self.num_overflows, "num_at_floor": self.num_at_floor}
        return {"scales": list(self._scales), "told": self._told, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        self._scales = deque((float(scale) for scale in state["scales"]), maxlen=_STEPS)
        self._told = str(state["told"])
        self.num_overflows, self.num_at_floor = int(state["num_overflows"]), int(state["num_at_floor"])
