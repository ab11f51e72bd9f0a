"""Ranges of a ranking, their halves of equal weight, and what the scores say of the norms of these."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

__all__ = ["Field", "Node", "measure"]

#: What counts as predicted: the ratio of the two halves' norms within this factor.
_EVEN_FACTOR = math.log(2)
#: A half that has the whole gradient: the other one's norm is this factor smaller.
_ONE_SIDED = math.log(8)


@dataclasses.dataclass(eq=False)
class Node:
    """Units of the places from `low` to before `high`.

    Attributes:
        low: First place.
        high: After the last place.
        norm: Of their gradient; what it is at least, if it was not measured.
        most: What it is at most, unless parts of it cancel.
    """

    low: int
    high: int
    norm: float = 0.0
    most: float = 0.0

    def __len__(self) -> int:
        return self.high - self.low


class Field:
    """The units that are searched, by falling score.

    Args:
        ranks: Of these units, shape (places,), int64, rising.
        logs: Logarithm of the score of each unit of the ranking, shape (ranked,), float64.
        norm: Of the gradient of these units.

    Attributes:
        ranks: As given.
        root: All of them.

    Example:
        >>> field = Field(torch.arange(4), torch.tensor([3.0, 1.0, 1.0, 1.0], dtype=torch.float64), norm=5.0)
        >>> [(half.low, half.high) for half in field.halves(field.root)]
        [(0, 1), (1, 4)]
    """

    def __init__(self, ranks: Tensor, logs: Tensor, *, norm: float) -> None:
        self.ranks = ranks
        self.root = Node(0, len(ranks), norm, norm)
        logs = logs[ranks]
        scores = (logs - logs[:1]).exp()
        self._sums, self._squares = _prefix_sums(scores), _prefix_sums(scores.square())
        numbers = torch.arange(len(ranks) + 1, dtype=torch.float64) / max(len(ranks), 1)
        # By number alone a ranking would be worth nothing; by score alone a unit with a small one could be as deep as
        # there are units.
        self._weights = (numbers + self._sums / self._sums[-1]) / 2

    def ranks_of(self, node: Node) -> Tensor:
        """Ranks of the units of a node, shape (units of the node,)."""
        return self.ranks[node.low : node.high]

    def halves(self, node: Node) -> tuple[Node, Node]:
        """Two halves, as equal in weight as may be; the one with the larger scores first.

        The weight of a unit is its share in the number of units plus its share in the sum of scores.

        Args:
            node: Of at least two units.

        Returns:
            Both without a norm.
        """
        middle = (self._weights[node.low] + self._weights[node.high]) / 2
        cut = int(torch.searchsorted(self._weights, middle))
        # Of the two cuts around the middle the nearer.
        cut -= bool(2 * middle < self._weights[cut] + self._weights[cut - 1])
        cut = min(max(cut, node.low + 1), node.high - 1)
        return Node(node.low, cut), Node(cut, node.high)

    def is_even(self, left: Node, right: Node) -> bool | None:
        """Whether the norms of two halves can be what the scores predict, and none is next to nothing.

        Args:
            left: The first half.
            right: The other.

        Returns:
            `None` if that cannot be told.
        """
        if not math.isfinite(left.norm):
            return None
        if not math.isfinite(right.norm):
            return False
        # Gradients all in one direction, and all orthogonal.
        predicted = []
        for sums, power in ((self._sums, 1.0), (self._squares, 0.5)):
            low, cut, high = (float(sums[place]) for place in (left.low, left.high, right.high))
            predicted.append(power * _log_ratio(cut - low, high - cut))
        least, most = _log_ratio(left.norm, right.most), _log_ratio(left.norm, right.norm)
        if least > _ONE_SIDED or most < -_ONE_SIDED:
            return False
        return least <= max(predicted) + _EVEN_FACTOR and most >= min(predicted) - _EVEN_FACTOR


def measure(node: Node, left: Node, right: Node, *, norm: float, rest: float | None) -> None:
    """Note what a pass has shown of two halves.

    Args:
        node: Both.
        left: The half that was open.
        right: The other.
        norm: Of the pass.
        rest: Norm of the other half; `None` if it was not measured. It is at least the difference of the norms,
            whatever the directions, and at most that of the squares, unless parts cancel.
    """
    left.norm = left.most = norm
    if rest is not None:
        right.norm = right.most = rest
    elif math.isfinite(norm) and not math.isfinite(node.norm):
        right.norm = right.most = node.norm
    elif math.isfinite(norm):
        right.norm = max(node.norm - norm, 0.0)
        right.most = max(right.norm, math.sqrt(max(node.most**2 - norm**2, 0.0)))


def _log_ratio(numerator: float, denominator: float) -> float:
    tiny = 1e-300
    return math.log(max(numerator, tiny)) - math.log(max(denominator, tiny))


def _prefix_sums(values: Tensor) -> Tensor:
    return torch.cat([values.new_zeros(1), values.cumsum(0)])
