"""Which micro-batch of which step runs, the first time or once more; and what there is to do in it."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Iterator, Sequence

from stabilizer.errors import logger
from stabilizer.faults import Fault
from stabilizer.reduction import rank

__all__ = ["Moment", "Schedule"]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A forward and the backward after it.

    Attributes:
        step: The optimizer step.
        micro_batch: Within it.
        repetition: 0 the first time, then the number of the replay.
    """

    step: int
    micro_batch: int
    repetition: int = 0


class Schedule:
    """When each fault is due on this rank.

    Args:
        faults: All of them.
        seed: Of what they draw.
        is_announced: Whether a fault is told when it happens.

    Attributes:
        moment: Now; `None` before the first.
    """

    def __init__(self, faults: Sequence[Fault], *, seed: int, is_announced: bool = True) -> None:
        self.faults = tuple(faults)
        self._level = logging.WARNING if is_announced else logging.DEBUG
        self.moment: Moment | None = None
        self._seed = seed
        self._rank = rank()
        self._seen: set[int] = set()  # numbers of faults that have happened in the step at hand

    def draw(self, number: int, *, step: int = -1) -> random.Random:
        """What chooses for a fault: the same on every rank, and in a replay.

        Args:
            number: Of the fault.
            step: At which it is in a step; -1 before the first.
        """
        return random.Random(f"{self._seed}/{number}/{step}")

    def is_own(self, fault: Fault) -> bool:
        """Whether a fault is on this rank.

        Args:
            fault: One of them.
        """
        return fault.is_everywhere or fault.rank == self._rank

    def due(self, *kinds: str) -> Iterator[tuple[int, Fault, Moment]]:
        """What is to happen now, on this rank.

        Args:
            *kinds: Only of these.

        Yields:
            Number of the fault, the fault, and now.
        """
        moment = self.moment
        for number, fault in enumerate(self.faults if moment is not None else ()):
            if moment is None or fault.kind not in kinds or not self.is_own(fault) or not fault.is_in(moment.step):
                continue
            if not fault.is_everywhere and fault.micro_batch != moment.micro_batch:
                continue
            if not moment.repetition or fault.repeats in ("always", "differently"):
                yield number, fault, moment

    def factor(self, fault: Fault, moment: Moment) -> float:
        """What a fault multiplies by.

        Args:
            fault: With a factor.
            moment: Another one at every repetition, if it repeats differently.
        """
        assert fault.factor is not None
        differs = fault.repeats == "differently"
        return fault.factor * (1.0 + 0.5 * moment.repetition) if differs else fault.factor

    def note(self, number: int, what: str) -> None:
        """A fault has happened.

        Args:
            number: Of the fault.
            what: In words.
        """
        moment = self.moment
        assert moment is not None
        if moment.repetition:
            logger.info("drill: %s, in replay %d", what, moment.repetition)
            return
        if number in self._seen:
            return  # one more parameter of the layer
        self._seen.add(number)
        logger.log(
            self._level,
            "drill: rank %d, step %d, micro-batch %d: %s",
            self._rank,
            moment.step,
            moment.micro_batch,
            what,
        )

    def end_step(self, step: int) -> None:
        """Say of the faults that were due in a step which of them could not happen.

        Args:
            step: That is over.
        """
        for number, fault in enumerate(self.faults):
            if fault.is_in(step) and self.is_own(fault) and number not in self._seen:
                logger.warning(
                    "drill: rank %d, step %d: faults[%d] did not happen (%s)", self._rank, step, number, fault
                )
        self._seen.clear()
