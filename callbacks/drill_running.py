"""Drilling: the faults of one run, hung into its host."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.console import RunConsole
from stabilizer.callbacks.drill_gradients import LAYER_KINDS, LayerFaults
from stabilizer.callbacks.drill_moments import Moment, Schedule
from stabilizer.callbacks.drill_states import RateFaults, ScaleFaults
from stabilizer.callbacks.drill_tokens import TokenFaults
from stabilizer.callbacks.hosting import stand_before
from stabilizer.callbacks.notices import drill_notice
from stabilizer.callbacks.watching import ForwardHook
from stabilizer.errors import StabilizerWarning, logger
from stabilizer.faults import Fault
from stabilizer.faults.changes import corrupt_
from stabilizer.faults.places import places_of
from stabilizer.reduction import world_size

__all__ = ["Drilling"]


class Drilling:
    """The faults of one run.

    Args:
        faults: All of them.
        seed: Of what they draw.
        host: A `stabilizer.callbacks.run_host.RunHost`; takes what puts everything back.
        next_step: Number of the optimizer step that comes next.
        console: Where it says what it breaks.
        is_announced: Whether it does.

    Raises:
        ValueError: If one of them cannot happen in this run.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        seed: int,
        host: Any,
        next_step: Callable[[], int],
        console: RunConsole,
        is_announced: bool = True,
    ) -> None:
        self._host, self._next_step, self._seed = host, next_step, seed
        self._is_announced, self._console = is_announced, console
        self._step, self._num_forwards, self._num_replays = -1, 0, 0
        self._corrupted: list[tuple[Tensor, Tensor]] = []
        self._told: set[int] = set()  # numbers of the faults that were announced
        self._is_told = False  # whether the batch that comes is one that the loop has told
        self._schedule = Schedule(faults, seed=seed, is_announced=is_announced)
        for number, fault in enumerate(faults):
            _naming(number, self._check, fault)
        replayer = host.replays.replayer
        self._tokens = TokenFaults(self._schedule, host.model if replayer is None else replayer.model)
        places = {
            number: _naming(number, places_of, host.model, fault.layer, draw=self._schedule.draw(number))
            for number, fault in enumerate(faults)
            if fault.kind in LAYER_KINDS
        }
        self._layers = LayerFaults(self._schedule, places)
        jumps = any(fault.kind == "learning_rate_jump" for fault in faults)
        self._rates = RateFaults(self._schedule, host.optimizers) if jumps else None
        self._scales = ScaleFaults(self._schedule, host)
        host.undo.append(self.close)
        if host.kind == "lightning":
            host.undo.append(stand_before(host.engine.strategy, "training_step", self._training_step))
        else:
            hook = host.model.register_forward_pre_hook(ForwardHook(self), prepend=True, with_kwargs=True)
            host.undo.append(hook.remove)
        if replayer is not None:
            host.undo.append(stand_before(replayer, "loss", self._replay))
        if hasattr(replayer, "tell"):
            host.undo.append(stand_before(replayer, "tell", self._tell))

    def see_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the model begins, in a loop.

        Args:
            module: The model.
            args: Of its forward.
            kwargs: Likewise.
        """
        if module.training and torch.is_grad_enabled() and not self._host.replays.is_running:
            self._begin((args, kwargs))

    def close_gradients(self) -> None:
        """A step's gradients are complete: what may run now are replays."""
        self._tokens.end()
        self._layers.put_back()

    def end_step(self, step: int) -> None:
        """A step is over.

        Args:
            step: Its number.
        """
        self._tokens.end()
        self._layers.end_step()
        self._put_back_batches()
        self._schedule.end_step(step)
        self._schedule.moment, self._num_forwards, self._num_replays = None, 0, 0

    def close(self) -> None:
        """Put everything back."""
        self._tokens.end()
        self._layers.close()
        if self._rates is not None:
            self._rates.close()
        self._scales.put_back()
        self._put_back_batches()
        self._schedule.moment = None

    def _check(self, fault: Fault) -> None:
        if fault.rank >= world_size():
            raise ValueError(f"rank={fault.rank}: the run has {world_size()} processes, 0 to {world_size() - 1}")
        if fault.last_step < self._next_step():
            raise ValueError(
                f"step={fault.step}: that is over, the run goes on at step {self._next_step()}: take the fault out"
            )
        model = self._host.model
        if fault.kind in LAYER_KINDS or fault.kind == "token_loss" or self._host.kind != "lightning":
            compiled = next((name for name, module in model.named_modules() if _is_compiled(module)), None)
            if compiled is not None:
                raise ValueError(
                    f"kind={fault.kind!r}: {compiled or 'the model'} is compiled, and no hook reaches inside: drill "
                    "without torch.compile"
                )

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands before the strategy's, and before what records its batches."""
        if self._host.replays.is_running:
            return original(*args, **kwargs)
        self._begin((args, kwargs))
        try:
            return original(*args, **kwargs)
        finally:
            self._tokens.end()

    def _replay(self, original: Callable[..., Any], micro_batch: Any) -> Any:
        """Stands before the replayer's `loss`."""
        self._num_replays += 1
        self._schedule.moment = Moment(self._next_step(), micro_batch.index, self._num_replays)
        self._layers.put_back()
        self._tokens.begin()
        try:
            return original(micro_batch)
        finally:
            self._tokens.end()

    def _tell(self, original: Callable[..., Any], batch: Any) -> Any:
        """Stands before the replayer's `tell`: the loop tells more of a batch than the model is given."""
        self._move(self._next_step())
        self._corrupt(batch)
        self._is_told = True
        return original(batch)

    def _move(self, step: int) -> None:
        """On to the next micro-batch."""
        if step != self._step:
            self._step, self._num_forwards = step, 0
        self._schedule.moment = Moment(step, self._num_forwards)

    def _begin(self, batch: Any) -> None:
        try:
            self._move(self._next_step())
            if not self._num_forwards:
                self._say(self._step)
            self._num_forwards += 1
            for number, _, _ in self._schedule.due("dead_rank"):
                self._die(number)
            if not self._is_told:
                self._corrupt(batch)
            self._is_told = False
            self._layers.put_back()
            if self._rates is not None:
                self._rates.begin()
            self._scales.begin()
            self._tokens.begin()
        except StabilizerWarning:
            raise
        except Exception:
            logger.exception("drill: a fault could not be put in; training goes on")

    def _say(self, step: int) -> None:
        """On the process that speaks for all, whatever rank a fault is on."""
        for number, fault in enumerate(self._schedule.faults if self._is_announced else ()):
            if fault.is_in(step) and number not in self._told:
                self._told.add(number)
                self._console.tell(drill_notice(number, fault, step=step), is_limited=False)

    def _corrupt(self, batch: Any) -> None:
        for number, fault, moment in self._schedule.due("corrupted_batch"):
            assert fault.factor is not None
            row = None if fault.token is None else fault.token[0]
            seed = self._schedule.draw(number, step=moment.step).randrange(1 << 31)
            changed = corrupt_(batch, factor=fault.factor, row=row, seed=seed)
            self._corrupted += changed
            if changed:
                self._schedule.note(number, f"{len(changed)} tensors of the batch are corrupted")

    def _put_back_batches(self) -> None:
        """A data set may hold these very tensors."""
        corrupted, self._corrupted = self._corrupted, []
        with torch.no_grad():
            for tensor, before in reversed(corrupted):
                tensor.copy_(before)

    def _die(self, number: int) -> None:
        self._schedule.note(number, "this process kills itself")
        for handler in (*logger.handlers, *logging.getLogger().handlers):
            handler.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def _naming(number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; an error of it names the fault."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        raise ValueError(f"faults[{number}]: {error}") from None


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
