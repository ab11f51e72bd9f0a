"""LossAlarm: what a function that is called at an alarm is given."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from stabilizer.callbacks.alarms import Alarm
from stabilizer.detectors import Detection

__all__ = ["LossAlarm"]

_ADVICE = {
    "jump": "Look at this batch, and at the gradient norms of the steps before",
    "drift": "Look at the learning rate against its schedule, and at what the data have changed to",
    "variance": "The batches have become more different, or the steps too large: look at the noise scale and the rate",
    "nonfinite": "Look at this batch (are all of its labels ignored?), and at the gradient norms of the step before",
}


@dataclasses.dataclass(frozen=True)
class LossAlarm(Alarm):
    """A loss that is out of the ordinary, the same on every rank.

    Attributes:
        kind: "jump", "drift", "variance" or "nonfinite"; see `stabilizer.detectors.Detection`.
        step: The optimizer step.
        value: Its loss; NaN for a loss that is not finite.
        median: Where losses were before; NaN for a loss that is not finite, as the next three.
        sigma: What they scatter by.
        score: The figure that went over its limit.
        limit: What it is held against.
        first_step: Where it began.
        count: How many detections this alarm stands for; more than 1 after a cooldown in which there were some.
        recent: The last losses up to this one, as pairs of step and value.
        epoch: As the host counts; -1 if it does not.
        batch_index: Number of the step's last batch; -1 if it is not known.
        rank: The rank with the largest loss of a micro-batch, or the first with one that is not finite; -1 where nobody
            asks for it ("record" does, and `every_n_steps=1`).
        weight: Tokens or samples that the loss is the mean of; NaN if it is not known.
        optimizer_index: Position of the optimizer.

    Example:
        >>> found = Detection("jump", step=9, value=8.0, median=2.0, sigma=0.5, score=12.0, limit=4.5, first_step=9)
        >>> print(LossAlarm.of(found, recent=[(8, 2.1), (9, 8.0)]).text)
        step 9: the loss jumped to 8, 12 sigmas (0.5) above the median 2; the limit is 4.5. Look at this batch...
    """

    subject: ClassVar[str] = "loss"
    series: ClassVar[str] = "losses"

    kind: str
    step: int
    value: float
    median: float
    sigma: float
    score: float
    limit: float
    first_step: int
    count: int = 1
    recent: tuple[tuple[int, float], ...] = ()
    epoch: int = -1
    batch_index: int = -1
    rank: int = -1
    weight: float = math.nan
    optimizer_index: int = 0

    @classmethod
    def of(cls, found: Detection, *, recent: list[tuple[int, float]], **where: Any) -> LossAlarm:
        """An alarm from what a detector has found.

        Args:
            found: It.
            recent: See `recent`.
            **where: `epoch`, `batch_index`, `rank`, `weight` and `optimizer_index`.
        """
        return cls(**dataclasses.asdict(found), recent=tuple(recent), **where)

    @property
    def text(self) -> str:
        """In one line: what, against what, since when, and what to look at."""
        where = f"step {self.step}" + (f" (batch {self.batch_index})" if self.batch_index >= 0 else "")
        what = {
            "jump": f"the loss jumped to {self.value:.4g}, {self.score:.3g} sigmas ({self.sigma:.3g}) above the median "
            f"{self.median:.4g}; the limit is {self.limit:.3g}",
            "drift": f"the loss drifts upwards: {self.value:.4g}, where the median was {self.median:.4g} (its CUSUM is "
            f"{self.score:.3g} sigmas of {self.sigma:.3g}; the limit is {self.limit:.3g})",
            "variance": f"the loss scatters more: its variance is {self.score:.3g} times what it was (sigma "
            f"{self.sigma:.3g}, median {self.median:.4g}); the limit is {self.limit:.3g}",
            "nonfinite": "the loss is not finite"
            + ("" if self.weight else ": there is no valid target in the batch, all labels are ignored"),
        }[self.kind]
        since = f"; it began at step {self.first_step}" if self.first_step < self.step else ""
        folded = f"; stands for {self.count} such steps" if self.count > 1 else ""
        whose = f"on rank {self.rank}" if self.kind == "nonfinite" else f"the largest is rank {self.rank}'s"
        rank = f"; {whose}" if self.rank >= 0 else ""
        return f"{where}: {what}{since}{folded}{rank}. {self.advice}"

    @property
    def advice(self) -> str:
        """What to look at."""
        return _ADVICE[self.kind]
