"""The parts of a step for the callbacks that compare small batches with the step's: packed for the one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.local_gradients import LocalGradients
from stabilizer.callbacks.loss_meter import weights_of
from stabilizer.step_parts import ONE_PART, PartReduction, StepParts
from stabilizer.store import GradientStore
from stabilizer.tally import MicroBatchLoss, Weight

__all__ = ["PartMeter"]


class PartMeter:
    """Packs the local norms of a step's micro-batches and hands the sums over ranks out.

    Args:
        callbacks: All of ours.
    """

    def __init__(self, callbacks: Sequence[StabilizerCallback]) -> None:
        self._callbacks = [callback for callback in callbacks if callback.parts_every_n_steps is not None]
        weights = weights_of(callbacks)
        self._columns: dict[Weight | None, int] = {
            callback.part_unit: 0 if callback.part_unit is None else weights.index(callback.part_unit)
            for callback in self._callbacks
        }
        self._reductions: dict[Weight | None, PartReduction] = {}
        self._parts: dict[Weight | None, StepParts] = {}
        self._due: list[Weight | None] = []

    def pack(
        self,
        step: int,
        gradients: LocalGradients | None,
        losses: Sequence[MicroBatchLoss],
        *,
        store: GradientStore,
    ) -> Tensor | None:
        """Numbers to sum over ranks.

        Args:
            step: The optimizer step.
            gradients: Local norms; `None` before the second step.
            losses: Of this rank's micro-batches.
            store: Will measure the step.

        Returns:
            Shape (n,), n being the same on every rank; `None` at steps at which nobody looks.
        """
        self._parts = {}
        due = [callback.part_unit for callback in self._callbacks if step % (callback.parts_every_n_steps or 1) == 0]
        self._due = list(dict.fromkeys(due))
        packed = []
        for unit in self._due:
            self._reductions[unit] = reduction = PartReduction(store.num_units)
            if gradients is not None:
                reduction.reason = ONE_PART if gradients.is_resting else gradients.sensors.reason
                if gradients.is_cut:
                    reduction.reason = "a step has more micro-batches than are kept for a search"
            packed.append(
                reduction.pack(
                    [] if gradients is None else gradients.local.current,
                    losses,
                    column=self._columns[unit],
                    averaging=None if gradients is None or not gradients.local.current else gradients.averaging,
                    device=store.device,
                )
            )
        return torch.cat(packed) if packed else None

    def read(self, sums: Tensor, *, whole: Tensor) -> Exception | None:
        """Take the sums over all ranks.

        Args:
            sums: Of what `pack` gave.
            whole: Squares of the step's norms, by unit, shape (units,).

        Returns:
            What packing failed with on this rank, if it did.
        """
        failure = None
        for unit, piece in zip(self._due, sums.chunk(max(1, len(self._due))), strict=False):
            self._parts[unit] = self._reductions[unit].unpack(piece, whole=whole)
            failure = failure or self._reductions[unit].failure
        return failure

    def parts_for(self, callback: StabilizerCallback, *, step: int) -> StepParts | None:
        """The parts of the step, for a callback that looks at them at this step.

        Args:
            callback: One of ours.
            step: The optimizer step.
        """
        interval = callback.parts_every_n_steps
        return None if interval is None or step % interval else self._parts.get(callback.part_unit)
