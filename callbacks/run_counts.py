"""What a run counts for its summary: steps on the device, what was told, and incidents."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["IncidentLine", "KindCount", "StepCounts"]

_NUM_FIRST = 5


@dataclasses.dataclass
class KindCount:
    """How often a run has told one kind of thing.

    Attributes:
        num: Steps of that kind, those within a cooldown included where somebody has counted them.
        first_step: When it was told first.
        last_step: When it was told last.
        num_blocks: How often in full.
        steps: At which it was counted, the last ones.
    """

    num: int = 0
    first_step: int = -1
    last_step: int = -1
    num_blocks: int = 0
    steps: deque[int] = dataclasses.field(default_factory=lambda: deque(maxlen=1024))


@dataclasses.dataclass(frozen=True)
class IncidentLine:
    """An incident of the run, for its summary.

    Attributes:
        step: The optimizer step.
        text: What was found, in one line.
        folder: Where it was written; `None` where it was not.
    """

    step: int
    text: str
    folder: Path | None


class StepCounts:
    """Counts the steps of one optimizer; those that were skipped on the device, which nobody waits for.

    Args:
        device: Where the flags are.
        step: The first step.

    Attributes:
        num: Steps so far.
        first_step: The first of them.
        last_step: The last of them.

    Example:
        >>> counts = StepCounts(torch.device("cpu"), step=0)
        >>> for step in range(3):
        ...     counts.update(step, skipped=torch.tensor(step == 1), overflowed=torch.tensor(False))
        >>> counts.rows()
        [('steps', '3 (0 to 2)'), ('skipped', '1: step 1')]
    """

    def __init__(self, device: torch.device, *, step: int) -> None:
        self.num, self.first_step, self.last_step = 0, step, step
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._firsts = torch.full((_NUM_FIRST,), -1, dtype=torch.int64, device=device)
        self._places = torch.arange(_NUM_FIRST, device=device)

    def update(self, step: int, *, skipped: Tensor | None = None, overflowed: Tensor | None = None) -> None:
        """Take a step.

        Args:
            step: Its number.
            skipped: Whether we have skipped it, shape (), bool; `None` where nobody may, here and below.
            overflowed: Whether a gradient scaler has left it out.
        """
        self.num, self.last_step = self.num + 1, step
        if skipped is None or overflowed is None:
            return
        self._firsts.masked_fill_(skipped & (self._places == self._counts[0]), step)
        self._counts += torch.stack([skipped, overflowed])

    def rows(self) -> list[tuple[str, str]]:
        """Steps, those skipped and those that overflowed, as names and texts; waits for the device."""
        num_skipped, num_overflowed, *firsts = torch.cat([self._counts, self._firsts]).tolist()
        found = [("steps", f"{self.num:,} ({self.first_step} to {self.last_step})")]
        if num_skipped:
            shown = [str(step) for step in firsts if step >= 0] + ["..."] * (num_skipped > len(firsts))
            found.append(("skipped", f"{num_skipped:,}: step{'s' * (num_skipped > 1)} {', '.join(shown)}"))
        if num_overflowed:
            found.append(("overflows", f"{num_overflowed:,}, left out by the gradient scaler itself"))
        return found
