"""Accelerate: the suite stands before the accelerator's own methods, without any other change of the loop.

Accelerate has no callbacks. `attach` puts a method of ours before `backward`, `clip_grad_norm_`, `clip_grad_value_`,
`unscale_gradients` and `end_training` of the accelerator and before the optimizer's `step`, as attributes of these
objects, and takes them away again. Nothing is imported from Accelerate: an accelerator is what behaves like one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.accelerate_setting import accelerate_setting
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Position
from stabilizer.callbacks.hosting import scale_still_in, stand_before
from stabilizer.callbacks.loop import LoopHandle, is_state_setup
from stabilizer.callbacks.prepared import inner_optimizer, prepared
from stabilizer.callbacks.sinks import AccelerateSink, LoopSink
from stabilizer.callbacks.state_files import NAME, has_states, load_states, save_states
from stabilizer.callbacks.suite import Suite
from stabilizer.errors import warn
from stabilizer.reduction import Reducer

__all__ = ["AccelerateHandle", "attach"]


def attach(
    accelerator: Any,
    *,
    model: nn.Module,
    optimizer: Any,
    callbacks: Sequence[StabilizerCallback],
    log: Any = None,
    groups: Mapping[str, Any] | None = None,
    num_steps: int | None = None,
    schedulers: Sequence[Any] | None = None,
) -> LoopHandle:
    """Attach callbacks to an Accelerate loop, or to a plain one.

    With an accelerator the callbacks run at the first of `accelerator.clip_grad_norm_`, `clip_grad_value_`,
    `unscale_gradients` and `optimizer.step` of a step whose gradients are complete (`accelerator.sync_gradients`), on
    gradients that nobody has changed. Values go to the accelerator's trackers, states into `accelerator.save_state`.
    In a plain loop they run in `optimizer.step()`, or where the loop calls `handle.measure()`.

    Args:
        accelerator: An `accelerate.Accelerator`, or `None` for a loop without one.
        model: As it trains: what `accelerator.prepare` returned, or a model wrapped by hand.
        optimizer: What `accelerator.prepare` returned, or one of torch; or a list of them.
        callbacks: Ours, in any order.
        log: A function of (values, step), or a `SummaryWriter`, to write to on rank 0 instead of the trackers.
        groups: Process groups of parameters that live on some ranks only; see `ParameterIndex`.
        num_steps: Planned optimizer steps, which the table at the start compares the warm-up with.
        schedulers: Learning-rate schedulers for that table; default: those that the accelerator has prepared.

    Returns:
        A handle, to be used in a `with` statement; leaving it puts everything back as it was.

    Raises:
        ValueError: If something cannot be attached; says what to do.

    Example:
        >>> from stabilizer.callbacks import GradNormCallback, attach
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> norms, rows = GradNormCallback(), []
        >>> with attach(None, model=model, optimizer=optimizer, callbacks=[norms], log=lambda *row: rows.append(row)):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        gradient...
        >>> rows[0][1], round(rows[0][0]["grad_norm/total"], 4)
        (0, 1.7321)
    """
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if accelerator is None:
        handle = LoopHandle(callbacks, model=model, optimizers=optimizers, sink=LoopSink(log), groups=groups)
        for number in range(len(optimizers) if not handle.is_closed else 0):
            handle.watch(number)
    else:
        model, optimizers = prepared(accelerator, model, optimizers)
        sink = AccelerateSink(accelerator) if log is None else LoopSink(log)
        handle = AccelerateHandle(
            callbacks, model=model, optimizers=optimizers, sink=sink, groups=groups, accelerator=accelerator
        )
    handle.start(
        lambda: accelerate_setting(
            accelerator, model, optimizers, callbacks, num_steps=num_steps, schedulers=schedulers
        )
    )
    return handle


class AccelerateHandle(LoopHandle):
    """Callbacks at work in a loop with an accelerator; see `attach`.

    Args:
        callbacks: Ours.
        model: As it trains.
        optimizers: As `accelerator.prepare` returned them.
        sink: Where values go.
        groups: See `ParameterIndex`.
        accelerator: The accelerator.
    """

    def __init__(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        model: nn.Module,
        optimizers: Sequence[Any],
        sink: Any,
        groups: Mapping[str, Any] | None,
        accelerator: Any,
    ) -> None:
        super().__init__(
            callbacks,
            model=model,
            optimizers=[inner_optimizer(wrapped) for wrapped in optimizers],
            sink=sink,
            groups=groups,
        )
        self._accelerator = accelerator
        self._ran_at: dict[int, tuple[int, int]] = {}
        self._counter, self._num_calls, self._is_counting = 0, 0, False
        self._has_warned_of_closure = False
        if self.is_closed:
            return
        for name in ("backward", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients", "end_training"):
            self._undo.append(stand_before(accelerator, name, getattr(self, f"_{name}")))
        for number, wrapped in enumerate(optimizers):
            if wrapped is self._optimizers[number]:
                self.watch(number)
            else:
                self._undo.append(stand_before(wrapped, "step", functools.partial(self._step, number)))
        # Another handle on this accelerator has files of its own.
        hooks = accelerator._save_model_state_pre_hook.values()
        others = sum(isinstance(getattr(hook, "__self__", None), AccelerateHandle) for hook in hooks)
        self._file_name = f"{NAME}_{others}" if others else NAME
        self._undo.append(accelerator.register_save_state_pre_hook(self._save).remove)
        self._undo.append(accelerator.register_load_state_pre_hook(self._load).remove)

    def measure(self) -> None:
        """Run the callbacks now; see `LoopHandle.measure`."""
        self._begin(range(len(self._optimizers)))

    def position(self) -> Position:
        """Micro-batches that the accelerator has seen since the last step."""
        divisor = self._accelerator.gradient_accumulation_steps if self._is_counting else 0
        return Position(self._batch_index, self._num_backwards, divisor)

    def _backward(self, original: Callable[..., Any], loss: Any, **kwargs: Any) -> Any:
        result = original(loss, **kwargs)
        # `accumulate` counts micro-batches; several backward passes within one are one micro-batch.
        counter = self._accelerator.step
        self._is_counting = self._is_counting or counter > 0
        if counter != self._counter or self._num_backwards == 0 or not self._is_counting:
            self._num_backwards += 1
            self._batch_index += 1
        self._counter, self._num_calls = counter, self._num_calls + 1
        if isinstance(loss, Tensor):
            self._suites.tally.add(loss)
        return result

    def _clip_grad_norm_(self, original: Callable[..., Any], parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        suites = self._begin(self._numbers_of(parameters))
        result = original(parameters, max_norm, norm_type=norm_type)
        given = {id(parameter) for parameter in parameters if parameter.requires_grad}
        for number, suite in suites:
            own = {id(p) for group in self._optimizers[number].param_groups for p in group["params"] if p.requires_grad}
            is_plain = norm_type == 2 and own == given
            suite.after_clip(max_norm=max_norm if is_plain else None, is_unscaled=True)
        return result

    def _clip_grad_value_(self, original: Callable[..., Any], parameters: Any, clip_value: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        suites = self._begin(self._numbers_of(parameters))
        result = original(parameters, clip_value)
        for _, suite in suites:
            suite.after_clip(max_norm=None, is_unscaled=True)
        return result

    def _unscale_gradients(self, original: Callable[..., Any], optimizer: Any = None) -> Any:
        if self._accelerator.scaler is None:
            return original(optimizer)  # which does nothing either
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        inner = [inner_optimizer(wrapped) for wrapped in given]
        everything = optimizer is None
        numbers = [number for number, own in enumerate(self._optimizers) if everything or any(own is o for o in inner)]
        self._begin(numbers)
        return original(optimizer)

    def _step(self, number: int, original: Callable[..., Any], closure: Any = None) -> Any:
        if closure is not None and not self._has_warned_of_closure:
            self._has_warned_of_closure = True
            warn(
                "optimizer.step(closure) computes gradients inside the step, where they cannot be seen before the "
                "optimizer uses them: its steps are not measured. Call accelerator.backward(loss) and optimizer.step()"
            )
        if closure is not None or not self._accelerator.sync_gradients or is_state_setup():
            return original(closure)
        self._begin([number], is_step=True)
        result = original(closure)
        self.finish(number)
        return result

    def _end_training(self, original: Callable[..., Any]) -> Any:
        # Trackers are closed and the process group is gone after it.
        self.close()
        return original()

    def _begin(self, numbers: Iterable[int], *, is_step: bool = False) -> list[tuple[int, Suite]]:
        """Run suites on raw gradients, once a step."""
        accelerator, begun = self._accelerator, []
        for number in numbers if accelerator.sync_gradients and not self.is_closed else ():
            suite, now = self._suite(number), (self._counter, self._num_calls)
            before = self._ran_at.get(number, now)
            if suite.is_open and (before[0] != now[0] or (before[1] != now[1] and not is_step)):
                # The loop has gone on to another micro-batch without a step: it skipped one.
                suite.abandon()
            self._ran_at[number] = now if not suite.is_open else before
            scaler = accelerator.scaler
            scale = scale_still_in(scaler, self._optimizers[number])
            self.run(number, grad_scale=scale, is_scaled=scaler is not None)
            begun.append((number, suite))
        return begun

    def _numbers_of(self, parameters: Sequence[Tensor]) -> list[int]:
        given = {id(parameter) for parameter in parameters}
        return [
            number
            for number, optimizer in enumerate(self._optimizers)
            if any(id(parameter) in given for group in optimizer.param_groups for parameter in group["params"])
        ]

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        accelerator = self._accelerator
        is_local = accelerator.project_configuration.save_on_each_node and accelerator.is_local_main_process
        # Every rank: an error in a state must not be one rank's alone.
        states = self.state_dict()
        if accelerator.is_main_process or is_local:
            save_states(states, Path(folder), name=self._file_name)

    def _load(self, models: Any, folder: str) -> None:
        is_there = has_states(Path(folder), name=self._file_name)
        missing = torch.tensor([float(not is_there), float(is_there)], device=self._accelerator.device)
        num_missing, num_found = Reducer(missing.device).sum(missing).tolist()
        if not num_found:
            warn(
                f"{folder} has no states of stabilizer's callbacks: they start anew. Save with accelerator.save_state "
                "inside `with attach(...)`"
            )
            return
        if num_missing:
            raise FileNotFoundError(
                f"{folder} has {self._file_name}.json on {int(num_found)} ranks and not on {int(num_missing)} others: "
                "use a folder that all nodes share, or ProjectConfiguration(save_on_each_node=True)"
            )
        self.load_state_dict(load_states(Path(folder), name=self._file_name))
