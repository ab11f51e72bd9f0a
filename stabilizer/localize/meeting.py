"""No rank waits for one that has failed: ranks meet before each collective of a model that is run again.

A rank that raises in the middle of a forward or a backward pass leaves its peers in an all-gather or a reduction, for
ever. Inside of `meeting` every collective is preceded by a small one on a group of our own; the rank that has failed
takes part in that one too, once, and all of them break off at the same place. Then `recover` makes FSDP ready again.

That works where all ranks have the same collectives in the same order, as a step that is trained in lockstep has:
FSDP1, FSDP2, HSDP, tensor parallelism, SyncBatchNorm and collectives in a loss. It does not help against a rank that is
killed or never comes back, nor where the transport itself fails. Point-to-point messages are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stabilizer.fsdp import dtensor_class
from stabilizer.localize.recomputing import is_backward
from stabilizer.reduction import world_size

__all__ = ["meeting", "recover"]

#: In the names of the methods of a process group that wait for other ranks: their names differ from version to version.
_COLLECTIVE = ("barrier", "broadcast", "gather", "reduce", "scatter", "alltoall", "all_to_all")
_NAMESPACES = ("_c10d_functional", "_dtensor")
_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd", "isend", "irecv", "batch_p2p_ops", "mesh_get_process_group")


@contextlib.contextmanager
def meeting(meet: Callable[[], None], *, has_dtensors: bool = False) -> Iterator[None]:
    """Have all ranks meet before each collective.

    Args:
        meet: Goes on only if all ranks have come; a collective itself, which is not met for.
        has_dtensors: Whether operations on DTensors may have collectives (tensor parallelism): they go by another way,
            which costs every operation some microseconds.
    """
    if world_size() == 1:
        yield
        return
    guarded = _Meeting(meet)
    with contextlib.ExitStack() as stack:
        for name in list(vars(dist.ProcessGroup)):
            if any(word in name for word in _COLLECTIVE):
                stack.enter_context(_patched(dist.ProcessGroup, name, guarded))
        if has_dtensors:
            stack.enter_context(_Functional(guarded))
        yield


class _Meeting:
    """Meets, but not for the meeting's own collective, nor for what other threads do."""

    def __init__(self, meet: Callable[[], None]) -> None:
        self._meet, self._thread, self._is_meeting = meet, threading.get_ident(), False

    def __call__(self) -> None:
        # Autograd has threads of its own for devices, one at a time.
        if self._is_meeting or not (threading.get_ident() == self._thread or is_backward()):
            return
        self._is_meeting = True
        try:
            self._meet()
        finally:
            self._is_meeting = False


@contextlib.contextmanager
def _patched(owner: Any, name: str, meet: Callable[[], None]) -> Iterator[None]:
    original = getattr(owner, name)
    # As the class has it: what it gives is no method any more, and would be called without the group.
    kept = vars(owner)[name]

    @functools.wraps(original)
    def with_meeting(*args: Any, **kwargs: Any) -> Any:
        meet()
        return original(*args, **kwargs)

    setattr(owner, name, with_meeting)
    try:
        yield
    finally:
        setattr(owner, name, kept)


class _Functional(TorchDispatchMode):
    """Meets before collectives that are operators: those of DTensors, which never come by a process group's methods."""

    supports_higher_order_operators = True

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meet = meet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtensor = dtensor_class()
        if dtensor is not None and any(issubclass(kind, dtensor) for kind in types):
            return NotImplemented  # first it must become what its ranks do
        namespace, _, name = str(getattr(func, "_name", "")).partition("::")
        if namespace in _NAMESPACES and name.partition(".")[0] not in _NO_COLLECTIVES:
            self._meet()
        return func(*args, **(kwargs or {}))


def recover(model: nn.Module) -> None:
    """Make FSDP ready for another forward pass, where an exception has ended one, or a backward pass, in the middle.

    No collective: on every rank that breaks off at the same place. Gradients of the pass are lost.

    Args:
        model: With FSDP units or without.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return
    for unit in module.FullyShardedDataParallel.fsdp_modules(model):
        if unit._is_root:
            _recover_fsdp1(unit)
    kind = getattr(module, "FSDPModule", ())
    for unit in (part for part in model.modules() if isinstance(part, kind)):
        if unit._get_fsdp_state()._is_root:
            _recover_fsdp2(unit)


def _recover_fsdp1(unit: Any) -> None:
    from torch.distributed.fsdp import _runtime_utils

    for handle in unit._all_handles:
        # Else a reduction that never was is looked for.
        handle.flat_param._post_backward_called = False
    with torch.no_grad():
        # What it does itself when a backward pass has come to its end.
        _runtime_utils._post_backward_final_callback(unit, unit)


def _recover_fsdp2(unit: Any) -> None:
    if hasattr(unit, "reset_iter_state"):  # of newer versions
        unit.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = unit._get_fsdp_state()
    shared, communication = state._state_ctx, state._comm_ctx
    for one in shared.all_states:
        one._training_state = TrainingState.IDLE
        for group in getattr(one, "_fsdp_param_groups", None) or [one._fsdp_param_group]:
            if group is not None:
                group.finalize_backward()  # waits for what is on its way
                group._partial_reduce_output = None
                group._training_state = TrainingState.IDLE
                group._to_sharded()
    communication.post_forward_order.clear()
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_state"):
        communication.reduce_scatter_state = None
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
