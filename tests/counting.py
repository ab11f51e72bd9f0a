"""Counts collectives and waits of the host for the device, whoever causes them, and fakes a device where there is none.

All of it stands on dispatch modes, which see every operator below autograd. The optimizer and the wrappers have
collectives and reads of their own: compare two counts, with and without what is being tested.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.fake_device import Event, HostReadError, device_guard, refuse_to_wait

__all__ = ["Call", "Calls", "HostReadError", "count_collectives", "count_host_reads", "fake_cuda", "host_may_wait"]

#: Operators whose result, or its shape, depends on values: on a device the host must wait for them.
_READS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::allclose",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}
#: In the collectives' namespaces, but without communication of their own.
_NOT_COLLECTIVE = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


_may_wait = False


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        name: Namespace, operator and overload: "c10d.allreduce_.default".
        sizes: Bytes of each tensor argument, inputs and outputs, lists laid flat.
    """

    name: str
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensor arguments."""
        return sum(self.sizes)


@dataclass
class Calls:
    """What was counted, in order.

    Attributes:
        calls: One entry a call.
    """

    calls: list[Call] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def names(self) -> Counter[str]:
        """How often each operator was called."""
        return Counter(call.name for call in self.calls)

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Bytes of the tensor arguments, call by call."""
        return [call.sizes for call in self.calls]

    def minus(self, other: Calls) -> Counter[str]:
        """What is here more often than there, by operator."""
        return self.names - other.names


@contextlib.contextmanager
def count_collectives() -> Iterator[Calls]:
    """Count every operator of any `c10d` namespace that this thread dispatches.

    On a CPU all of `torch.distributed` comes through here, on any group: collectives, barriers, send and receive,
    functional collectives, those inside DTensor, DDP's reducer, FSDP1 and FSDP2 (each `*_object` function shows as the
    two collectives it is made of). Not seen: what a store does (`new_group`, `monitored_barrier`'s waiting), and
    backward passes on a GPU, which run in another thread.

    Yields:
        The calls so far.

    Example:
        >>> with count_collectives() as calls:
        ...     torch.ones(3).sum()
        tensor(3.)
        >>> len(calls)
        0
    """
    calls = Calls()

    def look(func: Any, args: Any, kwargs: Any) -> None:
        if _is_collective(func):
            calls.calls.append(_call(func, args, kwargs))

    with _Watch(look):
        yield calls


