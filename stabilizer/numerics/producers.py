"""Which module makes a value that is not finite, and which ones only pass it on."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from stabilizer.localize.recomputing import is_backward
from stabilizer.localize.taps import clean_modules
from stabilizer.numerics.tracing import Call, Event, Kinds, Producer, first_in_backward, first_in_forward, value_of
from stabilizer.numerics.values import kinds_of, tensors_in

__all__ = ["ProducerWatch"]

_FINE: Kinds = (False, False, False)


class ProducerWatch:
    """Watches every module of a model in one forward pass and the backward pass after it.

    In the forward pass the producer is the first module in the order of execution whose output is not finite though all
    that it was given, its parameters and its buffers are; in the backward pass, the first one that makes a gradient
    that is not finite of gradients that are. Whatever comes after it carries what it was given. Minus infinity counts
    where nothing else is found: masks are full of it.

    No value is changed, and the hooks are gone when the context is left, after an exception too. Of the tensors nothing
    is kept but three flags each, on the device until `found`.

    Args:
        model: Wrapped or not.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> _ = model[0].weight.data.fill_(3e38), model[0].bias.data.zero_()
        >>> with ProducerWatch(model) as watch:
        ...     loss = model(torch.ones(1, 2)).sum()
        >>> str(watch.found([], loss.item()))
        '0 makes Inf: output, of inputs and parameters that are finite'
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[Call] = []
        self._open: list[tuple[nn.Module, int]] = []
        self._events: list[Event] = []
        self._nodes: Any = WeakTensorKeyDictionary()
        self._num_nodes = 0
        # Of nodes, in the order of the backward pass.
        self._gradients: list[tuple[int, Tensor]] = []
        # Lists of calls, ways and what was seen there: read in one piece.
        self._flags: list[tuple[list[Any], str, Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> ProducerWatch:
        for name, module in clean_modules(self._model).items():
            before, after = functools.partial(self._before, name), functools.partial(self._after, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._open, self._nodes = [], [], WeakTensorKeyDictionary()

    def found(self, gradients: Sequence[tuple[str, Tensor | None]], loss: float = 0.0) -> Producer | None:
        """Who was the first; the host waits.

        Args:
            gradients: Of parameters, by name, in the model's order.
            loss: Of the pass.

        Returns:
            `None` where all is finite.
        """
        self._read()
        found = first_in_forward(self._calls, self._events)
        if found is None and not math.isfinite(loss):
            found = first_in_forward(self._calls, self._events, minus_counts=True)
            if found is None:
                value = "NaN" if math.isnan(loss) else "Inf" if loss > 0 else "-Inf"
                found = Producer(kind="loss", module="", path="", value=value)
        if found is None:
            flags = _on_host([kinds for _, kinds in self._gradients])
            nodes = [node for node, _ in self._gradients]
            found = first_in_backward(self._calls, list(zip(nodes, flags, strict=True)))
        return found or _of_parameters(gradients)

    def _read(self) -> None:
        flags, self._flags = self._flags, []
        for (seen, path, _), kinds in zip(flags, _on_host([kinds for _, _, kinds in flags]), strict=True):
            seen.append((path, kinds))

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        parent = self._open[-1][1] if self._open else None
        call = Call(name, parent, 0 if parent is None else self._calls[parent].depth + 1)
        number = len(self._calls)
        self._calls.append(call)
        self._open.append((module, number))
        if not is_backward():
            self._events.append(("enter", number))
            self._note(call.given, (args, kwargs), "")
            for own, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                self._note(call.state, tensor, own)
        if not torch.is_grad_enabled():
            return None
        # Each module gets a view of its own, whose gradient is its own part of the tensor's.
        args = tuple(self._viewed(value) for value in args)
        kwargs = {key: self._viewed(value) for key, value in kwargs.items()}
        for path, tensor in _given(args, kwargs):
            self._watch(tensor, path, call.given_nodes)
        return args, kwargs

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        index = next((at for at in reversed(range(len(self._open))) if self._open[at][0] is module), None)
        if index is None:
            return
        number = self._open[index][1]
        del self._open[index:]
        call = self._calls[number]
        if not is_backward():
            self._events.append(("exit", number))
            self._note(call.made, output, "output")
        if torch.is_grad_enabled():
            for path, tensor in tensors_in(output, "output"):
                self._watch(tensor, path, call.made_nodes)

    def _note(self, seen: list[Any], value: Any, path: str) -> None:
        found = _given(*value) if not path else tensors_in(value, path)
        for way, tensor in found:
            kinds = kinds_of(tensor)
            if kinds is not None:
                self._flags.append((seen, way, kinds))

    def _viewed(self, value: Any) -> Any:
        is_plain = type(value) is Tensor and value.requires_grad and value.layout == torch.strided
        return value.view_as(value) if is_plain else value

    def _watch(self, tensor: Tensor, path: str, nodes: list[tuple[str, int]]) -> None:
        if not tensor.requires_grad:
            return
        # A tensor that was changed in place since is another node.
        version, number = self._nodes.get(tensor, (-1, -1))
        if version != tensor._version:
            number = self._num_nodes
            # Some take no hook (views that somebody changes in place): there is nothing to see then.
            with contextlib.suppress(RuntimeError):
                # The graph must not keep the watch alive, nor the other way round.
                tensor.register_hook(functools.partial(_see, weakref.ref(self), number))
                self._num_nodes += 1
                self._nodes[tensor] = (tensor._version, number)
                nodes.append((path, number))
            return
        nodes.append((path, number))

    def _add(self, node: int, gradient: Tensor) -> None:
        kinds = kinds_of(gradient)
        if kinds is not None:
            self._gradients.append((node, kinds))


def _see(watch: weakref.ref[ProducerWatch], node: int, gradient: Tensor) -> None:
    alive = watch()
    if alive is not None:
        alive._add(node, gradient)


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    positional = [found for at, value in enumerate(args) for found in tensors_in(value, f"input[{at}]")]
    return positional + [found for key, value in kwargs.items() for found in tensors_in(value, key)]


def _on_host(flags: Sequence[Tensor]) -> list[Kinds]:
    if not flags:
        return []
    device = flags[0].device
    return [tuple(row) for row in torch.stack([kinds.to(device) for kinds in flags]).tolist()]


def _of_parameters(gradients: Sequence[tuple[str, Tensor | None]]) -> Producer | None:
    """The first of them in the order of a backward pass."""
    for name, gradient in reversed(gradients):
        kinds = None if gradient is None else kinds_of(gradient)
        if kinds is not None and bool(kinds.any()):
            module, _, own = name.rpartition(".")
            [row] = _on_host([kinds])
            return Producer(kind="parameter_gradient", module=module, path=own, value=value_of(row))
    return None
