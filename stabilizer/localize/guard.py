"""Guard: whatever a replay changes is afterwards what it was, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.fsdp import dtensor_class
from stabilizer.localize.autocast import AutocastState
from stabilizer.localize.recording import MicroBatch
from stabilizer.localize.rng import RngState
from stabilizer.localize.sharded import hidden_gradients, let_go, managed_names, managed_parameters
from stabilizer.localize.state import SavedTensor, Snapshot, run_all
from stabilizer.names import clean_name

__all__ = ["Guard"]

#: Frozen parameters (a teacher, a momentum encoder) are copied up to this size in all, the smallest first.
_FROZEN = 1 << 30


class Guard:
    """Context manager around all replays of a search: training goes on as if there had been none.

    On exit, after an exception too, these are what they were on entry: random states; buffers; every attribute of every
    module, training flags, metrics, lists, dictionaries and objects of the user's own included (see `Snapshot`);
    gradients, as the same objects with the same bits; `requires_grad`; grad mode and autocast. Inside, gradients start
    from `None`. The data of trained parameters is never touched, neither saved nor put back.

    Not put back: attributes of classes and globals, iterators, and what lies outside of this process.

    Args:
        model: What is run again: the inner module under DDP (the wrapper would broadcast buffers), the sharded one
            under FSDP.
        parameters: Those of the optimizer.
        device: Of the model.

    Attributes:
        unprotected: Frozen parameters that were too large to copy, by name; a step that changes them itself (a momentum
            encoder) would do so once more.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
        >>> with Guard(model, parameters=list(model.parameters()), device=torch.device("cpu")):
        ...     model(torch.randn(4, 3)).sum().backward()
        >>> model[0].weight.grad is None, model[1].running_mean
        (True, tensor([0., 0., 0.]))
    """

    def __init__(self, model: nn.Module, *, parameters: Sequence[Tensor], device: torch.device) -> None:
        self.unprotected: tuple[str, ...] = ()
        self._model, self._parameters, self._device = model, list(parameters), device
        self._is_grad = True
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Guard:
        if self._undo:
            raise RuntimeError("this Guard is entered already: make one for each search")
        rng, self._is_grad = RngState.capture(self._device), torch.is_grad_enabled()
        # In this order backwards on exit, so that nothing draws random numbers after those are put back.
        undo = [rng.restore, AutocastState.capture(self._device).restore]
        undo.append(Snapshot(self._model, skipped=managed_names(self._model)).restore)
        undo += self._frozen()
        parameters = {id(one): one for one in [*self._parameters, *self._model.parameters()]}
        undo += [_putter(one, "requires_grad", one.requires_grad) for one in parameters.values()]
        # Last: from here on nothing can fail.
        points = [(one, "grad") for one in parameters.values()] + hidden_gradients(self._model)
        undo += [_putter(owner, name, getattr(owner, name)) for owner, name in points]
        # Gradients only fit parameters that are sharded again, and those of the replay do not then.
        undo += [lambda: let_go(self._model), lambda: _forget(parameters.values(), self._model)]
        _forget(parameters.values(), self._model)
        self._undo = undo
        return self

    def __exit__(self, *error: object) -> None:
        undo, self._undo = self._undo, []
        try:
            with torch.no_grad():
                run_all(undo)
        finally:
            torch._C._set_grad_enabled(self._is_grad)

    def restore_buffers(self, micro_batch: MicroBatch) -> None:
        """Before a replay: random states and buffers as they were before that micro-batch.

        Args:
            micro_batch: Of a `Recorder` of the same model.

        Raises:
            RuntimeError: Outside of the guard, where they would stay so.
        """
        if not self._undo:
            raise RuntimeError("restore_buffers was called outside of `with guard:`: training would go on from there")
        micro_batch.restore()

    def forget_gradients(self) -> None:
        """Between two passes of one replay: gradients start from `None` again.

        Raises:
            RuntimeError: Outside of the guard, where the step's would be lost.
        """
        if not self._undo:
            raise RuntimeError("forget_gradients was called outside of `with guard:`: the step's would be lost")
        _forget([*self._parameters, *self._model.parameters()], self._model)

    def _frozen(self) -> list[Callable[[], None]]:
        known = {id(one) for one in self._parameters} | managed_parameters(self._model)
        dtensor, left, undo, names = dtensor_class(), _FROZEN, list[Callable[[], None]](), list[str]()
        frozen = [
            (one.numel() * one.element_size(), name, one)
            for name, one in self._model.named_parameters()
            if not one.requires_grad and id(one) not in known and (dtensor is None or not isinstance(one, dtensor))
        ]
        for size, name, parameter in sorted(frozen, key=lambda entry: entry[0]):
            left -= size
            if left < 0:
                names.append(clean_name(name))
            else:
                undo.append(SavedTensor(parameter).restore)
        self.unprotected = tuple(names)
        return undo


def _forget(parameters: Iterable[Tensor], model: nn.Module) -> None:
    for owner, name in [*((one, "grad") for one in parameters), *hidden_gradients(model)]:
        if getattr(owner, name) is not None:
            setattr(owner, name, None)


def _putter(owner: Any, name: str, value: Any) -> Callable[[], None]:
    def put() -> None:
        if getattr(owner, name) is not value:
            setattr(owner, name, value)

    return put
