"""SkippedData: leaves out the micro-batches and samples of a skip list, and knows where a run is in its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.hosting import stand_before
from stabilizer.errors import warn
from stabilizer.recovery.positions import Span, StepPositions
from stabilizer.recovery.samples import SampleWatch
from stabilizer.recovery.skip_list import SkipList

__all__ = ["SkippedData"]

# Steps after which a list that nobody looks at is told.
_PATIENCE = 3


class SkippedData:
    """Where a run is, and what it leaves out.

    In Lightning all of it happens by itself. A loop iterates over `batches(loader, epoch=...)`.

    Args:
        skips: The list; it may grow.

    Attributes:
        positions: The micro-batches of every step.
        num_dropped: Micro-batches that were left out.
    """

    def __init__(self, skips: SkipList) -> None:
        self.skips = skips
        self.positions = StepPositions()
        self.num_dropped = 0
        self._watch = SampleWatch(epoch=self._current_epoch, listed=self._listed)
        self._trainer: Any = None
        self._driver: Any = None
        self._epoch, self._place = 0, (-1, -1)
        self._seen_epoch: int | None = None
        self._is_honoured = self._has_warned = False
        self._undo: list[Callable[[], None]] = []
        self._watches = False
        self._before_data: Callable[[], None] | None = None

    def join(
        self, trainer: Any, driver: Any, *, watches: bool, before_data: Callable[[], None] | None = None
    ) -> Callable[[], None]:
        """Stand in a run.

        Args:
            trainer: Of Lightning; `None` in a loop.
            driver: The host's.
            watches: Whether places and samples are remembered, for the list to grow.
            before_data: Called in Lightning before anything is drawn, when all of a checkpoint is loaded.

        Returns:
            Takes it away again.
        """
        self._trainer, self._driver, self._seen_epoch = trainer, driver, None
        self._watches, self._before_data = watches, before_data
        if trainer is None:
            return self._leave
        fit_loop = trainer.fit_loop
        self._is_honoured = True
        self._undo.append(stand_before(fit_loop.epoch_loop, "advance", self._advance))
        # The last thing that Lightning calls before it begins to draw from a sampler, perhaps in advance.
        self._undo.append(stand_before(fit_loop, "_load_combined_loader_states", self._before_first_batch))
        self._watch_loaders()
        return self._leave

    def note(self, context: StepContext, *, step: int) -> None:
        """Note where a step has ended.

        Args:
            context: Of the step.
            step: Its number.
        """
        if self._trainer is not None:
            epoch, batch = self._current_epoch(), context.position.batch_index
        else:
            epoch, batch = self._place
            self._warn_if_forgotten(context)
        if self._watches and epoch >= 0 and batch >= 0:
            self.positions.push(step, epoch=epoch, batch=batch)

    def spans(self, first_step: int, last_step: int) -> list[Span]:
        """See `StepPositions.spans`."""
        return self.positions.spans(first_step, last_step)

    def samples(self, span: Span) -> tuple[int, ...]:
        """The samples that this rank has had in a span, as far as the sampler has told.

        Args:
            span: Of `spans`.
        """
        return self._watch.samples(span.epoch, span.first_batch, span.last_batch)

    def batches(self, loader: Iterable[Any], *, epoch: int, first_batch: int = 0) -> Iterator[Any]:
        """The micro-batches of an epoch without those that are left out; on every rank.

        Args:
            loader: A data loader.
            epoch: Counted from 0.
            first_batch: Number of the loader's first micro-batch within the epoch.
        """
        self._epoch, self._is_honoured = epoch, True
        undo = self._watch.watch(_sampler_of(loader)) if self._watches or self.skips.entries else None
        try:
            for number, batch in enumerate(loader, first_batch):
                if number == first_batch:
                    self._watch.start_at(first_batch)
                if self.skips.has(epoch, number):
                    self.num_dropped += 1
                    self._count_steps(epoch, number)
                    continue
                self._place = epoch, number
                yield batch
        finally:
            if undo is not None:
                undo()

    def state_dict(self) -> dict[str, Any]:
        """Where the run is: plain numbers."""
        return {"positions": self.positions.state_dict(), "num_dropped": self.num_dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`.
        """
        self.positions.load_state_dict(state["positions"])
        self.num_dropped = int(state["num_dropped"])

    def __getstate__(self) -> dict[str, Any]:
        # A copy stands in no run.
        return {**self.__dict__, "_trainer": None, "_driver": None, "_undo": [], "_watch": None, "_before_data": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch = SampleWatch(epoch=self._current_epoch, listed=self._listed)

    def _listed(self, epoch: int) -> frozenset[int]:
        return self.skips.samples(epoch)

    def _current_epoch(self) -> int:
        if self._trainer is None:
            return self._epoch
        # Unlike `trainer.current_epoch` it is right before a resumed fit has begun.
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    def _leave(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._trainer = self._driver = None

    def _before_first_batch(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if self._before_data is not None:
            self._before_data()
        self._watch_loaders()

    def _watch_loaders(self) -> None:
        """Watch the sampler; samples of several loaders would be told apart by nothing."""
        if not self._watches and not self.skips.entries:
            return
        combined = self._trainer.fit_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        undo = self._watch.watch(_sampler_of(loaders[0])) if len(loaders) == 1 else None
        if undo is not None:
            self._undo.append(undo)

    def _advance(self, original: Callable[..., None], fetcher: Any) -> None:
        """Stands before the `advance` of Lightning's epoch loop, which is one micro-batch."""
        loop = self._trainer.fit_loop.epoch_loop
        epoch, batch = self._current_epoch(), loop.batch_idx + 1
        is_first, self._seen_epoch = self._seen_epoch != epoch, epoch
        if not self.skips.has(epoch, batch) or not self._may_drop(loop, fetcher):
            original(fetcher)
        else:
            self._drop(loop, fetcher, epoch=epoch, batch=batch)
        if is_first:
            self._watch.start_at(0 if self._is_resumed_by_itself() else batch)

    def _may_drop(self, loop: Any, fetcher: Any) -> bool:
        """Whether the next thing that the loop does is to take a micro-batch from the fetcher."""
        if hasattr(fetcher, "iterator_wrapper"):
            if not self._has_warned:
                self._has_warned = True
                warn(
                    "training_step takes dataloader_iter and draws micro-batches by itself: those of the skip list are "
                    "trained on. Give it a batch instead"
                )
            return False
        if loop.restarting and loop._should_check_val_fx(fetcher):
            if loop.val_loop.restarted_mid_evaluation or loop.restarted_on_last:
                return False  # it validates first
            loop.val_loop.increment_progress_to_evaluation_end()
        loop.val_loop.restarting = False
        return True

    def _drop(self, loop: Any, fetcher: Any, *, epoch: int, batch: int) -> None:
        """Take micro-batches from the fetcher and leave them out, up to the last one in a row."""
        progress = loop.batch_progress
        while True:
            next(fetcher)
            progress.is_last_batch = fetcher.done
            for count in ("ready", "started", "processed", "completed"):
                getattr(progress, f"increment_{count}")()
            self.num_dropped += 1
            self._count_steps(epoch, batch)
            batch += 1
            if loop._num_ready_batches_reached() or not self.skips.has(epoch, batch):
                return  # what follows a micro-batch (validation, the end of the epoch) follows this one
            loop._batches_that_stepped += not loop._should_accumulate()

    def _count_steps(self, epoch: int, batch: int) -> None:
        """Count the steps of an entry at its end, as the run did that has found it: steps keep their numbers."""
        if self._driver is None:
            return
        for entry in self.skips.entries:
            if (entry.epoch, entry.last_batch) != (epoch, batch):
                continue
            number = max(callback.next_step() for callback in self._driver.callbacks)
            if not entry.first_step <= number <= entry.last_step:
                continue
            num = entry.last_step + 1 - number
            for callback in self._driver.callbacks:
                callback.advance(0, entry.last_step)
            suite = self._driver._suites.existing(0)
            if suite is not None:
                suite.step = entry.last_step + 1
            if self._trainer is not None and self._trainer.lightning_module.automatic_optimization:
                step = self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
                for counter in (step.total, step.current):
                    counter.ready += num
                    counter.completed += num

    def _is_resumed_by_itself(self) -> bool:
        """Whether the loader has gone on from the middle by drawing from its sampler from the start."""
        loader = self._trainer.fit_loop._combined_loader.flattened[0]
        sampler = getattr(loader, "batch_sampler", None)
        samplers = (sampler, getattr(sampler, "sampler", None))
        return hasattr(loader, "load_state_dict") and not any(hasattr(one, "load_state_dict") for one in samplers)

    def _warn_if_forgotten(self, context: StepContext) -> None:
        if self._has_warned or self._is_honoured or context.step < _PATIENCE or not self.skips.entries:
            return
        self._has_warned = True
        warn(
            f"the skip list has {len(self.skips)} entries, and nobody leaves them out: iterate over "
            "callback.batches(loader, epoch=epoch) instead of the loader"
        )


def _sampler_of(loader: Any) -> Any:
    """The batch sampler that a loader draws from."""
    return getattr(getattr(loader, "base_dataloader", loader), "batch_sampler", None)
