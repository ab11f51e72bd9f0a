"""An incident of thousands of ranks, short enough to be read and kept."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from stabilizer.localize.incident import Incident, MicroBatchReport, OtherMicroBatches

__all__ = ["first_of", "shortened"]

_MAX_SUSPECTS, _MAX_OTHERS = 128, 32
_MAX_TOKENS, _MAX_GROUPS = 100, 32
_MAX_NOTES = 24
_MAX_TEXT = 4000


def shortened(incident: Incident) -> Incident:
    """Leave out of an incident what only its number of ranks makes long, and say how much that is.

    Args:
        incident: With everything that is known, its sentence too.

    Returns:
        The suspicious micro-batches (the 128 largest), the 32 largest of the others and a summary of the rest, the
        first tokens (100), candidates (32) and notes (24). What fits is left as it is.

    Example:
        >>> local = tuple(MicroBatchReport(rank=rank, micro_batch=0, norm=float(rank)) for rank in range(1, 1001))
        >>> short = shortened(Incident(step=7, type="D", observed_norm=9.0, threshold=3.0, micro_batches=local))
        >>> len(short.micro_batches), short.other_micro_batches
        (32, OtherMicroBatches(num=968, median_norm=484.5, largest_norm=968.0, num_suspects=0))
    """
    kept, rest = _largest(incident.micro_batches)
    notes = incident.notes
    for name, found, limit in (
        ("tokens", incident.tokens, _MAX_TOKENS),
        ("candidates", incident.candidates, _MAX_GROUPS),
    ):
        if len(found) > limit:
            notes = (*notes, f"{len(found) - limit} more {name} are not listed")
    return dataclasses.replace(
        incident,
        micro_batches=kept,
        other_micro_batches=rest,
        tokens=incident.tokens[:_MAX_TOKENS],
        candidates=incident.candidates[:_MAX_GROUPS],
        # The last ones are those of the search as a whole.
        notes=tuple(first_of(notes, num=_MAX_NOTES, num_last=_MAX_NOTES // 3)),
        error=None if incident.error is None else _cut(incident.error),
    )


def first_of(texts: Sequence[str], *, num: int, num_last: int = 0) -> list[str]:
    """The first of many texts, and how many there are.

    Args:
        texts: Such as one of every rank.
        num: How many are kept.
        num_last: How many of them are the last ones.

    Example:
        >>> first_of(["a", "b", "c", "d", "e"], num=3, num_last=1)
        ['a', 'b', 'and 2 more', 'e']
    """
    texts = [_cut(text) for text in texts]
    if len(texts) <= num:
        return texts
    end = len(texts) - num_last
    return [*texts[: num - num_last], f"and {len(texts) - num} more", *texts[end:]]


def _largest(found: Sequence[MicroBatchReport]) -> tuple[tuple[MicroBatchReport, ...], OtherMicroBatches | None]:
    """Those that are listed, in their order, and what is said of the rest."""
    numbers = sorted(range(len(found)), key=lambda number: -_size(found[number]))
    suspects = [number for number in numbers if found[number].is_suspect]
    others = [number for number in numbers if not found[number].is_suspect]
    listed = {*suspects[:_MAX_SUSPECTS], *others[:_MAX_OTHERS]}
    rest = [found[number] for number in numbers if number not in listed]
    if not rest:
        return tuple(found), None
    summary = OtherMicroBatches(
        num=len(rest),
        median_norm=statistics.median(map(_size, rest)),
        largest_norm=rest[0].norm,
        num_suspects=sum(one.is_suspect for one in rest),
    )
    return tuple(one for number, one in enumerate(found) if number in listed), summary


def _size(one: MicroBatchReport) -> float:
    return one.norm if math.isfinite(one.norm) else math.inf


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
