"""Losses of steps that a callback has not worked on yet, and extremes that it has not logged yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stabilizer.callbacks.context import StepContext
from stabilizer.losses import LossExtremes, StepLoss
from stabilizer.windows import WindowedStatistics

__all__ = ["LossBuffer", "merged", "restored"]


@dataclasses.dataclass
class LossBuffer:
    """Steps that have not been put into the windows yet; their values stay where they are.

    Attributes:
        steps: Their numbers.
        batches: Number of each step's last batch; -1 where it is not known.
        losses: Their losses.
    """

    steps: list[int] = dataclasses.field(default_factory=list)
    batches: list[int] = dataclasses.field(default_factory=list)
    losses: list[StepLoss] = dataclasses.field(default_factory=list)

    def add(self, context: StepContext, loss: StepLoss) -> None:
        """Take a step.

        Args:
            context: Of the step.
            loss: Of the step.
        """
        self.steps.append(context.step)
        self.batches.append(context.position.batch_index)
        self.losses.append(loss)

    def nonfinite_by_rank(self) -> Tensor | None:
        """Losses that were not finite, shape (ranks,); `None` if nobody has asked for them in these steps."""
        found = [loss.extremes.num_nonfinite for loss in self.losses if loss.extremes is not None]
        return torch.stack(found).sum(0) if found else None


def merged(first: LossExtremes | None, second: LossExtremes) -> LossExtremes:
    """Extremes of earlier and of later steps together.

    Args:
        first: The earlier ones; `None` if there are none.
        second: The later ones.

    Example:
        >>> low, high, rank, counts = torch.tensor(1.0), torch.tensor(3.0), torch.tensor(1), torch.zeros(2)
        >>> both = merged(LossExtremes(low, high, rank, counts), LossExtremes(low + 1, high - 1, rank - 1, counts))
        >>> both.minimum.item(), both.maximum.item(), both.max_rank.item()
        (1.0, 3.0, 1)
    """
    if first is None:
        return second
    low, high, rank, counts = (
        getattr(first, field.name).to(second.maximum.device, non_blocking=True) for field in dataclasses.fields(first)
    )
    return LossExtremes(
        torch.minimum(low, second.minimum),
        torch.maximum(high, second.maximum),
        torch.where(second.maximum > high, second.max_rank, rank),
        counts + second.num_nonfinite,
    )


def restored(saved: Mapping[str, Tensor], windows: Sequence[int]) -> WindowedStatistics:
    """Statistics with the state of a checkpoint, whose windows may have been others.

    Args:
        saved: The state.
        windows: Those of now, ascending.
    """
    found, size = WindowedStatistics(windows=windows), saved["values"].numel() - 1
    if size == windows[-1]:
        found.load_state_dict(dict(saved))
        return found
    num = int(saved["num_finite"])
    slots = torch.arange(max(0, num - min(size, windows[-1])), num) % size
    found.update(saved["values"][slots], saved["steps"][slots])
    return found
