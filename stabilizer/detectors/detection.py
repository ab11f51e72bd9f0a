"""What a detector has found, and the scene that it judges."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Detection", "DetectionKind", "Scene"]

DetectionKind: TypeAlias = Literal["jump", "drift", "variance", "nonfinite"]


@dataclasses.dataclass(frozen=True)
class Detection:
    """A loss, or the last of several, that a detector holds to be out of the ordinary.

    Attributes:
        kind: "jump": far above the last losses, at once. "drift": higher and higher, or higher for long.
            "variance": the losses scatter more than they did.
        step: The step at which it was seen.
        value: The loss of that step.
        median: What losses were at before, in units of the loss: for a drift where they were a while ago, else now.
        sigma: What they scatter by: a standard deviation, if they are normal.
        score: The figure that went over its limit. For a jump, sigmas above the median (of several steps the smallest
            that counts); for a drift, the sum of sigmas beyond the slack; for a variance, short over long variance.
        limit: What the score is held against.
        first_step: The step at which it began.
        count: How many detections this one stands for.

    Example:
        >>> Detection("jump", step=7, value=8.0, median=2.0, sigma=0.5, score=12.0, limit=4.5, first_step=7).count
        1
    """

    kind: DetectionKind
    step: int
    value: float
    median: float
    sigma: float
    score: float
    limit: float
    first_step: int
    count: int = 1


class Scene(NamedTuple):
    """A loss and what it is judged by. All but the first two in units of the loss.

    Attributes:
        step: Of the loss.
        value: The loss.
        centre: Median of the last losses.
        reference: Median of losses a while ago.
        sigma: What losses scatter by.
        lag: How far a falling loss usually is below the centre.
    """

    step: int
    value: float
    centre: float
    reference: float
    sigma: float
    lag: float

    @property
    def z(self) -> float:
        """Sigmas above the centre."""
        return (self.value - self.centre) / self.sigma

    def detection(self, kind: DetectionKind, *, score: float, limit: float, first_step: int) -> Detection:
        """A detection in this scene.

        Args:
            kind: What was found.
            score: The figure that went over its limit.
            limit: What it is held against.
            first_step: Where it began.
        """
        median = self.reference if kind == "drift" else self.centre
        return Detection(kind, self.step, self.value, median, self.sigma, score, limit, first_step)
