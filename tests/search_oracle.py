"""A gradient made of units that can be closed one by one: what a search is played against.

It knows nothing of the package: a request is answered by adding up the gradients of what is open.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Case", "Played", "fault", "healthy", "play"]

Array = npt.NDArray[np.float64]
#: Below this share of the other part, a difference of two float32 gradients is rounding.
_CANCELLATION = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One micro-batch.

    Attributes:
        gradients: Of every unit, shape (units, dimensions).
        scores: Norm of the gradient that arrives at each, before the Jacobian below the gate, shape (units,).
        rest: Gradient that comes through no unit, shape (dimensions,).
        limit: The largest norm that is normal.
        bad: Units that are planted.
    """

    gradients: Array
    scores: Array
    rest: Array
    limit: float
    bad: frozenset[int] = frozenset()

    def norm(self, is_open: npt.NDArray[np.bool_] | None = None) -> float:
        """Norm of the gradient of what is open; of all without an argument.

        Args:
            is_open: Shape (units,).
        """
        return float(np.linalg.norm(self.gradient(is_open)))

    def gradient(self, is_open: npt.NDArray[np.bool_] | None = None) -> Array:
        """Gradient of what is open; of all without an argument.

        Args:
            is_open: Shape (units,).
        """
        opened = self.gradients if is_open is None else self.gradients[is_open]
        return np.asarray(opened.sum(0) + self.rest)

    def without(self, units: Any) -> float:
        """Norm with the gate closed on some units.

        Args:
            units: Their numbers.
        """
        is_open = np.ones(len(self.scores), np.bool_)
        is_open[list(units)] = False
        return self.norm(is_open)

    @property
    def is_ranked(self) -> bool:
        """Whether the planted units have the largest scores: else no rule that reads scores could name them alone."""
        is_bad = np.isin(np.arange(len(self.scores)), list(self.bad))
        return bool(self.scores[is_bad].min() > self.scores[~is_bad].max(initial=0))


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """How a search went.

    Attributes:
        finding: Of the search.
        purposes: Of its passes.
    """

    finding: Any
    purposes: tuple[str, ...]


def play(hunt: Generator[Any, Any, Any], case: Case, answer: Any, *, has_rest: bool = False) -> Played:
    """Answer a search until it ends.

    Args:
        hunt: The search.
        case: What it searches in.
        answer: Makes an answer from a norm and the norm of the difference.
        has_rest: Whether gradients are kept, in float32, and differences told where float32 can.

    Raises:
        AssertionError: If the difference to a gradient is wanted that does not hold what is open.
    """
    purposes: list[str] = []
    kept: npt.NDArray[np.bool_] | None = None
    try:
        request = next(hunt)
        while True:
            purposes.append(request.purpose)
            is_open = request.open.numpy()
            assert request.open.dtype == torch.bool
            assert is_open.shape == case.scores.shape
            norm, rest = case.norm(is_open), None
            if request.subtract:
                assert kept is not None
                assert (is_open <= kept).all(), "opens what is closed in the gradient that it is subtracted from"
                rest = _difference(case.gradient(kept), case.gradient(is_open)) if has_rest else None
            kept = is_open.copy() if request.parent else kept
            request = hunt.send(answer(norm, rest))
    except StopIteration as end:
        return Played(end.value, tuple(purposes))


def _difference(kept: Array, now: Array) -> float | None:
    difference = float(np.linalg.norm((kept.astype(np.float32) - now.astype(np.float32)).astype(np.float64)))
    is_lost = not math.isfinite(difference) or difference < _CANCELLATION * float(np.linalg.norm(now))
    return None if is_lost else difference


def healthy(
    rng: np.random.Generator,
    num_units: int = 2048,
    *,
    std: float = 1.0,
    jacobian: float = 0.5,
    tail: float | None = None,
    zeros: float = 0.0,
    common: float = 0.0,
    dim: int = 32,
) -> Case:
    """A micro-batch with nothing wrong: log-normal scores, log-normal Jacobians, random directions.

    Args:
        rng: Random numbers.
        num_units: How many units.
        std: Deviation of the log-scores.
        jacobian: Log-deviation of the factor from score to gradient.
        tail: Degrees of freedom of the log-scores; normal if there are none.
        zeros: Share of units without gradient.
        common: How far all directions are one, from 0 to 1.
        dim: Dimensions.

    Returns:
        The case; its limit is twice its norm.
    """
    logs = rng.normal(size=num_units) if tail is None else rng.standard_t(tail, num_units)
    scores = np.exp(std * logs) * (rng.random(num_units) >= zeros)
    directions = _unit(rng.normal(size=(num_units, dim)))
    directions = _unit((1 - common) * directions + common * _unit(rng.normal(size=dim)))
    gradients = (scores * np.exp(jacobian * rng.normal(size=num_units)))[:, None] * directions
    case = Case(gradients, scores, np.zeros(dim), math.nan)
    return dataclasses.replace(case, limit=2 * case.norm())


def fault(
    rng: np.random.Generator,
    case: Case,
    num_bad: int,
    *,
    ratio: float,
    decades: float = 0.0,
    jacobian: float = 0.5,
    is_hidden: bool = False,
    is_aligned: bool = False,
) -> Case:
    """Make some units bad.

    Args:
        rng: Random numbers.
        case: The healthy one.
        num_bad: How many.
        ratio: The norm that comes out, in limits.
        decades: Over how many their strengths go.
        jacobian: Log-deviation of the factor from score to gradient.
        is_hidden: Whether their scores say nothing: they are those of average units.
        is_aligned: Whether their gradients have one direction.
    """
    bad = rng.choice(np.flatnonzero(case.scores), num_bad, replace=False)
    strengths = 10 ** -np.linspace(0, decades, num_bad)
    directions = _unit(rng.normal(size=(num_bad, case.rest.size)))
    directions = np.broadcast_to(directions[:1], directions.shape) if is_aligned else directions
    planted = strengths[:, None] * directions
    gradients, scores = case.gradients.copy(), case.scores.copy()
    gradients[bad] = 0
    others, sum_planted = gradients.sum(0) + case.rest, planted.sum(0)
    # |others + x planted| = ratio * limit.
    x = np.roots(
        [
            sum_planted @ sum_planted,
            2 * others @ sum_planted,
            others @ others - (ratio * case.limit) ** 2,
        ]
    ).max()
    gradients[bad] = x * planted
    factors = np.exp(jacobian * rng.normal(size=num_bad))
    scores[bad] = np.median(scores[scores > 0]) * factors if is_hidden else x * strengths / factors
    return dataclasses.replace(case, gradients=gradients, scores=scores, bad=frozenset(bad.tolist()))


def _unit(vectors: Array) -> Array:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))
