"""LossWatch: the losses of one optimizer's steps on their way to the host, and the detectors that wait there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.incoming import Arrived, Incoming
from stabilizer.callbacks.loss_alarms import LossAlarm
from stabilizer.detectors import AlarmFolder, Detection, DetectionKind, LossDetector
from stabilizer.losses import StepLoss

__all__ = ["LossWatch"]

# Steps that an accelerator has for a loss to reach the host before anybody waits for it.
_LAG = 2


class LossWatch:
    """Looks at every step's loss, in order, on every rank alike.

    Args:
        cooldown_steps: See `AlarmFolder`.
        acts: Whether ranks act on alarms, and must see them at the same step: losses are read two steps late then (at
            once on a CPU), waiting if they must. Else they are read when they have come.
        **options: Of `LossDetector`.
    """

    def __init__(self, *, cooldown_steps: int, acts: bool, **options: Any) -> None:
        self.detector = LossDetector(**options)
        self._folder = AlarmFolder(cooldown_steps=cooldown_steps)
        self._acts = acts
        # Mean loss, its weight, number of losses that are not finite, and whose it is.
        self._incoming = Incoming[dict[str, int]]()

    def take(self, context: StepContext, loss: StepLoss, *, knows_rank: bool) -> list[LossAlarm]:
        """Take the loss of a step, and look at those that have come.

        Args:
            context: Of the step.
            loss: Of the step.
            knows_rank: Whether its extremes are those of this step alone.

        Returns:
            What is to be told now, of this step or of those before.
        """
        position = context.position
        where = {
            "epoch": position.epoch,
            "batch_index": position.batch_index,
            "optimizer_index": context.optimizer_index,
        }
        mean, rank = loss.mean, _rank_of(loss) if knows_rank else loss.mean.new_full((), -1)
        numbers = torch.stack([mean, loss.weight, loss.num_nonfinite, rank.to(mean)])
        self._incoming.push(context.step, numbers, where)
        lag = 0 if numbers.device.type == "cpu" else _LAG
        return self._look(before=context.step - lag + 1 if self._acts else None)

    def settle(self) -> list[LossAlarm]:
        """Look at all that is on its way; waits for it."""
        return self._look(before=None, waits=True)

    def take_untold(self) -> dict[DetectionKind, tuple[int, int]]:
        """What no alarm has told of by now; see `AlarmFolder.take_untold`."""
        return self._folder.take_untold()

    def state_dict(self) -> dict[str, Any]:
        """All that the next alarms depend on; waits for what is on its way, which is looked at in its time."""
        pending = list(self._incoming.arrived(waits=True))
        self._put_back(pending)
        return {
            "detector": self.detector.state_dict(),
            "folder": self._folder.state_dict(),
            "pending": [[one.step, list(one.numbers), dict(one.extra)] for one in pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`.
        """
        self._incoming.clear()
        self.detector.load_state_dict(state["detector"])
        self._folder.load_state_dict(state["folder"])
        self._put_back(Arrived(*one) for one in state["pending"])

    def _put_back(self, pending: Iterable[Arrived[dict[str, int]]]) -> None:
        for one in pending:
            self._incoming.push(one.step, torch.tensor(one.numbers, dtype=torch.float64), one.extra)

    def _look(self, *, before: int | None, waits: bool = False) -> list[LossAlarm]:
        arrived = self._incoming.arrived(before=before, waits=waits)
        return [alarm for one in arrived for alarm in self._judge(one)]

    def _judge(self, arrived: Arrived[dict[str, int]]) -> list[LossAlarm]:
        mean, weight, num_nonfinite, rank = arrived.numbers
        if num_nonfinite or not math.isfinite(mean):
            detections = [_nonfinite(arrived.step)] if num_nonfinite else []
        else:
            detections = self.detector.update(arrived.step, mean)
        events = self._folder.fold(detections)
        if not events:
            return []
        recent = self.detector.last + ([(arrived.step, mean)] if num_nonfinite else [])
        where = {**arrived.extra, "rank": int(rank), "weight": weight}
        return [LossAlarm.of(event, recent=recent, **where) for event in events]


def _nonfinite(step: int) -> Detection:
    return Detection("nonfinite", step, math.nan, math.nan, math.nan, math.nan, math.nan, first_step=step)


def _rank_of(loss: StepLoss) -> Tensor:
    """Whose a step's loss is: of the rank with the largest, or of the first with one that is not finite."""
    extremes = loss.extremes
    assert extremes is not None
    return torch.where(loss.num_nonfinite > 0, extremes.num_nonfinite.argmax(), extremes.max_rank)
