"""Without: the step as it would be without the units that were found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stabilizer.localize.lockstep import Lockstep
from stabilizer.localize.prober import Prober
from stabilizer.localize.rebuilding import Averager, Difference, error_of_subtraction, rebuild
from stabilizer.localize.recording import MicroBatch
from stabilizer.localize.replaying import Replayer
from stabilizer.localize.result import Result, Suspicion
from stabilizer.localize.searching import LocalFinding
from stabilizer.store import GradientStore

__all__ = ["Without"]


class Without:
    """The step's gradient without some units, and its norm; inside the guard of a search.

    Args:
        store: Of the step's gradients.
        replayer: The host's.
        lock: Keeps the ranks together.
        gradients: Of the step.
        factor: What brings replayed gradients to their scale.
        grad_scale: What they are still multiplied by, shape ().
    """

    def __init__(
        self,
        store: GradientStore,
        replayer: Replayer,
        lock: Lockstep,
        gradients: Sequence[Tensor | None],
        *,
        factor: Tensor | float,
        grad_scale: Tensor | None,
    ) -> None:
        self._store, self._replayer, self._lock = store, replayer, lock
        self._gradients, self._factor, self._grad_scale = gradients, factor, grad_scale

    def measure(self, difference: Difference | None, suspicion: Suspicion, result: Result) -> None:
        """Norm of the step without the found units, from a difference; where that is too inexact, a bound.

        Args:
            difference: What closing the gates has taken out; `None` if it is not known of all micro-batches.
            suspicion: What set off the search.
            result: Gets it.
        """
        lock, norm, inexact = self._lock, math.inf, math.inf
        if not lock.agree(is_unproved=difference is None).is_unproved and difference is not None:
            ready = lock.attempt(lambda: (filled := difference.fill(), self._averager(filled)))
            if lock.agree().has_failed or ready is None:
                result.errors = lock.errors()
                return
            filled, averager = ready
            if averager is not None:
                averager.average_(filled)
            rest = lock.attempt(lambda: difference.remaining(factor=self._factor))
            if lock.agree().has_failed or rest is None:
                result.errors = lock.errors()
                return
            for parameter, gradient in zip(self._store.index.parameters, rest, strict=True):
                parameter.grad = gradient
            squares = self._store.remeasure(grad_scale=self._grad_scale).squares
            norm = float(torch.where(suspicion.chosen, squares, 0.0).sum().sqrt())
            dtype = next((gradient.dtype for gradient in self._gradients if gradient is not None), torch.float32)
            inexact = error_of_subtraction(dtype, taken=suspicion.norm)
        if math.isfinite(norm) and inexact < 0.1 * norm:
            result.counterfactual = norm
        else:
            result.counterfactual, result.is_bound = _bound(result), True

    def rebuild(
        self,
        prober: Prober,
        micro_batches: Sequence[MicroBatch | None],
        findings: Mapping[int, LocalFinding],
        result: Result,
    ) -> list[Tensor | None] | None:
        """The gradient itself, from running all micro-batches again.

        Args:
            prober: Runs them.
            micro_batches: Of the step.
            findings: Of this rank, by micro-batch.
            result: Gets the number of passes, and errors.

        Returns:
            By parameter, with the loss scale in it; `None` if any rank has failed.
        """
        lock, before = self._lock, prober.num_passes
        closed = {number: finding.units for number, finding in findings.items() if finding.units}
        averager = lock.attempt(lambda: self._averager(self._gradients))
        rebuilt = None
        if not lock.agree().has_failed:
            rebuilt = rebuild(prober, lock, micro_batches, closed, like=self._gradients, averager=averager)
        result.num_rebuild_passes = prober.num_passes - before
        result.errors = lock.errors()
        return rebuilt

    def _averager(self, tensors: Sequence[Tensor | None]) -> Averager | None:
        """For gradients that are a rank's own."""
        return Averager(tensors, self._store.reducer) if self._replayer.is_replicated else None


def _bound(result: Result) -> float | None:
    """No gradient is longer than its parts together: the mean over ranks of what is left of each micro-batch."""
    left = {(number, finding.suspect.micro_batch): finding.closed_norm for number, finding in result.findings}
    parts = [left.get((one.rank, one.micro_batch), one.norm) for one in result.suspects]
    num_ranks = len({one.rank for one in result.suspects})
    known = [part for part in parts if part is not None]
    return sum(known) / num_ranks if len(known) == len(parts) and num_ranks else None
