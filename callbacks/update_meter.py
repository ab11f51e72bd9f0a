"""UpdateMeter: by how much one optimizer's step has moved every layer, and moving them by less."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from stabilizer.callbacks.update_agreement import SharedFailure
from stabilizer.norms import norms
from stabilizer.optimizer_health import (
    OptimizerLayers,
    Rate,
    copies,
    learning_rates,
    per_rate,
    shrink_updates_,
    update_coefficients,
    update_norms,
)

__all__ = ["MIN_PARAMETER_RMS", "RelativeTo", "UpdateMeter", "UpdateReading"]

RelativeTo: TypeAlias = Literal["learning_rate", "parameter"]

#: What a parameter's RMS counts at least, so that a layer that starts from zeros can move: Adafactor's epsilon_2.
MIN_PARAMETER_RMS = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateReading:
    """One step's updates, the same on every rank.

    Attributes:
        rms: Of every layer, before anything was done about it, shape (layers,), float32.
        coefficients: What the updates were, or would have been, multiplied by, shape (layers,), float32.
        num_failed: Ranks that could not measure, shape (), float32; the numbers are NaN and 1 then.
    """

    rms: Tensor
    coefficients: Tensor
    num_failed: Tensor


class UpdateMeter:
    """Measures a step from the copy of the parameters that it makes before.

    Args:
        layers: The parameters.
        max_rms: Largest RMS of a layer's update.
        relative_to: What the RMS is divided by.
        acts: Whether updates over the limit are made smaller.

    Attributes:
        failure: What went wrong, if anything did. The numbers are NaN then on every rank, and nobody changes anything.
    """

    def __init__(self, layers: OptimizerLayers, *, max_rms: float, relative_to: RelativeTo, acts: bool) -> None:
        self._layers, self._max_rms, self._relative_to, self._acts = layers, max_rms, relative_to, acts
        self._before: list[Tensor] | None = None
        # New memory costs a CPU more than the copy itself; devices have it at hand, and better uses for it meanwhile.
        self._kept: list[Tensor] = []
        self._rates: list[Rate] = []
        self.failure = SharedFailure("measuring updates", device=layers.device)

    @property
    def agrees(self) -> bool:
        """Whether ranks exchange their numbers: those that act always do, so that none acts alone."""
        return self._layers.reducer.world_size > 1 and (self._acts or not self._layers.is_replicated)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the parameters, and take the learning rates, before anybody lowers them for this one step.

        Args:
            optimizer: That is about to move.
        """
        try:
            if self._relative_to == "learning_rate":
                self._rates = learning_rates(optimizer, self._layers.parameters)
            self._before = copies(self._layers.local(self._layers.parameters), into=self._kept)
        except Exception as error:
            self._before = None
            self.failure.fail(error)

    def finish(self) -> UpdateReading:
        """Measure what has become of the parameters, and act on it: a collective where `agrees`."""
        before, self._before = self._before, None
        layers = self._layers
        after: list[Tensor] = []
        num = 1 if self._relative_to == "learning_rate" else 2
        squares = layers.sizes.new_full((num, len(layers.layers)), torch.nan)
        try:
            if before is not None and self.failure.error is None:
                after = layers.local(layers.parameters)
                squares = self._squares(before, after)
        except Exception as error:
            self.failure.fail(error)
        squares, num_failed = self._agreed(squares)
        self.failure.note(num_failed)
        rms = self._rms(squares)
        coefficients = update_coefficients(rms, max_rms=self._max_rms)
        if self._acts and before is not None and self.failure.error is None:
            self._shrink(before, after, coefficients)
        return UpdateReading(rms.to(torch.float32), coefficients.to(torch.float32), num_failed.to(torch.float32))

    def _shrink(self, before: list[Tensor], after: list[Tensor], coefficients: Tensor) -> None:
        try:
            shrink_updates_(before, after, coefficients, self._layers.numbers)
        except Exception as error:
            self.failure.fail(error)
        if self._layers.device.type == "cpu":
            self._kept = before

    def _squares(self, before: list[Tensor], after: list[Tensor]) -> Tensor:
        """Square sums by layer of this rank: of the updates, and of the parameters where they are needed."""
        layers = self._layers
        moved = update_norms(before, after, device=layers.device)
        if self._relative_to == "learning_rate":
            values = per_rate(moved, self._rates).unsqueeze(0)
        else:
            values = torch.stack([moved, norms(before, device=layers.device)])
        return layers.sums_here(values.to(layers.sizes.dtype).square())

    def _agreed(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Of all ranks, with the number of those that failed."""
        failed = squares.new_full((1,), float(self.failure.error is not None))
        if not self.agrees:
            return squares, failed[0]
        copies_there = self._layers.reducer.world_size if self._layers.is_replicated else 1
        total = self._layers.reducer.sum(torch.cat([squares.reshape(-1) / copies_there, failed]))
        return total[:-1].view(squares.shape), total[-1]

    def _rms(self, squares: Tensor) -> Tensor:
        moved: Tensor
        moved, *parameters = (squares / self._layers.sizes.clamp(min=1.0)).sqrt().unbind()
        for rms in parameters:
            moved = moved / rms.clamp(min=MIN_PARAMETER_RMS)
        return moved
