"""Which micro-batches the last steps had, in little memory: steps of one length are one entry."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["Span", "StepPositions"]

# Entries that are kept; a run has about one for each epoch and each short window of accumulation.
_MAX_RUNS = 4096


@dataclasses.dataclass(frozen=True)
class Span:
    """Steps in a row within one epoch.

    Attributes:
        first_step: The first of them.
        last_step: The last of them.
        epoch: As the host counts.
        first_batch: The first micro-batch within the epoch.
        last_batch: The last one.
    """

    first_step: int
    last_step: int
    epoch: int
    first_batch: int
    last_batch: int


@dataclasses.dataclass
class _Run:
    """Steps in a row whose last micro-batches have one distance."""

    epoch: int
    first_step: int
    num_steps: int
    first_batch: int  # the last micro-batch of the first step
    distance: int

    @property
    def end(self) -> int:
        return self.first_step + self.num_steps

    def batch_of(self, step: int) -> int:
        return self.first_batch + (step - self.first_step) * self.distance


class StepPositions:
    """Remembers the last micro-batch of every step.

    Example:
        >>> positions = StepPositions()
        >>> for step in range(6):  # two micro-batches a step, eight an epoch
        ...     positions.push(step, epoch=step // 4, batch=2 * (step % 4) + 1)
        >>> [(span.epoch, span.first_batch, span.last_batch) for span in positions.spans(2, 5)]
        [(0, 4, 7), (1, 0, 3)]
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def push(self, step: int, *, epoch: int, batch: int) -> None:
        """Note a step.

        Args:
            step: Its number; a second call for a step replaces the first, a smaller one forgets what comes after it.
            epoch: As the host counts.
            batch: Its last micro-batch within the epoch.
        """
        while self._runs and self._runs[-1].end > step:
            last = self._runs[-1]
            last.num_steps = step - last.first_step
            if last.num_steps <= 0:
                self._runs.pop()
        run = self._runs[-1] if self._runs else None
        if run is not None and run.epoch == epoch and run.end == step:
            distance = batch - run.batch_of(step - 1)
            if run.num_steps == 1 and distance > 0:
                run.distance = distance
            if distance == run.distance and distance > 0:
                run.num_steps += 1
                return
        self._runs.append(_Run(epoch, step, 1, batch, 1))
        del self._runs[:-_MAX_RUNS]

    def spans(self, first_step: int, last_step: int) -> list[Span]:
        """The micro-batches of steps, as far as they are known.

        Args:
            first_step: The first of them.
            last_step: The last of them.

        Returns:
            One for each epoch. What lies between two steps of an epoch belongs to the later one.
        """
        spans: dict[int, Span] = {}
        for run in self._runs:
            low, high = max(run.first_step, first_step), min(run.end - 1, last_step)
            if low > high:
                continue
            before = spans.get(run.epoch)
            first = self._first_batch(run, low) if before is None else before.first_batch
            start = low if before is None else before.first_step
            spans[run.epoch] = Span(start, high, run.epoch, first, run.batch_of(high))
        return list(spans.values())

    def state_dict(self) -> dict[str, Any]:
        """What `spans` depends on: plain numbers."""
        return {"runs": [list(dataclasses.astuple(run)) for run in self._runs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`.
        """
        self._runs = [_Run(*(int(number) for number in run)) for run in state["runs"]]

    def _first_batch(self, run: _Run, step: int) -> int:
        """The first micro-batch of a step: the one behind the last of the step before."""
        if step > run.first_step:
            return run.batch_of(step - 1) + 1
        number = bisect.bisect_left(self._runs, run.first_step, key=lambda other: other.first_step)
        before = self._runs[number - 1] if number else None
        if before is not None and before.epoch == run.epoch:
            return before.batch_of(before.end - 1) + 1
        # The first step that is known: of a run that began in the middle of an epoch it may be any.
        is_start = before is not None or run.batch_of(step) < run.distance or step == 0
        return 0 if is_start else run.batch_of(step) - run.distance + 1
