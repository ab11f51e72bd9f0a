"""What the noise scale means for the batch in use, in one of four words and a sentence that do not flicker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, TypeAlias

__all__ = ["Advice", "Advised", "Verdict"]

Verdict: TypeAlias = Literal["larger", "matched", "wasted", "unreliable"]

# Zones in the order of the ratio, and the boundaries between them.
_ZONES: tuple[Verdict, ...] = ("wasted", "matched", "larger")
_BOUNDARIES = (0.5, 2.0)
# A boundary is crossed only when clear by so many standard errors and by this share more: a ratio that hovers at 2 with
# an error of 10 % then crosses about once in 10,000 steps, not 450 times.
_NUM_ERRORS = 2.0
_MARGIN = 0.1

_MEANINGS: dict[Verdict, str] = {
    "larger": "a larger batch would pay",
    "matched": "the batch is well matched",
    "wasted": "samples are wasted, a smaller batch would learn nearly as much a step",
}


class Advised(NamedTuple):
    """What `Advice.take` returns: one word, and a sentence for people."""

    verdict: Verdict
    sentence: str


class Advice:
    """Says what a ratio of noise scale to batch means. It changes nothing, and lives on the host.

    Over 2 a larger batch would pay, between 0.5 and 2 it is well matched, under 0.5 samples are wasted. The ratio moves
    on to another zone only when it is beyond the boundary by two standard errors and 10 %; the zone is remembered while
    the ratio is unreliable.

    From: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), section 2.2: a step with a batch B
    makes 1 / (1 + noise scale / B) of the progress of one without noise, so both time and samples are within a factor
    of 3 of their best between 0.5 and 2.

    Example:
        >>> advice = Advice()
        >>> advice.take(3.2, stderr=0.2, reliable=True).sentence
        'The noise scale is 3.2 +- 0.2 times the batch: a larger batch would pay.'
        >>> advice.take(1.9, stderr=0.2, reliable=True).verdict
        'larger'
        >>> advice.take(1.2, stderr=0.1, reliable=True).verdict
        'matched'
    """

    UNRELIABLE: ClassVar[str] = "The noise scale is not known: the gradient does not stand clear of its noise."

    def __init__(self) -> None:
        self._zone: int | None = None

    def take(self, ratio: float, *, stderr: float, reliable: bool) -> Advised:
        """The next ratio, in order.

        Args:
            ratio: Noise scale over the batch in use, both in the same unit.
            stderr: Standard error of the ratio.
            reliable: As of `NoiseScaleReading`.

        Returns:
            A verdict and its sentence; "unreliable" too for numbers that are not finite.
        """
        if not (reliable and math.isfinite(ratio) and math.isfinite(stderr)):
            return Advised("unreliable", self.UNRELIABLE)
        plain = _zone_of(ratio)
        if self._zone is None:
            self._zone = plain
        elif plain > self._zone:
            self._zone = max(self._zone, _zone_of((ratio - _NUM_ERRORS * stderr) / (1 + _MARGIN)))
        elif plain < self._zone:
            self._zone = min(self._zone, _zone_of((ratio + _NUM_ERRORS * stderr) * (1 + _MARGIN)))
        verdict = _ZONES[self._zone]
        doubt = "" if plain == self._zone else f", as before; it is not clearly {_side(self._zone, plain)}"
        return Advised(
            verdict, f"The noise scale is {ratio:.2g} +- {stderr:.2g} times the batch: {_MEANINGS[verdict]}{doubt}."
        )

    def state_dict(self) -> dict[str, int | None]:
        """Which zone the ratio was in, plain types."""
        return {"zone": self._zone}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Take over a state.

        Args:
            state: What `state_dict` gave.

        Raises:
            ValueError: If it is none of those.
        """
        if list(state) != ["zone"] or state["zone"] not in (None, *range(len(_ZONES))):
            raise ValueError(f"advice: the saved state is {dict(state)!r}, expected a zone of None, 0, 1 or 2")
        self._zone = state["zone"]


def _zone_of(ratio: float) -> int:
    return sum(ratio > boundary for boundary in _BOUNDARIES)


def _side(zone: int, plain: int) -> str:
    """The boundary that has not been crossed for sure."""
    return f"over {_BOUNDARIES[zone]:g}" if plain > zone else f"under {_BOUNDARIES[zone - 1]:g}"
