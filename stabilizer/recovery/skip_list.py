"""SkipList: micro-batches and samples that a run leaves out, because they led to trouble."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

__all__ = ["SkipEntry", "SkipList"]


@dataclasses.dataclass(frozen=True)
class SkipEntry:
    """Steps in a row whose data are left out.

    Attributes:
        first_step: Optimizer steps, counted from 0.
        last_step: The last of them.
        epoch: As the host counts; -1 if the host could not say which micro-batches they had.
        first_batch: The first micro-batch within the epoch, the same on every rank; -1 likewise.
        last_batch: The last one; -1 likewise.
        num_ranks: Ranks of the run: with another number a micro-batch is another one.
        sample_ids: By rank, the numbers of the samples in the data set, where the sampler gave them.
        reason: What was wrong.
    """

    first_step: int
    last_step: int
    epoch: int = -1
    first_batch: int = -1
    last_batch: int = -1
    num_ranks: int = 1
    sample_ids: tuple[tuple[int, ...], ...] = ()
    reason: str = ""


class SkipList:
    """Entries, and what follows from them for a micro-batch and for a sample.

    Args:
        entries: In any order; they may overlap.
        num_ranks: Of the run at hand.

    Attributes:
        entries: As given.

    Example:
        >>> skips = SkipList([SkipEntry(7, 8, epoch=0, first_batch=7, last_batch=8, sample_ids=((70, 80),))])
        >>> [batch for batch in range(12) if skips.has(0, batch)], skips.samples(0), sorted(skips.samples(1))
        ([7, 8], frozenset(), [70, 80])
    """

    def __init__(self, entries: Iterable[SkipEntry] = (), *, num_ranks: int = 1) -> None:
        self.entries: list[SkipEntry] = []
        self._num_ranks = num_ranks
        self._spans: dict[int, list[tuple[int, int]]] = {}  # of each epoch, apart from one another
        self.extend(entries)

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.entries)

    @property
    def num_batches(self) -> int:
        """Micro-batches of one rank that are left out; one that is listed twice counts once."""
        return sum(last - first + 1 for spans in self._spans.values() for first, last in spans)

    def extend(self, entries: Iterable[SkipEntry]) -> None:
        """Add entries; what is there already is not added again.

        Args:
            entries: More of them.
        """
        self.entries = list(dict.fromkeys([*self.entries, *entries]))
        self.renumber(self._num_ranks)

    def clear(self) -> None:
        """Forget all entries: those of another run."""
        self.entries = []
        self.renumber(self._num_ranks)

    def renumber(self, num_ranks: int) -> None:
        """Say how many ranks there are.

        Args:
            num_ranks: Of the run at hand.
        """
        self._num_ranks = num_ranks
        spans: dict[int, list[tuple[int, int]]] = {}
        for entry in self.entries:
            if entry.epoch >= 0 and entry.num_ranks == num_ranks:
                spans.setdefault(entry.epoch, []).append((entry.first_batch, entry.last_batch))
        self._spans = {epoch: _merged(found) for epoch, found in spans.items()}

    def has(self, epoch: int, batch: int) -> bool:
        """Whether a micro-batch is left out.

        Args:
            epoch: As the host counts.
            batch: Within the epoch.
        """
        spans = self._spans.get(epoch)
        if not spans:
            return False
        number = bisect.bisect_right(spans, batch, key=lambda span: span[0]) - 1
        return number >= 0 and batch <= spans[number][1]

    def samples(self, epoch: int) -> frozenset[int]:
        """Samples that are not to come again in an epoch: those that were listed in epochs before it.

        Args:
            epoch: As the host counts.
        """
        listed = (entry.sample_ids for entry in self.entries if 0 <= entry.epoch < epoch)
        return frozenset(sample for by_rank in listed for samples in by_rank for sample in samples)


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged
