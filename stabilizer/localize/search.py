"""The search for the units of a gate behind a gradient: says which to open next, reads norms, knows no model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator

import torch
from torch import Tensor

from stabilizer.localize.candidates import rank_units
from stabilizer.localize.halves import Field, Node, measure

__all__ = ["Answer", "Finding", "Request", "search"]

#: So many halvings whose norms are what the scores predict: no small set is behind it.
_EVEN_LEVELS = 4
#: Closing candidates that are part of the cause takes this much off the norm.
_FALL = 0.9
#: How many clusters of the ranking are closed, one more each time, before halves are tried.
_MAX_CLUSTERS = 3
#: An undecided set of more units says nothing that is worth a report.
_MAX_GROUP = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A pass that is wanted.

    Attributes:
        open: Which units are open in it, shape (units,), bool, where the scores are.
        purpose: "verify" (closed on a set that may be the cause), "none" (all closed), "shrink" (closed on a part of a
            set that is a cause) or "bisect" (a part of the units alone).
        parent: Keep the gradient of this pass, instead of any that is kept; after `subtract`.
        subtract: Answer with the norm of (kept gradient - gradient of this pass) too, where that can be done.
    """

    open: Tensor
    purpose: str
    parent: bool = False
    subtract: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a pass has shown.

    Attributes:
        norm: Of its gradient.
        rest: Norm of (kept gradient - its gradient); `None` if it was not asked for or is lost in rounding.
    """

    norm: float
    rest: float | None = None


@dataclasses.dataclass(frozen=True)
class Finding:
    """How a search has ended.

    Attributes:
        verdict: "tokens" (the norm is normal without `units`), "no_token" (not normal without any unit), "unexplained"
            (the units carry it, but no small set of them) or "unfinished" (no passes were left).
        units: Flat numbers, the largest score first; what was found so far if the verdict is not "tokens".
        counterfactual: Norm with the gate closed on `units`, or, of "no_token", on all; `None` if it was not measured.
        num_passes: How many passes were asked for.
        groups: Undecided sets whose own gradient is too large, where the passes have ended; none of over 1,024 units.
    """

    verdict: str
    units: tuple[int, ...] = ()
    counterfactual: float | None = None
    num_passes: int = 0
    groups: tuple[tuple[int, ...], ...] = ()


def search(scores: Tensor, *, norm: float, limit: float, max_passes: int) -> Generator[Request, Answer, Finding]:
    """Find the units behind a gradient that is too large.

    First the units that stand out by their score (`stabilizer.localize.candidates`) are closed. If the norm is normal
    then, they are the cause; a much smaller part of them is tried once where it could do. If it has fallen but is not
    normal, the next ones that stand out are closed too. Otherwise all are closed, which tells a gradient that comes
    through no unit, and what is left is bisected: depth first, the half with the larger scores first, halves of equal
    weight (half by number, half by score: a ranking that is nearly right makes it short, and a wrong one not longer by
    more than two passes). Halves whose norms are again and again what the scores predict mean that all units have grown
    alike, which no small set explains. A cause is named only after a pass without it was normal.

    Args:
        scores: Norm of the gradient that arrives at each unit in a pass with all of them open, shape (units,); NaN and
            infinity are the first candidates.
        norm: Of the gradient of that pass.
        limit: The largest norm that is normal.
        max_passes: How many passes may be asked for.

    Yields:
        A pass; to be answered.

    Returns:
        What was found. A norm that is normal at once is "unexplained", with no pass.

    Raises:
        ValueError: If the scores are no vector.

    Example:
        >>> gradients = torch.tensor([1.0, 30.0, 1.0, 2.0])
        >>> hunt = search(gradients.abs(), norm=34.0, limit=10.0, max_passes=16)
        >>> request = next(hunt)
        >>> request.purpose, request.open.tolist()
        ('verify', [True, False, True, True])
        >>> try:
        ...     hunt.send(Answer(gradients[request.open].sum().item()))
        ... except StopIteration as end:
        ...     end.value
        Finding(verdict='tokens', units=(1,), counterfactual=4.0, num_passes=1, groups=())
    """
    if scores.ndim != 1:
        raise ValueError(f"scores has shape {tuple(scores.shape)}: expected (units,), one number a unit")
    hunt = _Hunt(scores, norm=norm, limit=limit, max_passes=max_passes)
    try:
        return (yield from hunt.run())
    except _NoPassLeft:
        return (yield from hunt.give_up())


class _NoPassLeft(Exception):
    """The passes that may be asked for have been."""


class _Hunt:
    """State of one search. Units go by their rank."""

    def __init__(self, scores: Tensor, *, norm: float, limit: float, max_passes: int) -> None:
        self._ranking = rank_units(scores)
        self._num_units, self._device = scores.numel(), scores.device
        self._norm, self._limit, self._max_passes = norm, limit, max_passes
        self._num_passes = 0
        self._found: list[int] = []
        self._without: float | None = None  # norm without what is found, once measured
        self._search_from(0, norm)
        self._kept: Node | None = None  # whose gradient is kept

    def run(self) -> Generator[Request, Answer, Finding]:
        """Search."""
        if self._norm <= self._limit:
            return self.finding("unexplained")
        if (yield from self._close_outliers()):
            return self.finding("tokens")
        norm = self._field.root.norm
        # Else all that has a gradient is closed already.
        if len(self._field.root) or not len(self._ranking):
            norm = (yield from self._ask(self._mask(False), "none")).norm
        if self._is_high(norm):
            self._found, self._without = [], norm
            return self.finding("no_token")
        return (yield from self._bisect())

    def give_up(self) -> Generator[Request, Answer, Finding]:
        """End without the passes that it would take, with what is found so far."""
        is_proof_due = self._found and self._without is None and self._num_passes < self._max_passes
        if is_proof_due and not self._is_high((yield from self._close(torch.tensor(self._found)))):
            return self.finding("tokens")
        return self.finding("unfinished")

    def finding(self, verdict: str) -> Finding:
        """What is known."""
        nodes = [node for node in self._nodes if verdict == "unfinished" and len(node) <= _MAX_GROUP]
        groups = tuple(self._units(self._field.ranks_of(node)) for node in nodes)
        units = self._units(torch.tensor(sorted(self._found), dtype=torch.int64))
        return Finding(verdict, units, self._without, self._num_passes, groups)

    # By score.

    def _close_outliers(self) -> Generator[Request, Answer, bool]:
        """Close what stands out; whether that is the cause. If not, the others are what is searched from now on."""
        guilty, end, norm = 0, self._ranking.first(norm=self._norm, limit=self._limit), self._norm
        for _ in range(_MAX_CLUSTERS):
            if end == guilty:
                break
            without = yield from self._close(torch.arange(end))
            self._search_from(end, without)
            if not self._is_high(without):
                self._found = list(range(end))
                if not guilty:
                    yield from self._shrink(end, without)
                return True
            if not math.isfinite(without) or without > _FALL * norm:
                break
            guilty, norm = end, without
            end = self._ranking.next(end, norm=norm, limit=self._limit)
        # By this much at least they are too large themselves: that takes no pass.
        self._found = list(range(guilty)) if self._norm - norm > self._limit else []
        self._without = norm if self._found else None
        return False

    def _shrink(self, end: int, without: float) -> Generator[Request, Answer, None]:
        smaller = self._ranking.smaller(end, norm=self._norm, closed=without, limit=self._limit)
        if not smaller or self._num_passes == self._max_passes:
            return
        norm = (yield from self._ask(self._mask(True, torch.arange(smaller)), "shrink")).norm
        if not self._is_high(norm):
            self._found, self._without = list(range(smaller)), norm

    # By halves.

    def _bisect(self) -> Generator[Request, Answer, Finding]:
        while self._nodes:
            while self._nodes:
                # A part is never much larger than the whole, so that the largest of all is deep rather than broad.
                node = max(self._nodes, key=lambda node: node.norm if math.isfinite(node.norm) else math.inf)
                if not (yield from self._descend(node)):
                    return self.finding("unexplained")
            without = yield from self._close(torch.tensor(self._found))
            if not self._is_high(without):
                return self.finding("tokens")
            self._search_from(0, without)
        return self.finding("unexplained")

    def _descend(self, node: Node) -> Generator[Request, Answer, bool]:
        """Go down to one unit of a node; false if the norms go down as if all units had grown alike."""
        num_even = 0
        num_uneven = int(len(node) == 1)
        while len(node) > 1:
            left, right = self._field.halves(node)
            mask = self._mask(False, self._field.ranks_of(left))
            answer = yield from self._ask(mask, "bisect", keep=left, can_subtract=self._kept is node)
            measure(node, left, right, norm=answer.norm, rest=answer.rest)
            is_even = self._field.is_even(left, right)
            num_even += is_even is True
            num_uneven += is_even is False
            # Below a few bad units every level but the first few is uneven; one may be so by chance.
            if num_even == _EVEN_LEVELS and num_uneven <= 1:
                return False
            self._nodes.remove(node)
            is_left_high = self._is_high(left.norm)
            if is_left_high and self._is_high(right.norm):
                self._nodes.append(right)
            node = left if is_left_high or right.most < left.norm else right
            self._nodes.append(node)
        if not num_uneven:
            return False
        self._nodes.remove(node)
        self._found += self._field.ranks_of(node).tolist()
        self._without = None
        return True

    def _search_from(self, start: int, norm: float) -> None:
        """Search all units from a rank on that are not found; `norm` is of the last pass, which had no others open."""
        is_searched = torch.ones(len(self._ranking), dtype=torch.bool)
        is_searched[:start] = False
        is_searched[self._found] = False
        self._field = Field(is_searched.nonzero().flatten(), self._ranking.logs, norm=norm)
        self._kept = self._field.root
        self._nodes = [self._field.root] if len(self._field.root) else []

    # Passes.

    def _close(self, ranks: Tensor) -> Generator[Request, Answer, float]:
        """The norm without some units; what is searched next is searched in the gradient of the others."""
        answer = yield from self._ask(self._mask(True, ranks), "verify", keep=Node(0, 0))
        self._without = answer.norm
        return answer.norm

    def _ask(
        self, opened: Tensor, purpose: str, *, keep: Node | None = None, can_subtract: bool = False
    ) -> Generator[Request, Answer, Answer]:
        # The last pass is for what is found and not yet proved.
        num_reserved = int(purpose == "bisect" and bool(self._found) and self._without is None)
        if self._num_passes + num_reserved >= self._max_passes:
            raise _NoPassLeft
        self._num_passes += 1
        answer = yield Request(opened.to(self._device), purpose, parent=keep is not None, subtract=can_subtract)
        if keep is not None:
            self._kept = keep
        return answer

    def _mask(self, is_open: bool, others: Tensor | None = None) -> Tensor:
        """Which units are open: all or none, but for those of some ranks."""
        mask = torch.full((self._num_units,), is_open)
        if others is not None:
            mask[self._ranking.units[others]] = not is_open
        return mask

    def _units(self, ranks: Tensor) -> tuple[int, ...]:
        return tuple(self._ranking.units[ranks].tolist())

    def _is_high(self, norm: float) -> bool:
        # Not >: what is not finite is high.
        return not norm <= self._limit
