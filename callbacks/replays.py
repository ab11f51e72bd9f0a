"""What is kept of a step's micro-batches so that one of them can be run again: while all is well, nearly nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.local_gradients import FirstNorms, LocalGradients
from stabilizer.callbacks.watching import ForwardHook
from stabilizer.errors import warn
from stabilizer.localize.recording import Recorder
from stabilizer.localize.replaying import Replayer
from stabilizer.store import GradientStore

__all__ = ["Replays"]

_MAX_MICRO_BATCHES = 256


class _Counter:
    """Stands for a `Recorder` where nothing is run again: it tells micro-batches apart, and keeps nothing of them."""

    def __init__(self) -> None:
        self.micro_batches: list[None] = []
        self.is_over = False

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One more."""
        if self.is_over:
            self.micro_batches, self.is_over = [], False
        self.micro_batches.append(None)

    def drop(self, num: int) -> None:
        """Forget the first ones."""
        del self.micro_batches[:num]

    def end_step(self) -> None:
        """The next one is the first of a step."""
        self.is_over = True


class Replays:
    """The micro-batches of the step at hand, for the suites of a run.

    Does nothing unless a callback localises, or looks at the parts of a step; only for the former batches are kept.

    Args:
        callbacks: All of ours.

    Attributes:
        is_on: Whether anybody wants micro-batches told apart.
        keeps_batches: Whether any callback localises.
        replayer: The host's; `None` where it has none.
        recorder: `None` before the first micro-batch.
        drops_unused: Whether a forward without a backward pass is no micro-batch, as the host calls them.
        has_moved: Whether an optimizer has moved since the last forward, so that nothing can be run again as it was.
    """

    def __init__(self, callbacks: Sequence[StabilizerCallback]) -> None:
        self.keeps_batches = any(callback.localizes for callback in callbacks)
        self._of_parts = [callback for callback in callbacks if callback.parts_every_n_steps is not None]
        self.is_on = self.keeps_batches or bool(self._of_parts)
        self.replayer: Replayer | None = None
        self.recorder: Recorder | _Counter | None = None
        self._gradients: weakref.WeakValueDictionary[int, LocalGradients] = weakref.WeakValueDictionary()
        self._first: FirstNorms | None = None
        self._is_open = self._has_begun = False
        self.drops_unused = self.has_moved = self._has_warned = False
        self._num_stale = 0

    @property
    def is_running(self) -> bool:
        """Whether a forward is one of ours."""
        return self.replayer is not None and self.replayer.is_running

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, device: torch.device | None = None) -> None:
        """A forward comes: note what it is given, and whose norms the sensors have seen since the last one.

        Args:
            args: What `Replayer.loss` will need: the arguments of the host's step.
            kwargs: Likewise.
            device: Whose random numbers the forward draws; default that of the model.
        """
        if not self.is_on or self.replayer is None:
            return
        self._close_micro_batch()
        self._drop_stale()
        self.has_moved = False
        if self.recorder is None:
            model = self.replayer.model
            parameter = next(model.parameters(), None)
            where = device or (torch.device("cpu") if parameter is None else parameter.device)
            self.recorder = Recorder(model, device=where) if self.keeps_batches else _Counter()
        if not self._gradients and self._first is None:
            self._first = self._first_norms(self.replayer.model)
        self.recorder.record(args, kwargs)
        self._is_open, self._has_begun = True, False

    def discard(self) -> None:
        """Gradients are cleared. What has made them is dropped when the next micro-batch comes.

        Not at once, and not the micro-batch at hand: many loops clear the old gradients between forward and backward.
        """
        recorder = self.recorder
        if recorder is None or recorder.is_over:
            return
        kits = list(self._gradients.values())
        has_seen = any(kit.is_resting or kit.sensors.has_seen for kit in kits)
        if self._first is not None:
            has_seen = has_seen or self._first.has_seen
        is_at_hand = self._is_open and not has_seen
        self._num_stale = len(recorder.micro_batches) - is_at_hand

    def drop_batches(self) -> None:
        """Nobody localises any more: from the next step on only tell micro-batches apart."""
        if self.keeps_batches:
            self.keeps_batches, self.recorder = False, None

    def stop(self) -> None:
        """Keep nothing any more."""
        self.is_on, self.recorder, self.replayer = False, None, None
        self._forget_first()
        for gradients in self._gradients.values():
            gradients.sensors.close()

    def follow_broadcasts(self, model: nn.Module) -> Callable[[], None]:
        """Under DDP, a micro-batch has the buffers that are broadcast when its forward begins, after `begin`.

        Args:
            model: As it trains, wrapped.

        Returns:
            Ends it.
        """
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel) and model.broadcast_buffers
        # A module that is compiled in place runs its hooks inside the compiled graph.
        is_compiled = is_ddp and getattr(model.module, "_compiled_call_impl", None) is not None
        if not self.keeps_batches or not is_ddp or is_compiled or not model.modules_buffers:
            return lambda: None
        inner: nn.Module = model.module  # type: ignore[assignment]
        return inner.register_forward_pre_hook(ForwardHook(self), with_kwargs=True).remove

    def see_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The inner module's forward begins.

        Args:
            module: It.
            args: Of its forward.
            kwargs: Likewise.
        """
        is_first = self._is_open and not self._has_begun and not self.is_running
        if is_first and isinstance(self.recorder, Recorder) and module.training and torch.is_grad_enabled():
            self._has_begun = True
            self.recorder.save_buffers_again()

    def gradients_of(self, number: int, model: nn.Module, store: GradientStore) -> LocalGradients:
        """Local norms for an optimizer.

        Args:
            number: Its position.
            model: As it trains, wrapped.
            store: Of its gradients.
        """
        self._gradients[number] = found = LocalGradients(model, store)
        if self._first is not None:
            self._first.hand_over(found, self.replayer)
            self._first = None
        return found

    def close_step(self, store: GradientStore) -> None:
        """The gradients of a step are complete.

        Args:
            store: Will measure them.
        """
        self._close_micro_batch(store)

    def compare(self, store: GradientStore) -> None:
        """The gradients of a step are measured.

        Args:
            store: Has just measured them.
        """
        for gradients in self._gradients.values():
            if gradients.store is store and store.current is not None:
                gradients.compare(store.current.squares)

    def end_step(self) -> None:
        """The step is over: its micro-batches are dropped when the next one begins."""
        self.has_moved, self._num_stale = True, 0
        self._forget_first()
        if self.recorder is not None:
            self.recorder.end_step()

    def _first_norms(self, model: nn.Module) -> FirstNorms | None:
        """What sees the first step, if anybody will look at its parts."""
        if not any(callback.next_step() % (callback.parts_every_n_steps or 1) == 0 for callback in self._of_parts):
            return None
        try:
            return FirstNorms(model)
        except ValueError:  # told when the optimizer comes to its step
            return None

    def _forget_first(self) -> None:
        if self._first is not None:
            self._first.close()
            self._first = None

    def _drop_stale(self) -> None:
        recorder = self.recorder
        if recorder is None or recorder.is_over:
            return
        if isinstance(recorder, Recorder) and len(recorder.micro_batches) >= _MAX_MICRO_BATCHES:
            self._num_stale = len(recorder.micro_batches)
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"{_MAX_MICRO_BATCHES} forward passes without a step of an optimizer that is watched: those before "
                    "are forgotten, and a spike that comes from them is not found"
                )
            for gradients in self._gradients.values():
                gradients.is_cut = True
            if self._first is not None:
                self._first.is_cut = True
        if self._num_stale:
            recorder.drop(self._num_stale)
            if self._first is not None:
                self._first.drop(self._num_stale)
            for gradients in self._gradients.values():
                gradients.local.drop(self._num_stale)
            self._num_stale = 0

    def _close_micro_batch(self, store: GradientStore | None = None) -> None:
        # With several optimizers a micro-batch may be of another one's step.
        is_whole = self.recorder is not None and len(self.recorder.micro_batches) == len(self._gradients) == 1
        kits = list(self._gradients.values())
        unseen = [
            all(parameter.grad is None for parameter in kit.store.index.parameters)
            if kit.is_resting
            else kit.sensors.is_complete and not kit.sensors.has_seen
            for kit in (kits if self.drops_unused else [])
        ]
        if self._first is not None:
            unseen.append(self._first.is_unused)
        if self.drops_unused and self._is_open and self.recorder is not None and unseen and all(unseen):
            self._is_open = False
            self.recorder.micro_batches.pop()
        for gradients in kits:
            is_own = gradients.store is store
            if is_own and not self._is_open and len(kits) > 1 and gradients.sensors.has_seen:
                gradients.local.add(None)  # after another optimizer's step, without a forward
            gradients.take(self.replayer, is_wanted=self._is_open, is_whole=is_whole and is_own)
        if self._first is not None:
            self._first.take(is_wanted=self._is_open)
        self._is_open = False
