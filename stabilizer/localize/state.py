"""Snapshot: everything that hangs on a model's modules beside its parameters, remembered and put back in place."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stabilizer.localize.belonging import is_users_own, slots_of, wrapper_classes
from stabilizer.localize.rng import is_generator, rewinder

__all__ = ["SavedTensor", "Snapshot", "distinct", "run_all"]

#: A copy of a tensor larger than this waits on the host: the device's memory is for the replay.
_LARGE = 1 << 26

_COLLECTIONS = (list, deque, set, bytearray)
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size})
# What is registered stays registered: hooks come and go with whoever has put them there.
_NOT_OURS = frozenset(name for name in vars(nn.Module()) if "hook" in name) | {"_parameters"}


class SavedTensor:
    """A copy of a tensor, and the way back: the same memory, the same bits, the same count of changes.

    Args:
        tensor: Of any kind but a lazy one.

    Example:
        >>> tensor = torch.tensor([1.0, 2.0])
        >>> saved = SavedTensor(tensor)
        >>> _ = tensor.mul_(torch.nan)
        >>> saved.restore()
        >>> tensor, tensor._version
        (tensor([1., 2.]), 0)
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self._copy: Tensor | None = None
        if _has_memory(tensor):
            elements = distinct(tensor)
            is_large = elements.numel() * elements.element_size() > _LARGE
            self._copy = elements.to("cpu", copy=True) if is_large else elements.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Make the tensor what it was."""
        if self._copy is None or not _has_memory(self._tensor):
            return
        with torch.inference_mode(self._version is None):
            elements = distinct(self._tensor)
            if elements.shape == self._copy.shape:
                elements.copy_(self._copy)
            else:
                # Resized in place.
                self._tensor.data = self._copy.to(self._tensor.device)
        if self._version is not None:
            # A graph that was made before may hold this tensor: what it holds is what it has saved.
            torch._C._autograd._unsafe_set_version_counter((self._tensor,), (self._version,))


class Snapshot:
    """What hangs on modules: buffers and other tensors, metrics, lists, dictionaries, counters, arrays, generators.

    Everything is put back in place: the same objects with the content that they had, however deeply nested. Parameters
    and hooks are left alone. Objects of a user's own classes are looked into (`is_users_own`); trainers, optimizers,
    loaders, loggers, process groups and the like are not, nor are wrappers that shard or replicate.

    Args:
        model: With all that it holds.
        skipped: Attributes that are somebody else's, by the identity of the module.

    Example:
        >>> model = nn.BatchNorm1d(3)
        >>> model.history = [1, {"losses": [2.0]}]
        >>> snapshot = Snapshot(model)
        >>> _ = model(torch.randn(4, 3))
        >>> model.history[1]["losses"].append(3.0)
        >>> model.new = 4
        >>> snapshot.restore()
        >>> model.history, model.running_mean, hasattr(model, "new")
        ([1, {'losses': [2.0]}], tensor([0., 0., 0.]), False)
    """

    def __init__(self, model: nn.Module, *, skipped: dict[int, frozenset[str]] | None = None) -> None:
        self._skipped = skipped or {}
        self._undo: list[Callable[[], None]] = []
        # The objects too: an identity is only theirs while they live. By identity, since metrics change their hash.
        self._known: dict[int, Any] = {}
        self._waiting: list[Any] = [model]
        while self._waiting:
            value = self._waiting.pop()
            if type(value) not in _ATOMS and id(value) not in self._known:
                self._known[id(value)] = value
                self._remember(value)

    def restore(self) -> None:
        """Put everything back.

        Raises:
            Exception: The first that anything has raised, after all else was put back.
        """
        run_all(self._undo)

    def _remember(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._remember_tensor(value)
        elif isinstance(value, nn.Module):
            self._remember_module(value)
        elif isinstance(value, tuple):
            self._waiting.extend(value)
        elif isinstance(value, dict):
            self._remember_dictionary(value)
        elif isinstance(value, _COLLECTIONS):
            self._remember_items(value)
        elif is_generator(value):
            self._undo.append(rewinder(value))
        elif _is_writeable_array(value):
            self._undo.append(functools.partial(value.__setitem__, ..., value.copy()))
        elif is_users_own(value):
            self._remember_attributes(value)

    def _remember_tensor(self, value: Tensor) -> None:
        if not isinstance(value, nn.Parameter) and not is_lazy(value):
            self._undo.append(SavedTensor(value).restore)

    def _remember_dictionary(self, value: Any) -> None:
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        items = dict(kind.items(value))
        self._undo.append(functools.partial(_restore_dictionary, value, items, kind))
        self._waiting.extend(items.values())
        self._remember_attributes(value)

    def _remember_module(self, module: nn.Module) -> None:
        if isinstance(module, wrapper_classes()):
            # The rest of what they have is the state of their machinery, which a replay may move on.
            self._undo.append(functools.partial(vars(module).__setitem__, "training", module.training))
            self._waiting += [module._modules, module._buffers]
        else:
            self._remember_attributes(module, skipped=_NOT_OURS | self._skipped.get(id(module), frozenset()))

    def _remember_items(self, value: Any) -> None:
        kind: Any = next(kind for kind in _COLLECTIONS if isinstance(value, kind))
        items = list(kind.__iter__(value))

        def restore() -> None:
            if list(map(id, kind.__iter__(value))) != list(map(id, items)):
                kind.clear(value)
                (kind.update if kind is set else kind.extend)(value, items)

        self._undo.append(restore)
        if kind is not bytearray:
            self._waiting.extend(items)
            self._remember_attributes(value)

    def _remember_attributes(self, owner: Any, *, skipped: frozenset[str] = frozenset()) -> None:
        for name in slots_of(type(owner)):
            is_there = hasattr(owner, name)
            content = getattr(owner, name, None)
            self._undo.append(functools.partial(_restore_slot, owner, name, content, is_there))
            self._waiting.append(content)
        attributes = getattr(owner, "__dict__", None)
        if isinstance(attributes, dict):
            saved = dict(attributes)
            self._undo.append(functools.partial(_restore_dictionary, attributes, saved, dict, skipped=skipped))
            self._waiting.extend(content for name, content in saved.items() if name not in skipped)


def run_all(functions: list[Callable[[], None]]) -> None:
    """Call all functions, the last one first, whatever some of them raise.

    Args:
        functions: Without arguments.

    Raises:
        Exception: The first that there was, after the last call.

    Example:
        >>> run_all([lambda: print("first"), lambda: print("second")])
        second
        first
    """
    errors: list[Exception] = []
    for function in reversed(functions):
        try:
            function()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _restore_dictionary(
    target: Any, saved: dict[Any, Any], kind: type[Any], *, skipped: frozenset[str] = frozenset()
) -> None:
    current = dict(kind.items(target))
    # What is not ours is left as it has become.
    wanted = {key: current.get(key) if key in skipped else value for key, value in saved.items()}
    wanted = {key: value for key, value in wanted.items() if key in current or key not in skipped}
    wanted |= {key: value for key, value in current.items() if key in skipped}
    # By identity: keys and values may be tensors.
    if [(id(key), id(value)) for key, value in current.items()] != [(id(k), id(v)) for k, v in wanted.items()]:
        kind.clear(target)
        for key, value in wanted.items():
            kind.__setitem__(target, key, value)


def _restore_slot(owner: Any, name: str, content: Any, is_there: bool) -> None:
    if is_there:
        object.__setattr__(owner, name, content)
    elif hasattr(owner, name):
        object.__delattr__(owner, name)


def _is_writeable_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and bool(value.flags.writeable)


def _has_memory(tensor: Tensor) -> bool:
    """Not on the meta device, nor a view of what FSDP has let go."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return tensor.device.type != "meta"
    try:
        return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0
    except (NotImplementedError, RuntimeError):
        # A wrapper of other tensors has no storage of its own.
        return True


def distinct(tensor: Tensor, *, like: Tensor | None = None) -> Tensor:
    """The elements of a tensor, each once: an expanded tensor shows the same ones several times.

    Args:
        tensor: Any.
        like: Another one of its shape, whose expanded dimensions are meant instead.

    Returns:
        A view, without a graph.

    Example:
        >>> distinct(torch.zeros(2, 1).expand(2, 5)).shape
        torch.Size([2, 1])
    """
    elements = tensor.detach()
    like = tensor if like is None else like
    if elements.layout == like.layout == torch.strided:
        for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
            if size > 1 and stride == 0:
                elements = elements.narrow(dim, 0, 1)
    return elements
