"""FollowedOptimizer: one optimizer of OptimizerHealth."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.optimizer_meter import HealthMeter, StepSums
from stabilizer.callbacks.optimizer_rates import RateWatch
from stabilizer.callbacks.optimizer_reading import LateReading, log_step, row_figures, send_step
from stabilizer.numerics.finding import NumericsFinding
from stabilizer.optimizer_health import OptimizerHistory, RowBook

__all__ = ["FollowedOptimizer"]


class FollowedOptimizer:
    """A step at a time, and what is remembered of all.

    Args:
        meter: Measures.
        history: Knows what is usual.
        rates: Has seen the learning rates.

    Attributes:
        meter: As given.
        rates: As given.
    """

    def __init__(self, meter: HealthMeter, history: OptimizerHistory, rates: RateWatch) -> None:
        self.meter, self.rates = meter, rates
        self._history = history
        self._books = {
            one.name: RowBook(one.num_rows, one.num_columns, device=meter.layers.device) for one in meter.embeddings
        }
        self._begun: bool | None = None  # whether all of the step is looked at; None: it is not looked at
        self._jump: tuple[float, float] | None = None
        self._sums: StepSums | None = None
        self._readings: deque[LateReading] = deque()

    def begin(self, optimizer: torch.optim.Optimizer, *, is_whole: bool, rates: tuple[float, float] | None) -> None:
        """A step is about to be made that is to be looked at.

        Args:
            optimizer: That makes it.
            is_whole: Whether all of it is; else its updates alone.
            rates: Learning rate before and now, where it has jumped.
        """
        self.meter.begin(optimizer)
        self._begun, self._jump = is_whole, rates

    def drop(self) -> None:
        """Forget a step that was not made."""
        self._begun = self._sums = self._jump = None

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has moved; does nothing the second time, and at a step that is not looked at.

        Args:
            optimizer: That.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            self._sums = self.meter.finish(optimizer, is_whole=begun)

    def send(self, context: StepContext, *, is_lost: Tensor) -> None:
        """Log the step, which is closed now, and send it on its way to the host.

        Args:
            context: Of the step.
            is_lost: Whether it says nothing: the optimizer was kept from it, or it is not finite; shape (), bool.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return
        is_lost = is_lost.to(sums.layers.device, non_blocking=sums.layers.device.type != "cpu")
        figures = {}
        if sums.is_whole:
            figures = row_figures(self.meter, sums, self._books, is_lost=is_lost)
            log_step(context, self.meter, sums, figures, is_lost=is_lost)
        self._readings.append(send_step(context, self.meter, sums, figures, rates=self._jump, is_lost=is_lost))

    def read(self, *, before: int | None) -> list[NumericsFinding]:
        """Findings of what has reached the host.

        Args:
            before: Only of earlier steps than this, and without waiting; `None` waits for all.
        """
        found = []
        while self._readings:
            first = self._readings[0]
            if before is not None and (first.reading.step >= before or not first.copy.is_ready):
                break
            self._readings.popleft()
            reading = first.read()
            found += [] if reading is None else self._history.see(reading)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU clones."""
        books = {name: book.state_dict() for name, book in self._books.items()}
        return {"history": self._history.state_dict(), "rates": list(self.rates.last), "rows": books}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        self._history.load_state_dict(state["history"])
        self.rates.last = list(state["rates"])
        for name, book in state["rows"].items():
            if name in self._books:
                self._books[name].load_state_dict(book)
