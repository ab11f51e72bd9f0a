"""One micro-batch searched by all ranks together, each in its own gradient."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.localize.lockstep import Lockstep
from stabilizer.localize.maps import Origin
from stabilizer.localize.prober import Pass, Prober
from stabilizer.localize.recording import MicroBatch
from stabilizer.localize.search import Answer, Finding, Request, search
from stabilizer.localize.suspects import Suspect
from stabilizer.localize.tokens import can_see_ratios, describe_units

# So much alike are square sums of one gradient in two passes.
_SAME = 1e-5

# Beyond it float32 leaves less than a part in a hundred of what is left of a subtraction.
_CANCELLATION = 1e5

__all__ = ["Budget", "LocalFinding", "MicroBatchSearch"]


@dataclasses.dataclass
class Budget:
    """What a search may cost.

    Attributes:
        passes: How many passes are left; the same number on every rank.
        end: When time is over on this rank, as of `time.monotonic`.
        tolerance: Largest relative difference between a norm and its replay.
    """

    passes: int
    end: float
    tolerance: float

    @property
    def is_late(self) -> bool:
        """Whether this rank's time is over."""
        return time.monotonic() > self.end


@dataclasses.dataclass
class LocalFinding:
    """What this rank has found in one micro-batch.

    Attributes:
        suspect: Why it was searched.
        verdict: "tokens", "no_token", "unexplained", "unfinished", "not_reproducible", "nonfinite"; "clean" on a rank
            without a suspect, whose gate was closed.
        replayed_norm: Local norm of the replay with an open gate.
        units: Units of the gate behind it, the largest score first.
        places: Row and position of each.
        scores: Norm of the gradient that arrived at each.
        share: Of each in the sum of squares of all scores.
        closed_norm: Local norm with the gate closed on `units`.
        origin: Where a value or a gradient is not finite for the first time, or where the gradient grows.
        groups: Undecided units, where the budget has ended.
        tokens: What the batch says of each unit, see `describe_units`.
        sees_ratios: Whether the batch has what importance ratios come from.
        is_gated: Whether the forward has passed a gate: without one no units can be told.
        map: Norm of the gradient of every block's output by position, shape (points, positions), and their names.
    """

    suspect: Suspect
    verdict: str = "clean"
    replayed_norm: float | None = None
    units: tuple[int, ...] = ()
    places: list[tuple[int, int | None]] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)
    share: list[float] = dataclasses.field(default_factory=list)
    closed_norm: float | None = None
    origin: Origin | None = None
    groups: list[list[tuple[int, int | None]]] = dataclasses.field(default_factory=list)
    tokens: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    sees_ratios: bool = False
    is_gated: bool = True
    map: tuple[list[str], list[list[float]]] | None = None


