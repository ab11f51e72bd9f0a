"""Rerun: the suspicious micro-batch of a step run again several times, on all ranks together, as it was."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from stabilizer.localize.guarded import guarded
from stabilizer.localize.prober import Prober
from stabilizer.localize.recording import MicroBatch
from stabilizer.localize.result import Result, Suspicion
from stabilizer.localize.runs import RankRuns, Reruns, Watch
from stabilizer.localize.step_runner import StepRunner
from stabilizer.localize.surveying import agreed

__all__ = ["Rerun"]


class Rerun(StepRunner):
    """Runs the worst micro-batch of a step again; see `Localizer`, which searches in one."""

    def run(
        self,
        suspicion: Suspicion,
        *,
        max_replays: int,
        stops: Callable[[list[list[float]]], bool],
        make_watch: Callable[[], Watch] | None = None,
    ) -> Reruns:
        """Run it again; a collective. Whatever it changes is put back.

        Args:
            suspicion: What is out of the ordinary, on this rank.
            max_replays: Most often.
            stops: Whether a rank needs no further replay, of the square sums of the replays so far. It goes on as long
                as any suspicious rank does.
            make_watch: Makes what looks at a replay.

        Returns:
            The same on every rank.
        """
        found, result = Reruns(), Result()
        found.suspicion, found.norms = agreed(suspicion, self._reducer)
        suspicion = found.suspicion
        self._lock.attempt(self._check)
        order = self._survey.run(suspicion, result)
        if order is not None and result.largest is None:
            with contextlib.ExitStack() as stack:
                runner = self._lock.attempt(lambda: stack.enter_context(self._guarded()))
                if not self._lock.agree().has_failed and runner is not None:
                    found.is_local = bool(order)
                    order = order or self._survey.by_replay(runner, suspicion, result)
                    if order:
                        found.micro_batch = order[0]
                        own = self._repeat(runner, order[0], max_replays, stops, make_watch)
                        found.ranks = self._reducer.objects(own)
            result.errors = self._lock.errors()
        found.suspects, found.largest = result.suspects, result.largest
        found.errors, found.notes = list(result.errors), list(result.notes)
        return found

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[_Runner]:
        with guarded(self._replayer, store=self._store, sensors=self._sensors) as (guard, sensors):
            runner = _Runner(
                self._replayer,
                self._lock,
                guard=guard,
                sensors=sensors,
                segments=self._segments,
                parameters=self._parameters,
                tap=cast(Any, _NoTap()),
                blocks=(),
                group=self._survey.group,
                needs_gate=False,
            )
            try:
                yield runner
            finally:
                runner.drop()

    def _repeat(
        self,
        runner: _Runner,
        number: int,
        max_replays: int,
        stops: Callable[[list[list[float]]], bool],
        make_watch: Callable[[], Watch] | None,
    ) -> RankRuns:
        micro_batch = self._survey.micro_batches[number]
        suspect, step = self._survey.own.get(number), self._step_squares(number)
        # As the sensors have seen the step's: of this rank alone.
        runner.is_local = True
        runs: list[list[float]] = []
        losses: list[float] = []
        seen: Any = None
        for _ in range(max_replays):
            one = self._once(runner, micro_batch, None if seen is not None or make_watch is None else make_watch())
            if one is None:
                break
            runs.append(one[0])
            losses.append(one[1])
            seen = one[2] if seen is None else seen
            needs_more = suspect is not None and suspect.is_suspect and not stops(runs)
            if not self._lock.agree(wants_more=needs_more).wants_more:
                break
        unscaled = None
        if self._replayer.scale() is not None:
            runner.is_scaled = False
            last = self._once(runner, micro_batch, None)
            unscaled = None if last is None else last[0]
        return RankRuns(suspect, step, runs, losses, unscaled, seen)

    def _once(
        self, runner: _Runner, micro_batch: MicroBatch | None, watch: Watch | None
    ) -> tuple[list[float], float, Any] | None:
        """One pass on all ranks; `None` if any of them has failed."""
        with contextlib.ExitStack() as stack:
            if watch is not None:
                self._lock.attempt(lambda: stack.enter_context(watch))
            self._lock.attempt(lambda: runner.forward(micro_batch))
            if self._lock.agree().has_failed:
                return None
            seen = self._lock.attempt(lambda: runner.backward(None))
            found = None
            if watch is not None and seen is not None and micro_batch is not None:
                names = self._store.index.names
                gradients = list(zip(names, runner.take_gradients(), strict=True))
                found = self._lock.attempt(lambda: watch.found(gradients, runner.loss))
            loss = math.nan if micro_batch is None else runner.loss
            runner.drop()
            if self._lock.agree().has_failed or seen is None:
                return None
            return seen.squares.to("cpu", torch.float64).reshape(-1).tolist(), loss, found

    def _step_squares(self, number: int) -> list[float] | None:
        """Of the rank's own gradient of a micro-batch, as the step had it."""
        rows = self._local.current
        squares = rows[number] if number < len(rows) else None
        if squares is None and self._store.reducer.world_size == len(self._survey.micro_batches) == 1:
            squares = None if self._store.current is None else self._store.current.squares
        return None if squares is None else squares.to("cpu", torch.float64).tolist()


class _NoTap:
    """Stands for a `Tap` where nothing is gated."""

    name = "nothing"
    note: str | None = None

    @contextlib.contextmanager
    def on(self, gate: Any) -> Iterator[None]:
        """Gate nothing."""
        yield

    def fall_back(self) -> bool:
        """Nor anything else."""
        return False


class _Runner(Prober):
    """A prober of local square sums alone, without a gate of its own.

    Attributes:
        is_local: Whether square sums are of this rank only, not of all that have its data.
        is_scaled: Whether the loss is multiplied by the loss scale, not by a very low one.
        loss: Of the last forward, without it; NaN where there was none.
    """

    is_scaled = True
    is_local = False
    loss = math.nan

    def _forward(self, micro_batch: MicroBatch) -> None:
        self._run(micro_batch)
        self.gate.seal()
        scale = self._replayer.scale()
        assert self._loss is not None
        value = self._loss.detach()
        self.loss = float(value if scale is None else value / scale.to(value.device))
        if scale is not None and not self.is_scaled:
            scale = scale.to(self._loss.device)
            self._loss = self._loss * (_low(scale) / scale)

    def _summed(self, squares: Tensor) -> Tensor:
        squares = squares if self.is_local else super()._summed(squares)
        scale = self._replayer.scale()
        if self.is_scaled or scale is None:
            return squares
        # The scale that is taken out of it afterwards is not the one in it.
        scale = scale.to(squares.device, squares.dtype)
        return squares * (scale / _low(scale)).square()


def _low(scale: Tensor) -> Tensor:
    """A loss scale at which nothing overflows that is not infinite by itself: a power of two, as scales are."""
    return scale.clamp(max=1.0) * 2.0**-48
