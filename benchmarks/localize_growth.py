"""Rows of how many passes a search takes, by the number of units; see search_growth.py for all of them."""

from __future__ import annotations

from benchmarks.search_growth import count_passes
from benchmarks.timing import Figure

__all__ = ["growth"]

_SIZES = (10**3, 10**4, 10**5, 10**6, 10**7)


def growth(*, tiny: bool = False) -> list[Figure]:
    """Passes after the replay, for one planted unit.

    Args:
        tiny: Try it out.

    Returns:
        One figure for each number of units, where the unit's own score is large and where it is an average one.
    """
    figures = []
    for is_hidden, scores, target in ((False, "large", 2.0), (True, "average", None)):
        for num_units in _SIZES[:2] if tiny else _SIZES:
            counted = count_passes(num_units, 1, is_hidden=is_hidden)
            assert counted.is_exact, counted
            what = f"passes among {num_units:,} units, one bad, its score {scores}"
            how = f"one linear layer, {counted.seconds:.2g} s"
            figures.append(Figure("growth", what, float(counted.num_passes), "passes", target, how))
    return figures
