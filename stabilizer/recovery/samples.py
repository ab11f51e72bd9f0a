"""SampleWatch: which samples a loader's sampler gives out, and others in the place of those that are listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

__all__ = ["SampleWatch"]

# Sample numbers that are remembered, over all micro-batches.
_MAX_SAMPLES = 2**18
_MARK = "_stabilizer_watch"


@dataclasses.dataclass
class _Pass:
    """One iteration over a sampler."""

    epoch: int
    offset: int = 0  # of the sampler's first batch within the epoch
    batches: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


class SampleWatch:
    """Stands in the iteration of a batch sampler, which goes on being the object that it was.

    A listed sample that comes again is replaced by another one of its batch, so that counts and shapes stay; a batch
    of listed samples alone takes those of the batch before it.

    Args:
        epoch: Gives the epoch at hand, when an iteration begins.
        listed: Takes an epoch and gives the samples that must not come in it.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> sampler = BatchSampler(range(6), batch_size=3, drop_last=False)
        >>> watch = SampleWatch(epoch=lambda: 1, listed=lambda epoch: frozenset({4}))
        >>> undo = watch.watch(sampler)
        >>> list(sampler), watch.samples(1, 1, 1)
        ([[0, 1, 2], [3, 3, 5]], (3, 3, 5))
        >>> undo()
        >>> list(sampler)
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(self, *, epoch: Callable[[], int], listed: Callable[[int], frozenset[int]]) -> None:
        self._epoch, self._listed = epoch, listed
        self._passes: list[_Pass] = []
        self.num_replaced = 0

    def watch(self, sampler: Any) -> Callable[[], None] | None:
        """Stand in the iteration of a batch sampler.

        Args:
            sampler: Gives lists of sample numbers.

        Returns:
            Takes it away again; `None` if this object cannot be watched.
        """
        kind = type(sampler)
        if _MARK in getattr(sampler, "__dict__", {}):
            return None
        try:
            # The class of this one object: an own one that does the same but for the iteration. Whoever asks what kind
            # it is, or reaches for its attributes, finds what was there.
            sampler.__class__ = _watched(kind)
            sampler.__dict__[_MARK] = self
        except (TypeError, AttributeError):
            return None

        def undo() -> None:
            sampler.__dict__.pop(_MARK, None)
            if type(sampler).__mro__[1] is kind:
                sampler.__class__ = kind

        return undo

    def start_at(self, batch: int) -> None:
        """Say where in its epoch the iteration at hand began.

        Args:
            batch: Number of the sampler's first batch.
        """
        if self._passes:
            self._passes[-1].offset = batch

    def samples(self, epoch: int, first_batch: int, last_batch: int) -> tuple[int, ...]:
        """The samples of micro-batches, as far as they are known.

        Args:
            epoch: Of the micro-batches.
            first_batch: The first of them.
            last_batch: The last of them.
        """
        found: dict[int, tuple[int, ...]] = {}
        for one in self._passes:
            if one.epoch == epoch:
                found |= {number + one.offset: samples for number, samples in one.batches.items()}
        chosen = (found[batch] for batch in sorted(found) if first_batch <= batch <= last_batch)
        return tuple(sample for samples in chosen for sample in samples)

    def follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Pass on the batches of an iteration.

        Args:
            batches: Of the sampler.
        """
        epoch = self._epoch()
        listed, current = self._listed(epoch), _Pass(epoch)
        self._passes.append(current)
        last: list[int] = []
        for number, batch in enumerate(batches):
            if not _is_plain(batch):
                yield batch
                continue
            chosen = list(batch)
            if listed and not listed.isdisjoint(chosen):
                chosen = _replaced(chosen, listed, spare=last)
                self.num_replaced += sum(old != new for old, new in zip(batch, chosen, strict=True))
            last = [sample for sample in chosen if sample not in listed] or last
            current.batches[number] = tuple(chosen)
            self._trim()
            yield chosen

    def _trim(self) -> None:
        total = sum(len(samples) for one in self._passes for samples in one.batches.values())
        while total > _MAX_SAMPLES:
            oldest = next(one for one in self._passes if one.batches)
            total -= len(oldest.batches.pop(next(iter(oldest.batches))))
        self._passes = [one for one in self._passes[:-1] if one.batches] + self._passes[-1:]


def _replaced(batch: Sequence[int], listed: frozenset[int], *, spare: Sequence[int]) -> list[int]:
    others = [sample for sample in batch if sample not in listed] or list(spare)
    if not others:
        return list(batch)
    number, chosen = 0, []
    for sample in batch:
        if sample in listed:
            sample, number = others[number % len(others)], number + 1
        chosen.append(sample)
    return chosen


def _is_plain(batch: Any) -> bool:
    return isinstance(batch, list | tuple) and all(
        isinstance(sample, int) and not isinstance(sample, bool) for sample in batch
    )


def _watched(kind: type) -> type:
    def __iter__(self: Any) -> Iterator[Any]:
        inner: Iterator[Any] = kind.__iter__(self)  # type: ignore[attr-defined]
        watch = self.__dict__.get(_MARK)
        return inner if watch is None else watch.follow(inner)

    names = {"__iter__": __iter__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)
