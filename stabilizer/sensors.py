"""Norms of this rank's own gradient of each micro-batch, taken inside the backward pass, before any reduction.

One mechanism everywhere: a hook on the tensor that autograd takes for the leaf. That is the parameter itself on one
device and under DDP (whatever hook of the user's compresses its buckets), the gathered parameter under FSDP2 and the
flat parameter under FSDP1. It fires before accumulation, so micro-batches are told apart with and without `no_sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from stabilizer.leaves import Leaf, NotPossibleError, count_copies, is_dtensor, leaves_of
from stabilizer.norms import norms
from stabilizer.parameters import ParameterIndex

__all__ = ["Sensors"]

_ROW = 2048


class Sensors:
    """Square sums of this rank's own gradient of one micro-batch, by parameter, before any reduction.

    The gradient is what autograd made: of the loss that `backward()` was called on, divided by a number of
    micro-batches or multiplied by a GradScaler's scale if that loss was. Each call of `backward()` counts for itself:
    where one micro-batch has several, or a parameter's gradient comes in parts (a shared parameter inside of reentrant
    activation checkpoints; an FSDP1 unit with mixed precision that is called twice), the squares of the parts are added
    up, which is not the square of their sum. `torch.autograd.grad` on parameters counts as well.

    Under tensor parallelism a rank's squares are multiplied by its share, so that their sum over the tensor-parallel
    group is right; experts spread over ranks with data of their own belong to all of those.

    FSDP2 makes the gathered parameters in its first forward pass: the first micro-batch after `start` is not measured
    there (`take` returns `None`), nor is the first that reaches a unit which was never used before.

    Args:
        model: The model as it trains, wrapped or not, sharded or not.
        index: Its parameters.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> sensors = Sensors(model, ParameterIndex(model))
        >>> sensors.start()
        >>> for x in (torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])):  # accumulation: two micro-batches
        ...     model(x).backward()
        ...     print(sensors.take())
        tensor([25.])
        tensor([4.])
        >>> sensors.close()
    """

    def __init__(self, model: nn.Module, index: ParameterIndex) -> None:
        self._seen = _Seen(index)
        self._leaves: list[Leaf] = []
        self._waiting: list[Leaf] = []
        self._handles: list[RemovableHandle] = []
        try:
            self._leaves = leaves_of(model, index)
        except NotPossibleError as error:
            self._seen.reason = str(error)
        except AttributeError as error:
            self._seen.reason = f"torch {torch.__version__} keeps FSDP's gathered parameters in another place ({error})"

    @property
    def reason(self) -> str | None:
        """Why there are no local norms here, `None` as long as there are; may be known with the first gradients."""
        return self._seen.reason

    @property
    def has_seen(self) -> bool:
        """Whether any gradient came since the last `take`."""
        return self._seen.has_any

    @property
    def is_complete(self) -> bool:
        """Whether every leaf has its hook, so that no gradient comes unseen."""
        return bool(self._handles) and not self._waiting

    def start(self) -> None:
        """Put the hooks on; does nothing if they are on."""
        if self._handles or self._waiting or self.reason is not None:
            return
        self._seen.clear()
        self._waiting = list(self._leaves)
        self._hook_waiting()

    def close(self) -> None:
        """Take the hooks off; `start` puts them on again."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._waiting = [], []
        self._seen.clear()

    def take(self) -> Tensor | None:
        """What came since the last call; call it after each micro-batch.

        Returns:
            Square sums, shape (parameters of the index,), float32, on the device of the gradients: 0 where no gradient
            came, not finite where a gradient is not (or its norm exceeds 1.8e19). `None` if no gradient came at all,
            if a gradient may have come that had no hook yet, and if there is a `reason`.
        """
        is_complete = not self._hook_waiting()
        found = self._seen.clear()
        if self.reason is not None:
            self.close()
            return None
        device = next((norm.device for norm in found if norm is not None), None)
        if device is None or not is_complete:
            return None
        zero = torch.zeros((), device=device)
        return torch.stack([zero if norm is None else _to(norm, device) for norm in found]).square_()

    def _hook_waiting(self) -> bool:
        """Hook the leaves that have appeared; whether there were any."""
        waiting = []
        for leaf in self._waiting:
            tensor = leaf.find()
            if tensor is None or not tensor.requires_grad:
                waiting.append(leaf)
                continue
            leaf.mesh_size = tensor.device_mesh.size() if is_dtensor(tensor) else 1  # type: ignore[attr-defined]
            self._handles.append(tensor.register_hook(_hook(self._seen, leaf)))
        has_hooked = len(waiting) < len(self._waiting)
        self._waiting = waiting
        if has_hooked:
            count_copies(self._leaves)
        return has_hooked


