"""From the replays of all ranks to one verdict, one rank and its micro-batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from stabilizer.localize.runs import RankRuns, Reruns
from stabilizer.numerics.finding import Verdict
from stabilizer.numerics.verdicts import combined, judge

__all__ = ["Judgement", "has_bad_loss", "is_suspect", "judgement", "norm_of"]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What the replays of a step say, the same on every rank.

    Attributes:
        verdict: Of all ranks together.
        reason: Why, where the verdict alone does not say it.
        rank: Which one is named; `None` where none can be.
        verdicts: Of every suspicious rank's own replays.
        runs: Of the rank that is named, if it has run anything.
    """

    verdict: Verdict
    reason: str
    rank: int | None
    verdicts: Mapping[int, Verdict]
    runs: RankRuns | None


def judgement(found: Reruns, *, tolerance: float, world_size: int) -> Judgement:
    """Judge what was run again.

    Args:
        found: On all ranks.
        tolerance: Largest relative difference between a norm and its replay.
        world_size: How many ranks there are.

    Example:
        >>> judgement(Reruns(errors=["rank 1: no loss"]), tolerance=0.01, world_size=2).verdict
        'unknown'
    """
    chosen = None if found.suspicion is None else found.suspicion.chosen.tolist()
    verdicts: dict[int, Verdict] = {}
    for number, own in enumerate(found.ranks):
        if is_suspect(own):
            limit = math.inf if own.suspect is None else own.suspect.limit
            verdicts[number] = judge(own.step, own.runs, limit=limit, tolerance=tolerance, chosen=chosen)
    verdict, reason = _verdict(found, verdicts)
    rank = 0 if world_size == 1 else _named(found, verdicts, verdict, tolerance=tolerance)
    runs = found.ranks[rank] if rank is not None and rank < len(found.ranks) else None
    return Judgement(verdict, reason, rank, verdicts, runs)


def is_suspect(own: RankRuns) -> bool:
    """Whether a rank's own gradient was out of the ordinary.

    Args:
        own: The rank's passes.
    """
    return own.suspect is not None and own.suspect.is_suspect


def has_bad_loss(own: RankRuns) -> bool:
    """Whether a replay's loss was not finite.

    Args:
        own: The rank's passes.
    """
    return any(not math.isfinite(loss) for loss in own.losses)


def norm_of(squares: Sequence[float]) -> float:
    """Norm of a whole gradient.

    Args:
        squares: By unit.

    Returns:
        NaN if any of them is not finite.
    """
    return math.sqrt(sum(squares)) if all(map(math.isfinite, squares)) else math.nan


def _verdict(found: Reruns, verdicts: Mapping[int, Verdict]) -> tuple[Verdict, str]:
    if found.largest is not None and not found.is_local:
        return "transient", (
            f"run again, the ranks' own gradients are in order (at most {found.largest:.3g} in all); what they were in "
            "the step is not known: it does not repeat, or it was changed after the backward passes"
        )
    if found.largest is not None:
        return "transient", (
            f"the ranks' own gradients are in order (at most {found.largest:.3g} in all): the step's was changed after "
            "the backward passes, in the reduction, on the way between ranks, or by code that changes it"
        )
    if found.errors or not verdicts:
        return "unknown", "; ".join(found.errors[:2]) or "no micro-batch is out of the ordinary"
    verdict = combined(list(verdicts.values()))
    if verdict == "repeats" and all(_is_overflow(found.ranks[number]) for number in verdicts):
        return "scaler_overflow", ""
    if verdict == "unknown":
        return verdict, "it comes out in order, and what the step's own gradient was is not known"
    return verdict, ""


def _named(found: Reruns, verdicts: Mapping[int, Verdict], verdict: Verdict, *, tolerance: float) -> int | None:
    """Of the ranks with the verdict the one that is farthest out."""
    if found.largest is not None:
        return _odd_one(found.norms, tolerance=tolerance)
    own = [number for number, one in verdicts.items() if one == verdict] or list(verdicts)
    if own:
        return max(own, key=lambda number: (_excess(found.ranks[number]), -number))
    suspects = {one.rank for one in found.suspects if one.is_suspect}
    return suspects.pop() if len(suspects) == 1 else None


def _is_overflow(own: RankRuns) -> bool:
    is_bad = any(not math.isfinite(square) for run in own.runs for square in run)
    is_fine = own.unscaled is not None and all(map(math.isfinite, own.unscaled))
    return is_bad and is_fine and not has_bad_loss(own)


def _excess(own: RankRuns) -> float:
    suspect = own.suspect
    if suspect is None:
        return 0.0
    return suspect.norm / suspect.limit if math.isfinite(suspect.norm) and suspect.limit > 0 else math.inf


def _odd_one(norms: Sequence[float], *, tolerance: float) -> int | None:
    """The rank whose gradient differs from that of the others, where all should have the same."""
    bad = [number for number, norm in enumerate(norms) if not math.isfinite(norm)]
    if bad:
        return bad[0] if len(bad) == 1 < len(norms) else None
    low, high = min(norms), max(norms)
    if high - low <= tolerance * high:
        return None
    ordered = sorted(norms)
    # Of two ranks the larger one is meant: that is what is out of the ordinary.
    middle = ordered[(len(norms) - 1) // 2]
    return max(range(len(norms)), key=lambda number: abs(norms[number] - middle))
