"""What a trainer was like before a micro-batch, so that its loss can be computed again as it was.

A trainer of transformers or TRL computes its loss from more than the batch: counters, coefficients that follow the run,
and numbers that other ranks have given it. Nothing here knows their names.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from stabilizer.callbacks.hosting import stand_before

__all__ = ["Memory", "Remembered", "as_it_was", "remember", "undisturbed"]

_COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


@dataclasses.dataclass(eq=False)
class Remembered:
    """A micro-batch's own.

    Attributes:
        values: Attributes of the trainer before it: numbers, text, tensors.
        syncs: Whether it is the last of its step, as the accelerator was told.
        given: What collectives gave within the loss, in their order.
        divisor: What the trainer has divided the loss by before it was propagated.
    """

    values: dict[str, Any]
    syncs: bool
    given: list[Any] = dataclasses.field(default_factory=list)
    divisor: float = 1.0


class Memory:
    """Keeps what the accelerator's collectives give within a loss, and gives it once more in place of them.

    A loss that is computed again on one rank must not wait for the others; and a number that they had part in (a
    quantile over all ranks, say) would come out differently.

    Args:
        accelerator: Of Accelerate.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._recorded: list[Any] | None = None
        self._played: Iterator[Any] | None = None
        self._depth = 0
        names = [name for name in _COLLECTIVES if hasattr(accelerator, name)]
        self._undo = [stand_before(accelerator, name, self._collective) for name in names]

    @contextlib.contextmanager
    def recording(self, remembered: Remembered | None) -> Iterator[None]:
        """Keep what collectives give.

        Args:
            remembered: Where; `None` keeps nothing.
        """
        self._recorded = None if remembered is None else remembered.given
        try:
            yield
        finally:
            self._recorded = None

    @contextlib.contextmanager
    def playing(self, remembered: Remembered) -> Iterator[None]:
        """Let no collective happen: give what was kept.

        Args:
            remembered: Of the micro-batch.
        """
        self._played = iter(remembered.given)
        try:
            yield
        finally:
            self._played = None

    def close(self) -> None:
        """Put the accelerator's methods back."""
        while self._undo:
            self._undo.pop()()

    def _collective(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._played is not None:
            try:
                return _own(next(self._played))
            except StopIteration:
                raise RuntimeError(
                    "computed again, the loss asks other ranks for more than it did the first time: it depends on "
                    "something that is not the trainer's, and cannot be searched"
                ) from None
        # One may call another.
        self._depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._recorded is not None and not self._depth:
            self._recorded.append(_own(result))
        return result


def remember(trainer: Any) -> Remembered:
    """Take note of a trainer, at the cost of a small dictionary.

    Args:
        trainer: About to compute a loss.
    """
    kinds = (bool, int, float, str, Tensor)
    values = {name: value for name, value in vars(trainer).items() if value is None or isinstance(value, kinds)}
    return Remembered(values, syncs=bool(trainer.accelerator.sync_gradients))


@contextlib.contextmanager
def as_it_was(trainer: Any, remembered: Remembered) -> Iterator[None]:
    """Put a trainer back to before a micro-batch, and then to what it is now.

    Args:
        trainer: The trainer.
        remembered: Of the micro-batch.
    """
    own, accelerator = vars(trainer), trainer.accelerator
    before, syncs = {name: own.get(name) for name in remembered.values}, accelerator.sync_gradients
    try:
        own.update(remembered.values)
        accelerator.gradient_state._set_sync_gradients(remembered.syncs)
        yield
    finally:
        own.update(before)
        accelerator.gradient_state._set_sync_gradients(syncs)


@contextlib.contextmanager
def undisturbed(trainer: Any) -> Iterator[None]:
    """Whatever is done to a trainer's own containers, counters and state within is undone.

    Args:
        trainer: The trainer.
    """
    own = vars(trainer)
    before = dict(own)
    own.update({name: _contents(value) for name, value in before.items()})
    own["state"] = copy.copy(trainer.state)
    # TRL times its methods, and sends the times to the reporters that are named here.
    own["args"] = copy.copy(trainer.args)
    own["args"].report_to = []
    try:
        yield
    finally:
        own.clear()
        own.update(before)


def _contents(value: Any) -> Any:
    """A container of its own; what it holds in the end stays the same object."""
    if isinstance(value, dict):
        new = copy.copy(value)
        for key in value:
            new[key] = _contents(value[key])
        return new
    if isinstance(value, list) and type(value) is list:
        return [_contents(item) for item in value]
    return copy.copy(value) if isinstance(value, deque | set) else value


def _own(value: Any) -> Any:
    """Tensors of its own: what was given may be changed in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_own(item) for item in value)
    return {key: _own(item) for key, item in value.items()} if type(value) is dict else value