class _Seen:
    """What the hooks write; knows no model and keeps no gradient."""

    def __init__(self, index: ParameterIndex) -> None:
        self.reason: str | None = None
        self._names = index.names
        self._norms: list[Tensor | None] = [None] * len(index)

    @property
    def has_any(self) -> bool:
        """Whether any norm is there."""
        return any(norm is not None for norm in self._norms)

    def clear(self) -> list[Tensor | None]:
        """Norms by position, and start anew."""
        found, self._norms = self._norms, [None] * len(self._norms)
        return found

    def add(self, leaf: Leaf, gradient: Tensor) -> None:
        """Take a gradient in."""
        if leaf.sizes is not None:
            pieces = norms(gradient.view(-1).split(list(leaf.sizes)), device=gradient.device).unbind()
            for position, norm in zip(leaf.positions, pieces, strict=True):
                if position is not None:
                    self._add_norm(position, norm)
            return
        position = leaf.positions[0]
        assert position is not None
        weight = 1 / leaf.copies
        if type(gradient) is not Tensor and is_dtensor(gradient):
            gradient, weight = self._local(gradient, position)
        norm = _norm(gradient)
        self._add_norm(position, norm if weight == 1 else norm * weight**0.5)

    def _local(self, gradient: Any, position: int) -> tuple[Tensor, float]:
        """This rank's elements, and its share in them within the tensor-parallel mesh."""
        weight = 1.0
        for placement, size in zip(gradient.placements, gradient.device_mesh.shape, strict=True):
            if placement.is_partial() and size > 1:
                raise NotPossibleError(
                    f"the gradient of {self._names[position]!r} is {placement!r}: each tensor-parallel rank holds a "
                    "summand of it, whose norms do not add up (SequenceParallel leaves it so)"
                )
            weight /= size if placement.is_replicate() else 1
        local = gradient.to_local()
        return local.wait() if hasattr(local, "wait") else local, weight

    def _add_norm(self, position: int, norm: Tensor) -> None:
        before = self._norms[position]
        self._norms[position] = norm if before is None else torch.hypot(_to(before, norm.device), norm)


def _hook(seen: _Seen, leaf: Leaf) -> Callable[[Tensor], None]:
    # Refers to neither model nor gradient, so that nothing lives longer for it.
    def hook(gradient: Tensor) -> None:
        if seen.reason is not None:
            return
        try:
            # With create_graph=True a gradient has a graph, which our norm must not become a part of.
            seen.add(leaf, gradient.detach() if gradient.requires_grad else gradient)
        except Exception as error:
            # Raised here, it would end the user's backward pass.
            seen.reason = str(error) if isinstance(error, NotPossibleError) else f"{type(error).__name__}: {error}"

    # Else pickling a plain tensor with a hook warns that the hook is lost.
    marked: Callable[[Tensor], None] = unserializable_hook(hook)
    return marked


def _norm(tensor: Tensor) -> Tensor:
    """L2 norm in float32, shape (): `norms` for one tensor, at a third of the host's time for the usual ones."""
    size = tensor.numel()
    if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
        return norms([tensor], device=tensor.device)[0]
    norm: Callable[..., Tensor] = torch.linalg.vector_norm
    if size <= _ROW or not tensor.is_cpu:
        return norm(tensor)
    # One long row of squares would lose digits on a CPU.
    if size % _ROW == 0 and size <= _ROW * _ROW and tensor.is_contiguous():
        return norm(norm(tensor.view(-1, _ROW), dim=1))
    return norms([tensor], device=tensor.device)[0]


def _to(value: Tensor, device: torch.device) -> Tensor:
    # Only a copy to a device waits for itself: the host would read before one from a device is done.
    return value if value.device == device else value.to(device, non_blocking=device.type != "cpu")
