"""RollingBack: has all ranks go back to a checkpoint within the process, in the hosts that can."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.hosting import stand_before
from stabilizer.callbacks.rolling_back_hosts import load_in_place, unloadable
from stabilizer.callbacks.run_host import RunHost
from stabilizer.callbacks.skip_keeper import SkipKeeper
from stabilizer.callbacks.skipped_data import SkippedData
from stabilizer.checkpoints.finding import GoodCheckpoint
from stabilizer.errors import TrainingStoppedError, logger
from stabilizer.recovery.ladder import Entry
from stabilizer.recovery.skip_list import SkipEntry
from stabilizer.reduction import Reducer, rank, world_size
from stabilizer.skipping import drop_gradients_

__all__ = ["GoodCheckpoints", "RollingBack"]

T = TypeVar("T")
# Sample numbers in a skip list, over all ranks.
_MAX_SAMPLES = 2**20


class GoodCheckpoints(Protocol):
    """Who knows them."""

    def latest(self, before_step: int) -> GoodCheckpoint | None:
        """The newest one of a step up to another; on every rank, with the same answer.

        Args:
            before_step: The first bad step.
        """

    def suspect(self, after_step: int | None) -> None:
        """Let no later checkpoint take the place of an older one, while the run is in trouble.

        Args:
            after_step: The first bad step; `None` when the trouble is over.
        """

    def folders(self) -> list[Path]:
        """Where checkpoints are, on the first rank."""

    def condemn(self, *, after_step: int, reason: str) -> None:
        """Never again offer what was saved in the meantime; on every rank.

        Args:
            after_step: Where the run goes on from.
            reason: What was wrong.
        """


class RollingBack:
    """Goes back, once all of a step is over.

    Parameters, optimizers, schedulers, scaler and the states of the other callbacks are those of the checkpoint; the
    data, the host's count of steps and the steps of the callbacks go on.

    Args:
        host: Of the run.
        owner: The callback whose state goes on as well.
        good: Knows the checkpoints.
        keeper: Of the skip list.
        data: Knows what data the steps had.
    """

    def __init__(
        self,
        host: RunHost,
        owner: StabilizerCallback,
        *,
        good: GoodCheckpoints,
        keeper: SkipKeeper,
        data: SkippedData,
    ) -> None:
        self._host, self._owner, self._driver = host, owner, owner.driver
        self._good, self._keeper, self._data = good, keeper, data
        self._reducer = Reducer(torch.device("cpu"))
        self._due: list[Callable[[], None]] = []
        if host.kind == "lightning":
            # A step may be closed in the middle of a batch, or of a save.
            host.undo.append(stand_before(self._driver, "train_batch_end", self._after_batch))

    def when_possible(self, function: Callable[[], None]) -> None:
        """Call a function where nothing of the step is left to do; on every rank.

        Args:
            function: May call `go_back`.
        """
        if self._host.kind == "lightning":
            self._due.append(function)
        else:
            function()

    def go_back(self, entry: Entry, *, step: int) -> str | int:
        """Go back to the newest good checkpoint before the first bad step; on every rank, where `when_possible` calls.

        Args:
            entry: Of the rollback; gets its outcome.
            step: The last step that is done.

        Returns:
            Why it was not done, or the step that comes next in the checkpoint.

        Raises:
            TrainingStoppedError: If a rank could not load the checkpoint.
            RuntimeError: If the skip list could not be written.
        """
        good = self._good.latest(before_step=entry.before_step)
        if good is None and entry.before_step < entry.first_step:
            good = self._good.latest(before_step=entry.first_step)
        if good is None:
            return f"no checkpoint of step {entry.first_step} or before is known to be good"
        if reason := self._unloadable(good.path):
            return reason
        skipped = self._entries(good.step, step, reason=entry.reason)
        if reason := self._keeper.room_for(skipped):
            return reason
        self._keeper.add(skipped, [good.path, *(folder / "any" for folder in self._good.folders())])
        self._together("writing the skip list", self._keeper.write)
        self._good.condemn(after_step=good.step, reason=entry.reason)
        # Before the owner's state is taken, which goes on.
        entry.outcome = f"back to {good.path} (step {good.step}); the data of steps {good.step} to {step} are left out"
        self._load(good.path)
        return good.step

    def _unloadable(self, path: Path) -> str:
        """Why no rank could load a checkpoint, before anything is changed: as the first rank sees it."""
        reasons = self._reducer.objects(unloadable(self._host, path) if rank() == 0 else "")
        return str(reasons[0])

    def _load(self, path: Path) -> None:
        steps = {number: suite.step for number, suite in self._driver._suites}
        own = self._owner.state_dict()
        try:
            self._together(f"loading {path}", lambda: load_in_place(self._host, path, owner=self._owner))
        except RuntimeError as error:
            raise TrainingStoppedError(
                f"{self._owner.state_key}: {error}. The model in memory may be half of one checkpoint and half of "
                f"another: start again from {path}, or from an older one"
            ) from error
        self._owner.load_state_dict(own)
        for number, step in steps.items():
            for callback in self._driver.callbacks:
                callback.advance(number, step - 1)
        for optimizer in self._host.optimizers:
            drop_gradients_(optimizer)

    def _entries(self, first_step: int, last_step: int, *, reason: str) -> list[SkipEntry]:
        """What is left out, with the samples of all ranks; a collective."""
        spans = self._data.spans(first_step, last_step)
        if not spans:
            return [SkipEntry(first_step, last_step, num_ranks=world_size(), reason=reason)]
        samples = self._gather_all([self._data.samples(span) for span in spans])
        return [
            SkipEntry(**dataclasses.asdict(span), num_ranks=world_size(), sample_ids=ids, reason=reason)
            for span, ids in zip(spans, samples, strict=True)
        ]

    def _together(self, what: str, function: Callable[[], T]) -> T | None:
        """Do on every rank what may fail on one only; if it does, every rank raises."""
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        num_failed = int(self._reducer.sum(torch.tensor([float(failure is not None)]))[0])
        if num_failed:
            ranks = "one rank" if num_failed == 1 else f"{num_failed} ranks"
            raise RuntimeError(f"{what} failed on {ranks}" + (f": {failure}" if failure else "")) from failure
        return result

    def _gather_all(self, own: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
        """Numbers of all ranks, by rank, for each span; nothing if there are too many for a list."""
        lengths = self._reducer.gather(torch.tensor([len(numbers) for numbers in own])).tolist()
        known = sum(len(ids) for entry in self._keeper.skips.entries for ids in entry.sample_ids)
        if known + sum(map(sum, lengths)) > _MAX_SAMPLES:
            logger.warning("too many samples for a skip list: only their micro-batches are left out")
            return [() for _ in own]
        return [self._gather(numbers, [row[n] for row in lengths]) for n, numbers in enumerate(own)]

    def _gather(self, numbers: tuple[int, ...], lengths: list[int]) -> tuple[tuple[int, ...], ...]:
        longest = max(lengths)
        if not longest:
            return ()
        padded = torch.tensor([*numbers, *[-1] * (longest - len(numbers))], dtype=torch.int64)
        rows = self._reducer.gather(padded).tolist()
        return tuple(tuple(row[:length]) for row, length in zip(rows, lengths, strict=True))

    def _after_batch(self, original: Callable[[], None]) -> None:
        original()
        due, self._due = self._due, []
        for function in due:
            try:
                function()
            except TrainingStoppedError:
                raise
            except Exception:
                # On every rank alike: what can fail on one alone is done together.
                if self._owner.strict:
                    raise
                self._owner.has_failed = True
                key = self._owner.state_key
                logger.exception("%s: rolling back failed; training goes on without this callback", key)
