"""What comes of running a micro-batch again several times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from stabilizer.localize.result import Suspicion
from stabilizer.localize.suspects import Suspect

__all__ = ["RankRuns", "Reruns", "Watch"]


class Watch(Protocol):
    """Looks at one replay: entered around its forward and backward pass, asked between them and at the end."""

    def __enter__(self) -> Any:
        """Begin."""

    def __exit__(self, *args: object) -> None:
        """Leave nothing behind."""

    def found(self, gradients: Sequence[tuple[str, Tensor | None]], loss: float) -> Any:
        """What it has seen.

        Args:
            gradients: Of the replay, by name.
            loss: Of the replay.

        Returns:
            Plain data; `None` for nothing.
        """


@dataclasses.dataclass(frozen=True)
class RankRuns:
    """One rank's passes of the micro-batch.

    Attributes:
        suspect: Why it is suspicious or not; `None` where the rank has no such micro-batch.
        step: Square sums by unit of the rank's own gradient as the step had it; `None` if no sensor saw that.
        runs: The same of every replay.
        losses: Of every replay, without the loss scale.
        unscaled: Square sums of one more replay, with a loss scale at which nothing overflows that is not infinite by
            itself; `None` where there is none.
        found: What the watch has seen in the first replay in which it has seen anything.
    """

    suspect: Suspect | None
    step: list[float] | None
    runs: list[list[float]]
    losses: list[float]
    unscaled: list[float] | None = None
    found: Any = None


@dataclasses.dataclass
class Reruns:
    """What came of it, the same on every rank.

    Attributes:
        suspicion: What set it off, the same on every rank.
        norms: The suspicious norm as each rank has measured it.
        suspects: Local norms of all ranks and micro-batches.
        largest: As of `Result`: set where the step's gradient was changed after the backward passes.
        is_local: Whether the ranks' own gradients are known as the step had them; else those of replays stand for them.
        micro_batch: The one that was run again; `None` if none was.
        ranks: By rank.
        errors: What ranks have failed with.
        notes: What a reader should know.
    """

    suspicion: Suspicion | None = None
    norms: list[float] = dataclasses.field(default_factory=list)
    suspects: list[Suspect] = dataclasses.field(default_factory=list)
    largest: float | None = None
    is_local: bool = True
    micro_batch: int | None = None
    ranks: list[RankRuns] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
