"""Callbacks at work in a trainer of transformers or TRL: its accelerator is watched, and its compute_loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.accelerate import AccelerateHandle
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Position
from stabilizer.callbacks.hosting import stand_before
from stabilizer.callbacks.loop_replay import LoopReplayer, LossFunction
from stabilizer.callbacks.policy_signals import PolicySignals
from stabilizer.callbacks.prepared import prepared
from stabilizer.callbacks.run_host import HostKind
from stabilizer.callbacks.state_files import encode_states, write_states
from stabilizer.callbacks.suite import Suite
from stabilizer.callbacks.trainer_memory import Remembered
from stabilizer.callbacks.trainer_replay import TrainerReplayer
from stabilizer.callbacks.trainer_shares import Shares
from stabilizer.callbacks.trainer_sink import TrainerSink
from stabilizer.errors import logger, warn
from stabilizer.localize.recording import Recorder
from stabilizer.reduction import Reducer, accumulation_dtype

__all__ = ["TrainerHandle"]

_FOLDER = "alarms"
#: Of `compute_loss`, after model and inputs.
_ARGUMENTS = ("return_outputs", "num_items_in_batch")


class TrainerHandle(AccelerateHandle):
    """One run of a trainer; `StabilizerTrainerCallback` makes it when training starts and closes it at the end.

    Args:
        callbacks: Ours.
        trainer: Has prepared its model and optimizer.
        sink: Where values go.
    """

    watches_forward = False
    kind: HostKind = "transformers"

    def __init__(self, callbacks: Sequence[StabilizerCallback], *, trainer: Any, sink: TrainerSink) -> None:
        self._trainer: Any = trainer
        self._sink = sink
        accelerator = trainer.accelerator
        model, optimizers = prepared(accelerator, trainer.model_wrapped, [trainer.optimizer])
        self._computed: Tensor | None = None
        self._remembered: Remembered | None = None
        self._shares: Shares | None = None
        self._wanted: list[str] = []
        super().__init__(callbacks, model=model, optimizers=optimizers, sink=sink, groups=None, accelerator=accelerator)
        if self._replayer.reason is not None and self._suites.replays.keeps_batches:
            warn(self._replayer.reason)
        self._undo.append(stand_before(trainer, "compute_loss", self._compute_loss))
        self._signals: PolicySignals | None = None
        if any(callback.observations is not None for callback in self.callbacks):
            self._signals = PolicySignals(trainer, self.observe)
            self._undo.append(self._signals.close)

    def _make_replayer(self, loss_fn: LossFunction | None) -> LoopReplayer:
        found = TrainerReplayer(self._model, self._trainer)
        self._undo.append(found.memory.close)
        return found

    def position(self) -> Position:
        """Micro-batches since the last step, and the trainer's epoch."""
        epoch = self._trainer.state.epoch
        return Position(self._batch_index, self._num_backwards, epoch=-1 if epoch is None else math.floor(epoch))

    def run(self, number: int, *, grad_scale: Tensor | None = None, is_scaled: bool = False) -> Suite | None:
        """Run the suite unless it has run for the step at hand; see `LoopHandle.run`."""
        if not self.is_closed and not self._suite(number).is_open:
            self._sink.follow(self._suite(number).step)
        return super().run(number, grad_scale=grad_scale, is_scaled=is_scaled)

    @property
    def can_save(self) -> bool:
        """The trainer does."""
        return True

    def save_checkpoint(self, name: str) -> str | None:
        """Have the trainer save a checkpoint in `alarms` when it has counted this step.

        Args:
            name: Of the folder in there.

        Returns:
            The checkpoint's path.
        """
        self._wanted.append(name)
        return str(self._alarm_folder(name) / f"checkpoint-{self._trainer.state.global_step + 1}")

    def save_wanted(self) -> None:
        """Save what was asked for; on every rank, when the trainer has counted the step. A full disk ends no run."""
        wanted, self._wanted = self._wanted, []
        for name in wanted:
            folder = self._alarm_folder(name)
            try:
                if self._can_write(folder):
                    self._save_in(folder)
            except Exception:
                logger.exception("the checkpoint %s could not be saved; training goes on", folder)

    def _can_write(self, folder: Path) -> bool:
        """Whether the rank that writes can; a collective, since the others wait for it within the save."""
        failed = torch.zeros(1, dtype=torch.float64)
        if self._trainer.args.should_save:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / ".stabilizer"
                probe.write_bytes(b"0" * 4096)
                probe.unlink()
            except OSError as error:
                logger.error("no checkpoint is saved in %s: %s; training goes on", folder, error)
                failed += 1
        device = self._accelerator.device
        return not Reducer(device).sum(failed.to(device, accumulation_dtype(device))).item()

    def _save_in(self, folder: Path) -> None:
        # Its own folder: the trainer deletes old checkpoints beside the one it saves.
        undo = stand_before(self._trainer, "_get_output_dir", lambda original, trial, at=str(folder): at)
        try:
            self._trainer._save_checkpoint(self._trainer.model_wrapped, trial=None)
        finally:
            undo()
        self.save_states(folder / f"checkpoint-{self._trainer.state.global_step}")

    def save_states(self, folder: Path) -> None:
        """Put the states of all callbacks beside what the trainer has saved; every rank.

        Args:
            folder: A checkpoint's.
        """
        # Every rank: an error in a state must not be one rank's alone.
        encoded = encode_states(self.state_dict())
        if self._trainer.args.should_save:
            write_states(encoded, folder, name=self._file_name)

    def load_states_of(self, folder: Path) -> None:
        """Take back the states of a checkpoint; every rank.

        Args:
            folder: Of the checkpoint. One without states is told.
        """
        self._load(None, str(folder))

    def close(self, *, after_exception: bool = False) -> None:
        """Put everything back; see `LoopHandle.close`."""
        super().close(after_exception=after_exception)
        for name in ("_trainer", "_signals", "_computed", "_remembered", "_shares"):
            self.__dict__.pop(name, None)

    def _compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Neither an evaluation nor a replay, nor one more loss that only a log will see.
        is_own = model.training and torch.is_grad_enabled() and not self._suites.replays.is_running
        if self.is_closed or not is_own:
            return original(model, inputs, *args, **kwargs)
        kwargs = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        self._begin_micro_batch(original, inputs, kwargs)
        assert isinstance(self._replayer, TrainerReplayer)
        if self._signals is not None:
            self._signals.begin()
        with self._replayer.memory.recording(self._remembered):
            result = original(model, inputs, **kwargs)
        if self._signals is not None:
            self._signals.end(inputs)
        loss = result[0] if isinstance(result, tuple) else result
        self._computed = loss if isinstance(loss, Tensor) else None
        return result

    def _begin_micro_batch(self, compute: Callable[..., Any], inputs: Any, kwargs: dict[str, Any]) -> None:
        self._remembered = None
        replays, tally = self._suites.replays, self._suites.tally
        if replays.is_on:
            replays.begin((inputs,), kwargs)
            if isinstance(replays.recorder, Recorder) and isinstance(self._replayer, TrainerReplayer):
                self._remembered = self._replayer.begin(replays.recorder.micro_batches[-1], compute)
        self._suites.facts.see_batch(inputs)
        if tally.weights:
            tally.begin(inputs)
            self._shares = Shares.of(self._trainer, inputs, kwargs.get("num_items_in_batch"), compute=compute)

    def _backward(self, original: Callable[..., Any], loss: Any, **kwargs: Any) -> Any:
        shares = Shares() if self._shares is None else self._shares
        # One that is the very same was divided by nothing in between.
        is_divided = loss is not self._computed and not shares.is_scaled(self._trainer)
        steps = self._trainer.current_gradient_accumulation_steps
        if self._remembered is not None:
            self._remembered.divisor = steps if is_divided else 1
        self._computed = self._shares = None
        result = original(loss, **kwargs)
        self._num_backwards += 1
        self._batch_index += 1
        self._num_calls += 1
        if isinstance(loss, Tensor):
            if is_divided:
                self._suites.tally.add(loss, scale=1.0 / steps, starts=True)
            else:
                shares.add(loss, self._suites.tally, num_parts=steps)
        return result

    def _clip_grad_norm_(self, original: Callable[..., Any], parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        if max_norm != math.inf or norm_type != 2:
            return super()._clip_grad_norm_(original, parameters, max_norm, norm_type)
        # The trainer only asks for the norm, which is known: one pass and one collective less, and before our clips.
        parameters = list(parameters)
        for _, suite in self._begin(self._numbers_of(parameters)):
            norm = suite.total_norm()
            if norm is not None:
                return norm
        return original(parameters, max_norm, norm_type=norm_type)

    def _alarm_folder(self, name: str) -> Path:
        return Path(self._trainer.args.output_dir) / _FOLDER / name
