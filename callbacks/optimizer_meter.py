"""HealthMeter: one step of one optimizer, from a copy of the parameters before it to sums over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.optimizer_accumulation import AccumulationWatch
from stabilizer.callbacks.update_agreement import SharedFailure
from stabilizer.norms import norms
from stabilizer.optimizer_health import (
    Embedding,
    Moments,
    OptimizerLayers,
    Rate,
    copies,
    find_embeddings,
    is_low_precision,
    learning_rates,
    moment_sums,
    moments_of,
    per_rate,
    row_sums,
    swallowed_updates,
    update_norms,
)

__all__ = ["SUMS", "HealthMeter", "StepSums"]

#: Rows of `StepSums.layers`.
SUMS = (
    "moved",
    "held",
    "normalized",
    "second",
    "gradient",
    "num_second",
    "num_swallowed",
    "num_to_move",
    "num_lost_parts",
    "num_parts",
)


@dataclasses.dataclass(frozen=True, eq=False)
class StepSums:
    """What was measured of a step, the same on every rank if `is_whole`.

    Attributes:
        layers: Of every layer the square sums of updates, parameters, g / sqrt(v), sqrt(v) and g; the number of
            elements with a second moment; of elements that did not move, and that were to; and of parts of gradients
            that were lost in sums, and all of them. Shape (10, layers).
        rows: Of every embedding the rows of `row_sums` of gradient, root of the second moment and update in learning
            rates, shape (3, rows).
        betas: Of every embedding's Adam, with eps; `None` for another optimizer.
        is_whole: Whether the sums are over all ranks.
    """

    layers: Tensor
    rows: list[Tensor]
    betas: list[tuple[float, float, float] | None]
    is_whole: bool


class HealthMeter:
    """Measures the steps that it is told of.

    Args:
        layers: The parameters.
        model: As it trains, wrapped.
        watch: Looks at micro-batches.

    Attributes:
        layers: As given.
        embeddings: Those whose rows can be told apart.
        left_out: Names of other embeddings.
        is_low_precision: Whether any of the parameters is.
        betas: Of the optimizer, as far as it is known; those that remember longest where there are several.
        failure: What went wrong, if anything did.
    """

    def __init__(self, layers: OptimizerLayers, *, model: nn.Module, watch: AccumulationWatch) -> None:
        self.layers = layers
        self.embeddings, self.left_out = find_embeddings(model, layers)
        self._watch = watch
        self.is_low_precision = any(is_low_precision(one) for one in layers.parameters)
        self.failure = SharedFailure("measuring an optimizer's step", device=layers.device)
        self.betas: tuple[float, float] | None = None
        self._before: list[Tensor] | None = None
        self._rates: list[Rate] = []

    @property
    def agrees(self) -> bool:
        """Whether ranks exchange their numbers; what micro-batches have lost is another number on every rank."""
        return self.layers.reducer.world_size > 1 and (not self.layers.is_replicated or self._watch.is_any)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the parameters; the optimizer has not moved yet.

        Args:
            optimizer: That is about to move.
        """
        try:
            self._rates = learning_rates(optimizer, self.layers.parameters)
            self._before = copies(self.layers.local(self.layers.parameters))
        except Exception as error:
            self._before = None
            self.failure.fail(error)

    def finish(self, optimizer: torch.optim.Optimizer, *, is_whole: bool = True) -> StepSums:
        """Measure what the optimizer has done: a collective where `agrees`.

        Args:
            optimizer: That has moved.
            is_whole: Whether to look at everything, on all ranks; else at this rank's updates alone.
        """
        before, self._before = self._before, None
        layers = self.layers
        sums = layers.sizes.new_full((len(SUMS), len(layers.layers)), torch.nan)
        rows = [torch.full((3, one.num_rows), torch.nan, device=layers.device) for one in self.embeddings]
        moments: Mapping[Tensor, Moments] = {}
        try:
            if before is not None and self.failure.error is None:
                moments = moments_of(optimizer) if is_whole else {}
                self._note_betas(moments)
                sums = layers.sums_here(self._columns(before, optimizer, moments, is_whole=is_whole))
                rows = self._rows(before, moments) if is_whole else rows
        except Exception as error:
            self.failure.fail(error)
        if is_whole and self.agrees:
            sums, rows = self._agreed(sums, rows)
        betas = [self._betas_of(one, moments) for one in self.embeddings]
        return StepSums(sums, rows if is_whole else [], betas, is_whole)

    def _columns(
        self,
        before: list[Tensor],
        optimizer: torch.optim.Optimizer,
        moments: Mapping[Tensor, Moments],
        *,
        is_whole: bool,
    ) -> Tensor:
        """What this rank's elements of every parameter sum up to, shape (10, parameters)."""
        layers, device = self.layers, self.layers.device
        after = layers.local(layers.parameters)
        found = torch.zeros(len(SUMS), len(after), dtype=layers.sizes.dtype, device=device)
        found[0] = update_norms(before, after, device=device)
        found[1] = norms(before, device=device)
        if is_whole:
            for number in range(len(after)):
                found[2:8, number] = self._of_state(number, before[number], after[number], optimizer, moments)
            found[8:] = self._watch.counts_of(layers.parameters, device=device)
        for row in (0, 1, 2, 3, 4):
            found[row].square_()
        return found

    def _of_state(
        self,
        number: int,
        before: Tensor,
        after: Tensor,
        optimizer: torch.optim.Optimizer,
        moments: Mapping[Tensor, Moments],
    ) -> Tensor:
        parameter, found = self.layers.parameters[number], torch.zeros(6, device=self.layers.device)
        gradient = self._gradient(parameter)
        second = self._laid_out_as(parameter, moments[parameter].second) if parameter in moments else None
        if gradient is not None and second is not None and gradient.numel():
            norms_found, _ = moment_sums(gradient, second, moments[parameter])
            found[:3] = norms_found
            found[3].fill_(float(gradient.numel()))
        if is_low_precision(after) and after.numel():
            state = optimizer.state.get(parameter) or {}
            moved_by = state.get("exp_avg", state.get("momentum_buffer"))
            moved_by = gradient if moved_by is None else self._laid_out_as(parameter, moved_by)
            if moved_by is not None:
                found[4:] = swallowed_updates(before, after, moved_by)
        return found

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """This rank's elements of what the optimizer has stepped with; `None` where there are none."""
        gradient = parameter.grad
        if gradient is None:
            return None
        gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
        return self._laid_out_as(parameter, gradient)

    def _laid_out_as(self, parameter: Tensor, tensor: Tensor) -> Tensor | None:
        """Elements of a tensor on this rank, if they are those of the parameter that are here, and no parts of sums."""
        wanted: Any = getattr(parameter, "placements", None)
        found: Any = getattr(tensor, "placements", None)
        if found != wanted:
            if not found or not wanted or not all(placement.is_replicate() for placement in found):
                return None
            whole: Any = tensor
            tensor = whole.redistribute(placements=wanted)  # cuts a piece out, and asks no other rank
        [local] = self.layers.local([tensor])
        return torch.view_as_real(local) if local.is_complex() else local

    def _rows(self, before: list[Tensor], moments: Mapping[Tensor, Moments]) -> list[Tensor]:
        found = []
        for one in self.embeddings:
            parameter = self.layers.parameters[one.number]
            gradient, [after] = self._gradient(parameter), self.layers.local([parameter])
            moved = after.to(torch.float32) - before[one.number].to(torch.float32)
            kept = moments.get(parameter)
            values: list[Tensor | None] = [gradient, None, moved]
            second = None if kept is None else self._laid_out_as(parameter, kept.second)
            if kept is not None and second is not None and gradient is not None:
                values[1] = moment_sums(gradient, second, kept)[1].sqrt()
            share = 1.0 if self.layers.is_replicated else self.layers.share(one.number)
            parts = [
                torch.zeros(one.num_rows, device=after.device)
                if value is None
                else row_sums(value, offset=one.offset, num_rows=one.num_rows, share=share)
                for value in values
            ]
            rate = per_rate(torch.ones(1, device=after.device), [self._rates[one.number]])
            found.append(torch.stack([*parts[:2], parts[2] * rate.square()]).to(self.layers.device))
        return found

    def _agreed(self, sums: Tensor, rows: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Of all ranks, in one collective."""
        copies_there = self.layers.reducer.world_size if self.layers.is_replicated else 1
        parts = [sums / copies_there, *(one / copies_there for one in rows)]
        failed = sums.new_full((1,), float(self.failure.error is not None))
        packed = torch.cat([failed, *(part.reshape(-1).to(sums.dtype) for part in parts)])
        num_failed, *found = self.layers.reducer.sum(packed).split([1, *(part.numel() for part in parts)])
        self.failure.note(num_failed[0])
        sums, *rows = [one.view(part.shape).to(part.dtype) for one, part in zip(found, parts, strict=True)]
        return sums, rows

    def _note_betas(self, moments: Mapping[Tensor, Moments]) -> None:
        known = [(one.beta1, one.beta2) for one in moments.values()]
        self.betas = max(known, key=lambda pair: pair[1]) if known else self.betas

    def _betas_of(self, embedding: Embedding, moments: Mapping[Tensor, Moments]) -> tuple[float, float, float] | None:
        kept = moments.get(self.layers.parameters[embedding.number])
        return None if kept is None else (kept.beta1, kept.beta2, kept.eps)
