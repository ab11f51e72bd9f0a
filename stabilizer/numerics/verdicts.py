"""Verdicts: what running a micro-batch again says, in square sums of gradients by unit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stabilizer.numerics.finding import Verdict

__all__ = ["combined", "is_alike", "judge", "settled"]

# A unit that is a small part of the gradient may be rounding alone (the bias of a key projection): it differs if it
# does by this part of the whole too.
_PART_OF_WHOLE = 1e-3


def is_alike(one: Sequence[float], other: Sequence[float], *, tolerance: float) -> bool:
    """Whether two gradients have the same norms unit by unit, and are not finite in the same units.

    Args:
        one: Square sums by unit, shape (units,).
        other: Likewise.
        tolerance: Largest relative difference between norms.

    Example:
        >>> is_alike([4.0, math.nan], [4.01, math.inf], tolerance=0.01)
        True
        >>> is_alike([4.0, math.nan], [4.0, 1.0], tolerance=0.01)
        False
    """
    if len(one) != len(other):
        return False
    whole = math.sqrt(max(sum(square for square in squares if math.isfinite(square)) for squares in (one, other)))
    for first, second in zip(one, other, strict=True):
        if math.isfinite(first) != math.isfinite(second):
            return False
        if math.isfinite(first):
            a, b = math.sqrt(first), math.sqrt(second)
            if abs(a - b) > tolerance * (max(a, b) + _PART_OF_WHOLE * whole):
                return False
    return True


def judge(
    step: Sequence[float] | None,
    runs: Sequence[Sequence[float]],
    *,
    limit: float,
    tolerance: float,
    chosen: Sequence[bool] | None = None,
) -> Verdict:
    """What the replays of one rank's micro-batch say.

    Args:
        step: Square sums by unit as the step had them; `None` if they are not known.
        runs: Those of the replays.
        limit: Largest norm that is usual; not finite if that is not known.
        tolerance: Largest relative difference between a norm and its replay.
        chosen: Which units the limit is for; `None` for all.

    Returns:
        "repeats" if all replays are as the step; "nondeterministic" if they differ from one another, or from the step
        and are out of the ordinary still; "transient" if they are alike and in order, and the step is not.

    Example:
        >>> judge([9e6, 1.0], [[4.0, 1.0], [4.0, 1.0]], limit=10.0, tolerance=0.01)
        'transient'
        >>> judge([9e6, 1.0], [[9e6, 1.0], [9e6, 1.0]], limit=10.0, tolerance=0.01)
        'repeats'
        >>> judge([9e6, 1.0], [[4.0, 1.0], [9e6, 1.0]], limit=10.0, tolerance=0.01)
        'nondeterministic'
    """
    if not runs:
        return "unknown"
    if not all(is_alike(runs[0], run, tolerance=tolerance) for run in runs[1:]):
        return "nondeterministic"
    if step is not None and is_alike(step, runs[0], tolerance=tolerance):
        return "repeats"
    norm = math.inf
    if all(map(math.isfinite, runs[0])):
        norm = math.sqrt(sum(square for at, square in enumerate(runs[0]) if chosen is None or chosen[at]))
    is_usual = norm <= limit if math.isfinite(limit) else math.isfinite(norm)
    if step is None:
        return "unknown" if is_usual else "repeats"
    return "transient" if is_usual else "nondeterministic"


def settled(runs: Sequence[Sequence[float]], *, tolerance: float) -> bool:
    """Whether further replays would change nothing: two of them differ.

    Args:
        runs: As of `judge`.
        tolerance: Likewise.
    """
    return any(not is_alike(runs[0], run, tolerance=tolerance) for run in runs[1:])


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict of those of all suspicious ranks: what a machine does wrong counts more than what repeats.

    Args:
        verdicts: Of each.

    Example:
        >>> combined(["repeats", "transient"])
        'transient'
    """
    order: tuple[Verdict, ...] = ("transient", "nondeterministic", "repeats")
    return next((verdict for verdict in order if verdict in verdicts), "unknown")
