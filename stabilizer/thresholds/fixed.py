"""The same threshold for every layer, from a number and an optional schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from stabilizer.thresholds.arguments import check_number
from stabilizer.thresholds.rule import ThresholdRule

__all__ = ["Fixed"]


class Fixed(ThresholdRule):
    """A threshold that does not follow the run: what `clip_grad_norm_` has (Pascanu, Mikolov, Bengio, 2013).

    There is no warm-up. A threshold fits the batch size, the number of parameters and the loss that it was found with:
    write these into `calibrated_for`, and whoever clips can tell when they have changed.

    Args:
        threshold: In units of the gradient norm, above 0.
        schedule: Step -> threshold from that step on, until the next one in the schedule; `threshold` before the first.
            Steps may be text, as some YAML readers and all JSON readers give them.
        calibrated_for: What the threshold was found with, such as `{"batch": 8}`; nothing is computed from it.

    Raises:
        ValueError: If a threshold is no number above 0, or a step no whole number.

    Example:
        >>> rule = Fixed(1.0, schedule={"1000": 0.5})
        >>> rule.start(2, device="cpu")
        >>> rule.step = 1500
        >>> rule.thresholds(torch.tensor([9.0, 0.1]))
        tensor([0.5000, 0.5000])
    """

    name: ClassVar[str] = "fixed"

    def __init__(
        self,
        threshold: float,
        *,
        schedule: Mapping[int | str, float] | None = None,
        calibrated_for: Mapping[str, Any] | None = None,
    ) -> None:
        self.threshold = check_number("threshold", threshold, above=0)
        self.schedule = None if schedule is None else _checked(schedule)
        if calibrated_for is not None and not isinstance(calibrated_for, Mapping):
            raise ValueError(f"calibrated_for={calibrated_for!r}: expected a mapping, such as {{'batch': 8}}")
        self.calibrated_for = None if calibrated_for is None else dict(calibrated_for)

    def allocate(self, num_layers: int) -> None:
        """Nothing is remembered.

        Args:
            num_layers: Not used.
        """

    def thresholds(self, norms: Tensor) -> Tensor:
        """The threshold of the step that `step` says.

        Args:
            norms: Shape (layers,); what they are does not matter.

        Returns:
            Shape (layers,), float32.
        """
        return torch.full_like(norms, self._current(), dtype=torch.float32)

    def enter(self, norms: Tensor, accepted: Tensor) -> None:
        """Nothing is remembered.

        Args:
            norms: Not used.
            accepted: Not used.
        """

    def _current(self) -> float:
        past = [step for step in self.schedule or {} if step <= self.step]
        return self.schedule[max(past)] if self.schedule and past else self.threshold


def _checked(schedule: Any) -> dict[int, float]:
    if not isinstance(schedule, Mapping) or not schedule:
        raise ValueError(f"schedule={schedule!r}: expected a mapping of step -> threshold, such as {{1000: 0.5}}")
    found: dict[int, float] = {}
    for key, value in schedule.items():
        step = int(key) if isinstance(key, str) and key.strip().isdecimal() else key
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"schedule: {key!r} is no step: expected a whole number of at least 0")
        if step in found:
            raise ValueError(f"schedule: step {step} is given twice")
        found[step] = check_number(f"schedule[{step}]", value, above=0)
    return dict(sorted(found.items()))