@contextlib.contextmanager
def count_host_reads(*, device_type: str | None = None) -> Iterator[Calls]:
    """Count the operators for which the host must wait for a device.

    These are reads of a scalar (`.item()`, `float`, `bool`, `if tensor`), operators whose output's shape depends on
    values (`nonzero`, `masked_select`, `unique`, indexing by a boolean tensor) and copies between device and host that
    are not `non_blocking`, in both directions.

    On a real CPU tensor `.tolist()`, `.numpy()` and `.cpu()` dispatch nothing and are not seen: use `fake_cuda`.

    Args:
        device_type: Count only what waits for this device; default any, the CPU included.

    Yields:
        The calls so far.

    Example:
        >>> with count_host_reads() as calls:
        ...     torch.ones(3).sum().item()
        3.0
        >>> calls.names
        Counter({'aten._local_scalar_dense.default': 1})
    """
    calls = Calls()

    def look(func: Any, args: Any, kwargs: Any) -> None:
        waited_for = _waits_for(func, args, kwargs)
        if waited_for is not None and device_type in (None, waited_for):
            calls.calls.append(_call(func, args, kwargs))

    with _Watch(look):
        yield calls


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """A CUDA device on any machine: tensors made inside have shapes, dtypes and `device="cuda"`, and no values.

    What raises in it, on a tensor of that device (looked up with torch 2.13, CPU build):

    - `HostReadError`: `.item()`, `float(t)`, `int(t)`, `bool(t)`, `if t`, `t in u`, `max(t, u)`, `.tolist()`,
      `torch.equal`, `torch.allclose`, `nonzero`, `torch.where(c)`, `masked_select`, `unique`, `bincount`, `t[mask]`,
      `t[index]` with a scalar tensor as index; `.cpu()`, `.to("cpu")` and `copy_` between device and host without
      `non_blocking=True`; `torch.tensor(1.0, device="cuda")` and `.to("cuda")`, which copy from pageable memory (use
      `torch.full`); `synchronize()` of an event or of the device.
    - torch's own errors: `.numpy()` and `numpy.asarray(t)` (RuntimeError), `f"{t:.2f}"` (TypeError),
      `repeat_interleave` with a tensor (DynamicOutputShapeException).

    What does not raise: `.to("cpu", non_blocking=True)`, `repr(t)`, `list(t)`, `t[0]`, `t[mask] = 1.0`, `torch.where`
    with three arguments; reads of real CPU tensors made outside. `torch.cuda.Event` is replaced by one whose `query()`
    is always False: copies without values never arrive.

    Make models inside, with `with torch.device("cuda"): TinyTransformer()`: those of `make_transformer` are copied from
    the host. A backward pass is not possible on a CPU build: fill `.grad` by hand. `torch.cuda.is_available()` stays
    what it is.

    Yields:
        The fake tensor mode.

    Example:
        >>> with fake_cuda():
        ...     norm = torch.ones(3, device="cuda").norm()
        >>> norm.device.type
        'cuda'
    """
    # Real CPU tensors may come in (a constant of the module under test); a fake device for the rest.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        device_guard(),
        mock.patch("torch.cuda.Event", Event),
        mock.patch("torch.cuda.current_stream", return_value=None),
        mock.patch("torch.cuda.synchronize", refuse_to_wait),
        fake,
        _Watch(_raise_if_waits, real_reads=True),
    ):
        yield fake


@contextlib.contextmanager
def host_may_wait() -> Iterator[None]:
    """Inside `fake_cuda`: let the host wait, for what is built once."""
    global _may_wait
    _may_wait = True
    try:
        yield
    finally:
        _may_wait = False


class _Watch(TorchDispatchMode):
    """Calls `look(func, args, kwargs)` before each operator, inside DTensor too."""

    def __init__(self, look: Callable[[Any, Any, Any], None], *, real_reads: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.look = look
        self.real_reads = real_reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A wrapper opens itself when nobody answers for it, and then dispatches what is inside.
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        self.look(func, args, kwargs)
        if self.real_reads and func._schema.name in _READS and not _has_fake(args):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _raise_if_waits(func: Any, args: Any, kwargs: Any) -> None:
    device = None if _may_wait else _waits_for(func, args, kwargs)
    if device is not None and device != "cpu":
        raise HostReadError(f"The host would wait for {device} in {func}: stay there, or copy with non_blocking=True.")


def _is_wrapper(kind: type) -> bool:
    # Both hold real tensors; FakeTensor is itself one and must not be skipped.
    return kind.__name__ in ("DTensor", "AsyncCollectiveTensor")


def _has_fake(args: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_iter(args))


def _is_collective(func: Any) -> bool:
    namespace, name = func._schema.name.split("::")
    return namespace.lstrip("_").startswith(("c10d", "dtensor")) and name not in _NOT_COLLECTIVE


def _waits_for(func: Any, args: Any, kwargs: Any) -> str | None:
    """Type of the device that the host waits for in this operator, or None."""
    name = func._schema.name
    if name in _READS or (name == "aten::index" and any(_is_mask(index) for index in args[1])):
        return str(args[0].device.type)
    if name == "aten::_to_copy":
        source, target = args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
        non_blocking = kwargs.get("non_blocking", False)
    elif name == "aten::copy_":
        source, target = args[1].device.type, args[0].device.type
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:
        return None
    if non_blocking or source == target or "cpu" not in (source, target):
        return None
    return str(target if source == "cpu" else source)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _call(func: Any, args: Any, kwargs: Any) -> Call:
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    return Call(str(func), tuple(tensor.numel() * tensor.element_size() for tensor in tensors))
