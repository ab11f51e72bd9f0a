"""transformers and TRL: a callback for their trainers that brings ours to work."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.hosting import check_callbacks, is_disabled, is_off, stand_before
from stabilizer.callbacks.preflight import preflight
from stabilizer.callbacks.prepared import refuse_engines
from stabilizer.callbacks.trainer_clipping import check_clipping, hold_limit, take_over
from stabilizer.callbacks.trainer_handle import TrainerHandle
from stabilizer.callbacks.trainer_setting import trainer_setting
from stabilizer.callbacks.trainer_sink import TrainerSink
from stabilizer.errors import logger, warn

__all__ = ["StabilizerTrainerCallback"]


class StabilizerTrainerCallback(TrainerCallback):
    """Our callbacks in a `transformers.Trainer`, or in one of TRL: `Trainer(callbacks=[this])`.

    The callbacks see raw gradients, although the trainer clips at `max_grad_norm` (1.0 unless you say otherwise): for
    the run that limit is taken over by the clip among the callbacks, or by a fixed one beside them. What they log goes
    to the reporters that `report_to` names, under the trainer's own step; their states go into every checkpoint, and
    come back when training is resumed from one.

    Args:
        callbacks: Ours, in any order.
        take_over_clipping: Whether `max_grad_norm` may be taken over; else it must be 0.
        log: A function of (values, step), or a `SummaryWriter`, to write to beside the reporters, on rank 0.

    Raises:
        ValueError: If something in `callbacks` is none of ours. The trainer's constructor raises if it clips and
            `take_over_clipping` is off.

    Example:
        >>> from stabilizer.callbacks import GradNormCallback, StabilizerTrainerCallback
        >>> [callback] = StabilizerTrainerCallback([GradNormCallback()]).callbacks
        >>> callback.state_key
        'GradNormCallback'
    """

    def __init__(
        self, callbacks: Sequence[StabilizerCallback], *, take_over_clipping: bool = True, log: Any = None
    ) -> None:
        self.callbacks = list(callbacks)
        check_callbacks(self.callbacks)
        if not self.callbacks:
            warn("StabilizerTrainerCallback([]): there is nothing to do")
        self.take_over_clipping, self._log = take_over_clipping, log
        self._handle: TrainerHandle | None = None
        self._undo: list[Callable[[], None]] = []
        self._guarded: weakref.WeakSet[Any] = weakref.WeakSet()
        self._folder: Path | None = None  # of the last checkpoint

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **arguments: Any) -> StabilizerTrainerCallback:
        """Make the callbacks that a file describes; see `load_callbacks`.

        Args:
            path: The file.
            arguments: Of the constructor.

        Raises:
            ValueError: If the file cannot be used; names it, the key path, the value and what is allowed.
        """
        from stabilizer.callbacks import load_callbacks

        return cls(load_callbacks(path), **arguments)

    def observe(self, **observed: Any) -> None:
        """Tell the callbacks something of the step at hand; see `LoopHandle.observe`.

        Args:
            observed: What there is to tell.
        """
        if self._handle is not None:
            self._handle.observe(**observed)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer is made: refuse what cannot be, before anything is loaded."""
        check_clipping(args, takes_over=self.take_over_clipping or not self.callbacks)
        found = _caller(self)
        if found is not None:
            if self.callbacks and not is_off():
                refuse_engines(found[0].accelerator)
            # An exception that ends training has no event of its own.
            stand_before(found[0], "train", _Guarded(self))
            self._guarded.add(found[0])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training starts: attach."""
        self.close(after_exception=self._handle is not None)  # of a run that broke off
        if not self.callbacks or is_disabled(self.callbacks):
            return
        check_clipping(args, takes_over=self.take_over_clipping)
        found = _caller(self)
        if found is None:
            raise ValueError(
                "StabilizerTrainerCallback was called by nothing that is a trainer of transformers with this callback: "
                "give it to one, Trainer(callbacks=[...]) or trainer.add_callback(...)"
            )
        self._attach(*found)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer has counted a step: save what an alarm has asked for."""
        if self._handle is not None:
            self._handle.save_wanted()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer has saved a checkpoint: put the callbacks' states into it."""
        if self._handle is not None:
            place = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._handle.save_states(place if self._folder is None else self._folder)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """The trainer has evaluated: a reward there is one of prompts that are held out."""
        reward = (metrics or {}).get("eval_reward")
        handle = self._handle
        if handle is not None and reward is not None and any(one.observations is not None for one in handle.callbacks):
            handle.observe(heldout_reward=float(reward))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is over; reporters may be closed already, so that everything was written before."""
        self.close()

    def close(self, *, after_exception: bool = False) -> None:
        """Write everything that is on its way and put back what was changed; does nothing the second time.

        Args:
            after_exception: Whether an exception is on its way.
        """
        handle, self._handle = self._handle, None
        try:
            if handle is not None:
                handle.close(after_exception=after_exception)
        finally:
            while self._undo:
                self._undo.pop()()

    def _attach(self, trainer: Any, checkpoint: str | None) -> None:
        taken = take_over(trainer.args, self.callbacks)
        if taken.described:
            logger.info(taken.described)
            self._undo.append(hold_limit(trainer))
        if (limited := taken.limited) is not None:
            self._undo.append(lambda: setattr(limited, "max_threshold", None))
        try:
            sink = TrainerSink(trainer, is_reporter=_is_reporter, log=self._log)
            self._handle = handle = TrainerHandle(taken.callbacks, trainer=trainer, sink=sink)
            handle.join(trainer)
            if checkpoint is not None:
                handle.load_states_of(Path(checkpoint))
        except BaseException:
            self.close(after_exception=True)
            raise
        # Before all other callbacks are told: reporters close their files then.
        self._undo.append(stand_before(trainer.callback_handler, "on_train_end", self._before_train_end))
        self._undo.append(stand_before(trainer, "_save_checkpoint", functools.partial(self._save_checkpoint, trainer)))
        if trainer not in self._guarded:
            # Its `train` is under way already: what that calls is what can be guarded.
            names = [name for name in ("_run_epoch", "_finalize_training") if hasattr(trainer, name)]
            self._undo += [stand_before(trainer, name, _Guarded(self)) for name in names]
        preflight(lambda: trainer_setting(trainer, taken.callbacks, clipping=taken.described))

    def _save_checkpoint(self, trainer: Any, original: Callable[..., Any], model: Any, trial: Any = None) -> Any:
        result = original(model, trial)
        # A search of hyperparameters has folders of its own.
        folder = Path(trainer._get_output_dir(trial=trial))
        self._folder = folder / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        return result

    def _before_train_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.close()
        return original(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_undo": [], "_guarded": None, "_folder": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._guarded = weakref.WeakSet()


class _Guarded:
    """Stands before a trainer's `train`: an exception that ends it closes what is open.

    Args:
        callback: Kept by a weak reference.
    """

    def __init__(self, callback: StabilizerTrainerCallback) -> None:
        self._callback = weakref.ref(callback)

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Train."""
        try:
            return original(*args, **kwargs)
        except BaseException:
            callback = self._callback()
            if callback is not None:
                callback.close(after_exception=True)
            raise


def _is_reporter(callback: Any) -> bool:
    return isinstance(callback, tuple(INTEGRATION_TO_CALLBACK.values()))


def _caller(callback: StabilizerTrainerCallback) -> tuple[Any, str | None] | None:
    """The trainer that calls, and the checkpoint that it has resumed from.

    transformers tells its callbacks neither; the functions that are under way know both.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        trainer = frame.f_locals.get("self")
        handler = getattr(trainer, "callback_handler", None)
        if hasattr(trainer, "accelerator") and any(one is callback for one in getattr(handler, "callbacks", ())):
            checkpoint = frame.f_locals.get("resume_from_checkpoint")
            return trainer, os.fspath(checkpoint) if isinstance(checkpoint, str | os.PathLike) else None
        frame = frame.f_back
    return None
