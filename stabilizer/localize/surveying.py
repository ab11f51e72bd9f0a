"""Whose gradient it is: local norms of all ranks and micro-batches, from the sensors or, where they fail, replays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stabilizer.localize.lockstep import Lockstep
from stabilizer.localize.prober import Prober
from stabilizer.localize.recording import MicroBatch
from stabilizer.localize.result import Result, Suspicion
from stabilizer.localize.suspects import LocalNorms, Suspect, find_suspects, largest_sum
from stabilizer.localize.tensor_group import TensorGroup, joined, tensor_group
from stabilizer.parameters import ParameterIndex
from stabilizer.reduction import Reducer, rank
from stabilizer.sensors import Sensors

__all__ = ["Survey", "agreed"]

# A single gradient is as long as its one part, but for the rounding of half precision in a reduction.
_ROUNDING = 1.02


def agreed(suspicion: Suspicion, reducer: Reducer) -> tuple[Suspicion, list[float]]:
    """What sets off a search on the rank where it is worst; a collective.

    Under plain DDP each rank measures a gradient of its own, which is that of the others as long as nothing is broken.

    Args:
        suspicion: Of this rank.
        reducer: Reaches the others.

    Returns:
        The same on every rank, and the norms of all.
    """
    own = (suspicion.norm, suspicion.chosen.tolist(), suspicion.factor, suspicion.typical)
    rows = reducer.objects(own)
    norms = [row[0] for row in rows]
    norm, chosen, factor, typical = max(rows, key=lambda row: _excess(row[0], usual=row[2] * row[3]))
    device = suspicion.chosen.device
    return Suspicion(norm=norm, chosen=torch.tensor(chosen, device=device), factor=factor, typical=typical), norms


def _excess(norm: float, *, usual: float) -> float:
    if not math.isfinite(norm):
        return math.inf
    return norm / usual if usual > 0 and math.isfinite(usual) else norm


class Survey:
    """Finds the micro-batches that are worth a search.

    Args:
        lock: Keeps the ranks together.
        reducer: Reaches the other ranks.
        micro_batches: Of the step, on this rank.
        local: Local norms of the step and of those before.
        sensors: What has measured them.
        index: Parameters of the optimizer.
        is_averaged: Whether the step's gradient is the mean of the ranks'.
        knows_reduction: Whether it is known at all how it comes from theirs.

    Attributes:
        group: Ranks with the same data.
        micro_batches: Of the step; `None` where this rank has fewer than another.
        own: This rank's suspects and others, by micro-batch.
    """

    def __init__(
        self,
        lock: Lockstep,
        reducer: Reducer,
        *,
        micro_batches: Sequence[MicroBatch],
        local: LocalNorms,
        sensors: Sensors,
        index: ParameterIndex,
        is_averaged: bool,
        knows_reduction: bool,
    ) -> None:
        self.group = TensorGroup(())
        self.micro_batches: list[MicroBatch | None] = list(micro_batches)
        self.own: dict[int, Suspect] = {}
        self._lock, self._reducer, self._local, self._sensors = lock, reducer, local, sensors
        self._index, self.is_averaged, self.knows_reduction = index, is_averaged, knows_reduction
        self._groups: list[tuple[int, ...]] = []
        self._baselines: list[float] = []

    def run(self, suspicion: Suspicion, result: Result) -> list[int] | None:
        """Ask the sensors of all ranks; a collective.

        Args:
            suspicion: What is out of the ordinary.
            result: Gets suspects, notes and errors.

        Returns:
            Micro-batches to search, the worst first; nothing where replays must tell; `None` if any rank has failed.
        """
        own = self._lock.attempt(lambda: self._look(suspicion))
        group = self._lock.attempt(lambda: tensor_group(self._sensors))
        result.errors = self._lock.errors()
        if result.errors or own is None or group is None:
            return None
        self.group = group.connect(self._reducer.device)
        rows = self._reducer.objects((*own, group.ranks))
        norms, baselines, notes = ([row[number] for row in rows] for number in range(3))
        self._groups = [row[3] for row in rows]
        result.notes += dict.fromkeys(note for row in notes for note in row)
        self._baselines = joined(baselines, self._groups)
        self.micro_batches += [None] * (max(map(len, norms)) - len(self.micro_batches))
        if any(norm is None for row in norms for norm in row):
            return []
        together = [joined(column, self._groups) for column in zip(*map(self._padded, norms), strict=True)]
        return self._choose(suspicion, [list(row) for row in zip(*together, strict=True)], result)

    def by_replay(self, prober: Prober, suspicion: Suspicion, result: Result) -> list[int]:
        """Run every micro-batch once more: as many passes.

        Args:
            prober: Runs them.
            suspicion: As of `run`.
            result: As of `run`.

        Returns:
            As of `run`; nothing if any rank has failed.
        """
        norms: list[float] = []
        for micro_batch in self.micro_batches:
            self._lock.attempt(lambda micro_batch=micro_batch: prober.forward(micro_batch))  # type: ignore[misc]
            if self._lock.agree().has_failed:
                return []
            seen = self._lock.attempt(lambda: prober.backward(None))
            prober.drop()
            if self._lock.agree().has_failed or seen is None:
                return []
            squares = torch.where(suspicion.chosen, seen.squares.to(torch.float64), 0.0)
            norms.append(float(squares.sum().sqrt()))
        result.notes.append(f"no local norms while training ({self._sensors.reason or 'the sensors had just started'})")
        return self._choose(suspicion, self._reducer.objects(norms), result)

    def _choose(self, suspicion: Suspicion, norms: list[list[float]], result: Result) -> list[int]:
        factor, fallback = suspicion.factor, suspicion.typical
        suspects = find_suspects(norms, self._baselines, factor=factor, fallback=fallback)
        self.own = {one.micro_batch: one for one in suspects if one.rank == rank()}
        # One rank speaks for a group.
        result.suspects = [one for one in suspects if one.rank == min(self._groups[one.rank] or (one.rank,))]
        if self._is_made_afterwards(suspicion, result):
            return []
        worst: dict[int, float] = {}
        for one in suspects:
            if one.is_suspect:
                excess = one.norm / one.limit if math.isfinite(one.norm) and one.limit > 0 else math.inf
                worst[one.micro_batch] = max(excess, worst.get(one.micro_batch, 0.0))
        return sorted(worst, key=lambda number: (-worst[number], number))

    def _is_made_afterwards(self, suspicion: Suspicion, result: Result) -> bool:
        """Whether the ranks' own gradients are too small for the step's."""
        # What sharded gradients are divided by may be another number than that of the ranks.
        largest = largest_sum(result.suspects, is_averaged=self.is_averaged)
        # A norm that is not finite is over it too.
        is_too_small = math.isfinite(largest) and not suspicion.norm <= _ROUNDING * largest
        if not self.knows_reduction or not is_too_small:
            return False
        result.largest = largest
        return True

    def _padded(self, row: Sequence[float]) -> list[float]:
        return [*row, *([0.0] * (len(self.micro_batches) - len(row)))]

    def _look(self, suspicion: Suspicion) -> tuple[list[float | None], float, list[str]]:
        norms = self._local.norms(suspicion.chosen)
        num = len(self.micro_batches)
        if not norms or len(norms) != num:
            hint = "" if num else ": a model that was compiled in place (model.compile()) calls no hook of a loop"
            raise RuntimeError(f"{num} micro-batches were recorded and {len(norms)} backward passes were seen{hint}")
        notes = [
            f"{', '.join(changed)} of micro-batch {micro_batch.index} was changed in place after the forward"
            for micro_batch in self.micro_batches
            if micro_batch is not None and (changed := micro_batch.changed())
        ]
        if not math.isfinite(suspicion.norm):
            notes += self._about_nonfinite(norms)
        return norms, self._local.baseline(suspicion.chosen), notes

    def _about_nonfinite(self, norms: Sequence[float | None]) -> list[str]:
        """What a gradient that is not finite may come from, beside the data."""
        values = [self._index.local(parameter.detach()) for parameter in self._index.parameters]
        named = zip(self._index.names, values, strict=True)
        bad = [name for name, value in named if not bool(torch.isfinite(value).all())]
        notes = [f"values of {bad[:5]} ({len(bad)} parameters on rank {rank()}) are not finite"] if bad else []
        if all(norm is not None and math.isfinite(norm) for norm in norms):
            notes.append(f"rank {rank()}: its own gradients are finite before the reduction")
        return notes