class MicroBatchSearch:
    """Replays one micro-batch and finds the units behind its norm.

    Every rank makes the same number of passes, since a pass may have collectives. A rank that has nothing to search, or
    has found what it sought, keeps its gate closed where it is closed and goes on taking part.

    Args:
        prober: Of this rank.
        lock: Keeps the ranks together.
        chosen: Which units of the store make up the norm that is searched, shape (units,), bool.
        budget: Of the whole incident.

    Attributes:
        opened: Reduced gradients of the replay, and `proved`: of the pass in which every rank's finding was closed;
            `None` where there was no such pass.
        outside: Chosen units of the store whose gradient does not come through the gate, shape (units,), bool.
    """

    def __init__(
        self, prober: Prober, lock: Lockstep, *, chosen: Tensor, budget: Budget, tokenizer: Any, redact: Sequence[str]
    ) -> None:
        self._tokenizer, self._redact = tokenizer, redact
        self._prober, self._lock, self._chosen, self._budget = prober, lock, chosen, budget
        self.opened: list[Tensor | None] | None = None
        self.proved: list[Tensor | None] | None = None
        self.outside = torch.zeros_like(chosen)
        self._scores: Tensor | None = None
        self._parent: list[Tensor | None] | None = None

    def run(self, micro_batch: MicroBatch | None, suspect: Suspect) -> LocalFinding | None:
        """Search; all ranks call this with the same micro-batch.

        Args:
            micro_batch: To run again; `None` where this rank has none of that number.
            suspect: This rank's part of it.

        Returns:
            `None` if any rank has failed.
        """
        lock, prober, found = self._lock, self._prober, LocalFinding(suspect)
        self.opened = self.proved = self._parent = None
        lock.attempt(lambda: prober.forward(micro_batch))
        agreed = lock.agree(wants_more=prober.is_partial)
        if agreed.has_failed:
            return None
        closed = torch.zeros(prober.gate.num_units, dtype=torch.bool, device=self._chosen.device)
        shut = None
        if agreed.wants_more:
            shut = lock.attempt(lambda: prober.backward(closed))
            self._budget.passes -= 1
        first = lock.attempt(lambda: prober.backward(None if suspect.is_suspect else closed))
        self._budget.passes -= 1
        plan = lock.attempt(lambda: self._begin(found, first, shut)) if suspect.is_suspect else None
        request = None if plan is None else lock.attempt(lambda: self._go_on(found, plan, None))
        agreed = lock.agree(wants_more=request is not None, is_late=self._budget.is_late)
        self.opened = prober.take_gradients()
        last = closed if not suspect.is_suspect else None
        while agreed.wants_more and not agreed.has_failed and not agreed.is_late and self._budget.passes > 0:
            mask = last if request is None else request.open
            answered = lock.attempt(lambda mask=mask: prober.backward(mask))  # type: ignore[misc]
            self._budget.passes -= 1
            is_proved = not suspect.is_suspect or (request is None and found.verdict == "tokens")
            gradients = prober.take_gradients()
            if request is not None and answered is not None:
                answer = Answer(self._norm(answered), self._rest(request, answered, gradients))
                is_proved = request.purpose in ("verify", "shrink") and answer.norm <= suspect.limit
                last = request.open if is_proved else last
                request = lock.attempt(lambda answer=answer: self._go_on(found, plan, answer))  # type: ignore[misc]
            agreed = lock.agree(wants_more=request is not None, is_unproved=not is_proved, is_late=self._budget.is_late)
            if not agreed.is_unproved:
                self.proved = gradients
        prober.drop()
        if agreed.has_failed:
            return None
        if request is not None:
            found.verdict = "unfinished"
        if micro_batch is not None:
            lock.attempt(lambda: self._describe(found, micro_batch))
        return None if lock.agree().has_failed else found

    def _begin(
        self, found: LocalFinding, first: Pass | None, shut: Pass | None
    ) -> Generator[Request, Answer, Finding] | None:
        """Look at the replay, and say what is to be searched in it."""
        if first is None:
            return None
        found.is_gated = self._prober.gate.is_used
        norm, observed = self._norm(first), found.suspect.norm
        found.replayed_norm, self._scores = norm, first.arrived
        is_same_kind = math.isfinite(norm) == math.isfinite(observed)
        if not is_same_kind or (
            math.isfinite(norm) and abs(norm - observed) > self._budget.tolerance * max(observed, norm)
        ):
            found.verdict = "not_reproducible"
            return None
        self._note_map(found)
        # What is born in the forward is not finite either where the gate is closed.
        if not math.isfinite(norm):
            return self._begin_nonfinite(found, first, shut)
        if shut is not None:
            norm = self._narrow(first, shut)
        if first.arrived is None:
            found.verdict = "no_token" if found.is_gated else "unexplained"
            return None
        found.origin = self._prober.watch.growth()
        return search(first.arrived, norm=norm, limit=found.suspect.limit, max_passes=self._budget.passes)

    def _narrow(self, first: Pass, shut: Pass) -> float:
        """Leave out of the norm what closing the gate does not change: it tells nothing of the units."""
        is_same = (first.squares - shut.squares).abs() <= _SAME * first.squares
        is_outside = (is_same & (shut.squares > 0)) | ~torch.isfinite(shut.squares)
        self.outside = self._chosen & is_outside
        self._chosen = self._chosen & ~is_outside
        return self._norm(first)

    def _begin_nonfinite(
        self, found: LocalFinding, first: Pass, shut: Pass | None
    ) -> Generator[Request, Answer, Finding] | None:
        found.verdict = "nonfinite"
        found.origin = self._prober.watch.first_nonfinite()
        if found.origin is not None:
            return None
        bad = None if first.arrived is None else ~torch.isfinite(first.arrived)
        if bad is None or bool(bad.all()) or not bool(bad.any()):
            found.origin = self._prober.watch.first_nonfinite_gradient()
            return None
        if shut is not None:
            self._narrow(first, shut)
            if not bool(self._chosen.any()):
                return None
        return _close_once(bad, limit=found.suspect.limit)

    def _go_on(
        self, found: LocalFinding, plan: Generator[Request, Answer, Finding] | None, answer: Answer | None
    ) -> Request | None:
        assert plan is not None
        try:
            return next(plan) if answer is None else plan.send(answer)
        except StopIteration as end:
            self._conclude(found, end.value)
            return None

    def _conclude(self, found: LocalFinding, result: Finding) -> None:
        found.verdict, found.units, found.closed_norm = result.verdict, result.units, result.counterfactual
        gate = self._prober.gate
        found.groups = [[_place(gate.locate(unit)) for unit in group] for group in result.groups]

    def _describe(self, found: LocalFinding, micro_batch: MicroBatch) -> None:
        """Say where the found units are, what has arrived at them, and what the batch says of them."""
        gate, scores = self._prober.gate, self._scores
        if not gate.is_used:
            return
        found.places = [_place(gate.locate(unit)) for unit in found.units]
        places = found.places
        if not places and found.origin is not None and found.origin.kind != "growth":
            places = [(found.origin.row, found.origin.position)]
        segment = gate.locate(found.units[0]).segment if found.units else 0
        shape, values = gate.shape(segment), gate.all_values(segment)
        found.sees_ratios = can_see_ratios(micro_batch.call(), shape, values=values, redact=self._redact)
        found.tokens = describe_units(
            micro_batch.call(), places, shape, self._tokenizer, values=values, redact=self._redact
        )
        if found.units and scores is not None:
            chosen = scores[torch.tensor(found.units, device=scores.device)].to(torch.float64)
            squares = scores.to(torch.float64).square()
            total = squares[torch.isfinite(squares)].sum()
            found.scores = chosen.tolist()
            found.share = (chosen.square() / total).tolist()

    def _note_map(self, found: LocalFinding) -> None:
        watch = self._prober.watch
        if watch.gradients is not None:
            found.map = (list(watch.names), watch.gradients.amax(1).tolist())

    def _rest(self, request: Request, answered: Pass, gradients: Sequence[Tensor | None]) -> float | None:
        """Norm of what a kept gradient has beside this pass's, where this rank has the whole of both.

        What is left of a subtraction is known to a few bits less than its parts: it must not be much smaller.
        """
        rest = None
        if request.subtract and self._parent is not None:
            squares = self._prober.squares_between(self._parent, gradients)
            if squares is not None:
                rest = self._norm(Pass(squares, None))
                if self._norm(answered) > _CANCELLATION * rest:
                    rest = None
        if request.parent and self._prober.has_own_gradients:
            self._parent = list(gradients)
        return rest

    def _norm(self, answered: Pass) -> float:
        squares = torch.where(self._chosen, answered.squares.to(torch.float64), 0.0)
        return float(squares.sum().sqrt())


def _close_once(bad: Tensor, *, limit: float) -> Generator[Request, Answer, Finding]:
    """A value that is not finite and was born at or after the gate: is everything well without these units?"""
    units = tuple(torch.nonzero(bad).flatten().tolist())
    answer = yield Request(open=~bad, purpose="verify", parent=False, subtract=False)
    is_well = math.isfinite(answer.norm) and answer.norm <= limit
    verdict = "tokens" if is_well else "nonfinite"
    return Finding(verdict, units if math.isfinite(answer.norm) else (), answer.norm, 1, ())


def _place(place: object) -> tuple[int, int | None]:
    return place.row, place.position  # type: ignore[attr-defined]
