"""Accelerate: the suite stands before the accelerator's own methods, without any other change of the loop.

Accelerate has no callbacks. A handle puts a method of ours before `backward`, `clip_grad_norm_`, `clip_grad_value_`,
`unscale_gradients` and `end_training` of the accelerator and before `step` and `zero_grad` of the optimizer, as
attributes of these objects, and takes them away again. Nothing is imported from Accelerate: an accelerator is what
behaves like one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import Position
from stabilizer.callbacks.hosting import refuse_same_keys, scale_still_in, stand_before, warn_of_two_clips
from stabilizer.callbacks.loop import LoopHandle
from stabilizer.callbacks.loop_replay import LossFunction
from stabilizer.callbacks.run_host import HostKind
from stabilizer.callbacks.saving import save_with_accelerator
from stabilizer.callbacks.state_files import NAME, encode_states, has_states, load_states, write_states
from stabilizer.callbacks.suite import Suite
from stabilizer.callbacks.watching import is_state_setup
from stabilizer.errors import warn
from stabilizer.inspection import inner_optimizer
from stabilizer.reduction import Reducer

__all__ = ["AccelerateHandle"]


class AccelerateHandle(LoopHandle):
    """Callbacks at work in a loop with an accelerator; see `attach`.

    Args:
        callbacks: Ours.
        model: As it trains.
        optimizers: As `accelerator.prepare` returned them.
        sink: Where values go.
        groups: See `ParameterIndex`.
        accelerator: The accelerator.
        loss_fn: See `attach`.
    """

    kind: HostKind = "accelerate"

    def __init__(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        model: nn.Module,
        optimizers: Sequence[Any],
        sink: Any,
        groups: Mapping[str, Any] | None,
        accelerator: Any,
        loss_fn: LossFunction | None = None,
    ) -> None:
        super().__init__(
            callbacks,
            model=model,
            optimizers=[inner_optimizer(wrapped) for wrapped in optimizers],
            sink=sink,
            groups=groups,
            loss_fn=loss_fn,
        )
        self._accelerator = accelerator
        # Accelerate divides every loss by the first and multiplies it by the scale of the second.
        self._replayer.divisor = accelerator.gradient_accumulation_steps
        self._replayer.scaler = accelerator.scaler
        self._suites.facts.precision = str(accelerator.mixed_precision)
        self._ran_at: dict[int, tuple[int, int]] = {}
        self._counter, self._num_calls = 0, 0
        self._is_counting = self._is_clipping = self._has_warned_of_clips = False
        try:
            # Another handle on this accelerator has files of its own.
            others = _handles_on(accelerator)
            refuse_same_keys(self.callbacks, [callback for handle in others for callback in handle.callbacks])
            self._file_name = f"{NAME}_{len(others)}" if others else NAME
            self._watch_accelerator(optimizers)
        except BaseException:
            self.close(after_exception=True)
            raise

    def _watch_accelerator(self, optimizers: Sequence[Any]) -> None:
        accelerator = self._accelerator
        for name in ("backward", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients", "end_training"):
            self._undo.append(stand_before(accelerator, name, getattr(self, f"_{name}")))
        for number, wrapped in enumerate(optimizers):
            if wrapped is self._optimizers[number]:
                self.watch(number)
                continue
            self._undo.append(stand_before(wrapped, "step", functools.partial(self._step, number)))
            self._undo.append(stand_before(wrapped, "zero_grad", functools.partial(self._zero_grad, number)))
            self._undo.append(self._optimizers[number].register_step_pre_hook(self._before_inner_step(number)).remove)
        for number, wrapped in enumerate(accelerator._optimizers):
            if all(wrapped is not own for own in optimizers):
                self._undo.append(stand_before(wrapped, "step", functools.partial(self._foreign_step, -1 - number)))
        self._undo.append(accelerator.register_save_state_pre_hook(self._save).remove)
        self._undo.append(accelerator.register_load_state_pre_hook(self._load).remove)

    def close(self, *, after_exception: bool = False) -> None:
        """Put everything back; see `LoopHandle.close`."""
        super().close(after_exception=after_exception)
        self.__dict__.pop("_accelerator", None)

    def record_loss(self, loss: Any, *, weight: Tensor | float | None = None) -> None:
        """Take the loss of a micro-batch instead of the one that `accelerator.backward` was given."""
        if not self.is_closed:
            self._suites.tally.tell(loss, weight=weight)

    def measure(self, *, scaler: Any = None) -> None:
        """Run the callbacks now; see `LoopHandle.measure`. The accelerator's own scaler is known."""
        if not self.is_closed:
            self._begin(range(len(self._optimizers)))

    @property
    def can_save(self) -> bool:
        """The accelerator does."""
        return True

    def save_checkpoint(self, name: str) -> str | None:
        """By `save_fn` where there is one, else see `save_with_accelerator`."""
        return super().save_checkpoint(name) or save_with_accelerator(self._accelerator, name)

    def position(self) -> Position:
        """Micro-batches that the accelerator has seen since the last step."""
        divisor = self._accelerator.gradient_accumulation_steps
        return Position(self._batch_index, self._num_backwards, divisor if divisor > 1 or self._is_counting else 0)

    def _backward(self, original: Callable[..., Any], loss: Any, **kwargs: Any) -> Any:
        result = original(loss, **kwargs)
        self._replayer.divisor = self._accelerator.gradient_accumulation_steps
        # `accumulate` counts micro-batches; several backward passes within one are one micro-batch. A loop without it
        # has one a step, unless the accelerator divides its losses.
        counter = self._accelerator.step
        self._is_counting = self._is_counting or counter > 0
        divides = self._accelerator.gradient_accumulation_steps > 1
        is_new = counter != self._counter if self._is_counting else divides
        starts = is_new or self._num_backwards == 0
        self._num_backwards += starts
        self._batch_index += starts
        self._counter, self._num_calls = counter, self._num_calls + 1
        if isinstance(loss, Tensor):
            self._suites.tally.add(loss, starts=starts)
        return result

    def _clip_grad_norm_(self, original: Callable[..., Any], parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        suites = self._begin(self._numbers_of(parameters))
        self._say_both_clip(f"clip_grad_norm_(..., {max_norm})", is_meant=bool(suites))
        with self._clipping():
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
        self._say_both_clip(f"clip_grad_value_(..., {clip_value})", is_meant=bool(suites))
        with self._clipping():
            result = original(parameters, clip_value)
        for _, suite in suites:
            suite.after_clip(max_norm=None, is_unscaled=True)
        return result

    def _say_both_clip(self, theirs: str, *, is_meant: bool) -> None:
        # A limit of infinity measures and does not clip.
        if is_meant and not self._has_warned_of_clips and "inf" not in theirs:
            self._has_warned_of_clips = warn_of_two_clips(self.callbacks, f"accelerator.{theirs}")

    def _unscale_gradients(self, original: Callable[..., Any], optimizer: Any = None) -> Any:
        # Without a scaler it does nothing; a clip calls it for all optimizers, whatever it clips.
        if self._accelerator.scaler is None or self._is_clipping:
            return original(optimizer)
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        inner = [inner_optimizer(wrapped) for wrapped in given]
        everything = optimizer is None
        numbers = [number for number, own in enumerate(self._optimizers) if everything or any(own is o for o in inner)]
        self._begin(numbers)
        return original(optimizer)

    def _step(self, number: int, original: Callable[..., Any], closure: Any = None) -> Any:
        if closure is not None:
            self._warn_of_closure()
        if closure is not None or not self._accelerator.sync_gradients or is_state_setup():
            return original(closure)
        self._begin([number], is_step=True)
        try:
            result = original(closure)
        except BaseException:
            self._suites.abandon(number)
            raise
        self.finish(number)
        return result

    def _before_inner_step(self, number: int) -> Callable[..., None]:
        """The latest moment: after a scaler has looked for infinities, which it would miss without gradients."""

        def before(*_: Any) -> None:
            if not is_state_setup():
                self.before_step(number)

        return before

    def _foreign_step(self, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Of another model, perhaps, whose losses are not ours; if it shares ours, they are still there for our step.
        if not self.is_closed and self._accelerator.sync_gradients:
            self._suites.tally.take(number)
            self._num_backwards = 0
        return original(*args, **kwargs)

    def _zero_grad(self, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_closed or not self._accelerator.sync_gradients:
            return original(*args, **kwargs)  # which does nothing within a window
        return super()._zero_grad(number, original, *args, **kwargs)

    @contextlib.contextmanager
    def _clipping(self) -> Iterator[None]:
        self._is_clipping = True
        try:
            yield
        finally:
            self._is_clipping = False

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
        encoded = encode_states(self.state_dict())
        if accelerator.is_main_process or is_local:
            write_states(encoded, Path(folder), name=self._file_name)

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


def _handles_on(accelerator: Any) -> list[AccelerateHandle]:
    hooks = (getattr(hook, "__self__", None) for hook in accelerator._save_model_state_pre_hook.values())
    return [handle for handle in hooks if isinstance(handle, AccelerateHandle)]
