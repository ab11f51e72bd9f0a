"""What UpdateClipCallback remembers of the steps of one optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.clip_counts import ClipRates
from stabilizer.callbacks.incoming import Incoming
from stabilizer.callbacks.update_meter import UpdateMeter, UpdateReading

__all__ = ["UpdateMemory"]


class UpdateMemory:
    """One step at a time, from before the optimizer moves until the host has told of it; and counts over steps.

    Args:
        names: Of the layers.
        meter: Measures.
        device: Where its numbers are.

    Attributes:
        names: As given.
        rates: How often each layer was over the limit.
        reading: Of the step that the optimizer has just made; `None` if it was not measured.
    """

    def __init__(self, names: tuple[str, ...], meter: UpdateMeter, *, device: torch.device) -> None:
        self.names = names
        self.rates = ClipRates(len(names), device=device)
        self.reading: UpdateReading | None = None
        self._meter = meter
        self._is_begun = False
        # Of every layer the updates that were not finite, since the run began; on the device.
        self._num_bad = torch.zeros(len(names), device=device)
        self._incoming = Incoming[None]()
        self._told: set[int] = set()

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is about to be made that is to be measured.

        Args:
            optimizer: That makes it.
        """
        self._meter.begin(optimizer)
        self._is_begun = True

    def drop(self) -> None:
        """Forget a step that was not made."""
        self._is_begun, self.reading = False, None

    def finish(self) -> None:
        """The optimizer has moved; does nothing the second time, and at a step that is not measured."""
        if self._is_begun:
            self._is_begun = False
            self.reading = self._meter.finish()

    def take(self, is_lost: Tensor) -> UpdateReading | None:
        """Count the step, which is closed now.

        Args:
            is_lost: Whether the optimizer was kept from it, shape (), bool.

        Returns:
            Its reading, with an RMS of NaN where no step was made.
        """
        reading, self.reading = self.reading, None
        if reading is None:
            return None
        self._num_bad += ~torch.isfinite(reading.rms) & ~is_lost & (reading.num_failed == 0)
        self.rates.update(reading.coefficients < 1)  # an update of nothing is under any limit
        return UpdateReading(
            reading.rms.masked_fill(is_lost, torch.nan),
            reading.coefficients.masked_fill(is_lost, torch.nan),
            reading.num_failed,
        )

    def send(self, step: int) -> None:
        """Send to the host which layers' updates were not finite.

        Args:
            step: The step at hand.
        """
        self._incoming.push(step, self._num_bad, None)

    def nonfinite(self, *, waits: bool) -> list[str]:
        """Layers that have had an update that was not finite, each once.

        Args:
            waits: Whether to wait for what has not reached the host yet.
        """
        found = []
        for arrived in self._incoming.arrived(waits=waits):
            new = {number for number, count in enumerate(arrived.numbers) if count} - self._told
            self._told |= new
            found += [self.names[number] for number in sorted(new)]
        return found

    def check(self, *, is_due: bool) -> None:
        """Raise what went wrong; see `SharedFailure`.

        Args:
            is_due: Whether this is a step at which ranks look.
        """
        self._meter.failure.check(agrees=self._meter.agrees, is_due=is_due)

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU clones."""
        return {"names": list(self.names), "rates": self.rates.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave, of these layers or of others.
        """
        places = {name: column for column, name in enumerate(state["names"])}
        self.rates.load_state_dict(state["rates"], [places.get(name) for name in self.names])
