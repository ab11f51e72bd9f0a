"""The step's gradient without some tokens: what its norm would be, and the gradient itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stabilizer.fsdp import dtensor_class
from stabilizer.localize.lockstep import Lockstep
from stabilizer.localize.prober import Prober
from stabilizer.localize.recording import MicroBatch
from stabilizer.reduction import Reducer

__all__ = ["Averager", "Difference", "copy_into_", "error_of_subtraction", "rebuild"]

_BUCKET = 1 << 24  # elements that are averaged at once


class Difference:
    """What closing the gates has taken out of a step's gradient, by parameter: this rank's shards.

    Args:
        gradients: Of the step, as observed.
    """

    def __init__(self, gradients: Sequence[Tensor | None]) -> None:
        self._gradients = list(gradients)
        self._sums: list[Tensor | None] = [None] * len(gradients)

    @torch.no_grad()
    def add_(self, opened: Sequence[Tensor | None], closed: Sequence[Tensor | None]) -> None:
        """Take a micro-batch.

        Args:
            opened: Gradients of its replay.
            closed: Of the pass with the gates closed. Both lists are used up.
        """
        for number, (whole, rest) in enumerate(zip(opened, closed, strict=True)):
            if whole is None:
                continue
            taken = whole if rest is None else whole.sub_(rest)
            known = self._sums[number]
            self._sums[number] = taken if known is None else known.add_(taken)

    def fill(self) -> list[Tensor | None]:
        """What was taken out, by parameter, with zeros where that is nothing: it exists where the gradients do."""
        zeros = _zeros(self._gradients)
        pairs = zip(zeros, self._sums, strict=True)
        self._sums = [zero if zero is None or taken is None else taken for zero, taken in pairs]
        return self._sums

    @torch.no_grad()
    def remaining(self, *, factor: Tensor | float) -> list[Tensor | None]:
        """The step's gradient without it.

        Args:
            factor: What brings the replayed gradients to the scale of the step's.
        """
        return [
            gradient if gradient is None or taken is None else gradient - taken * _on(factor, taken)
            for gradient, taken in zip(self._gradients, self._sums, strict=True)
        ]


class Averager:
    """Averages tensors over all ranks, a bucket at a time: as many collectives on every rank.

    Its memory is taken beforehand: a rank that ran out of it between two collectives would leave the others waiting.

    Args:
        tensors: What will be averaged, or tensors like it.
        reducer: Reaches the other ranks.
    """

    def __init__(self, tensors: Sequence[Tensor | None], reducer: Reducer) -> None:
        self._reducer, self._buckets = reducer, list[list[int]]()
        size = largest = 0
        for number, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if not self._buckets or size >= _BUCKET:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(number)
            size += tensor.numel()
            largest = max(largest, size)
        device = next((tensor.device for tensor in tensors if tensor is not None), reducer.device)
        self._buffer = torch.zeros(largest, device=device)

    def average_(self, tensors: Sequence[Tensor | None]) -> None:
        """Average, in place.

        Args:
            tensors: As many as were given before, of the same shapes.
        """
        if self._reducer.world_size == 1:
            return
        for bucket in self._buckets:
            own = [tensor for number in bucket if (tensor := tensors[number]) is not None]
            pieces = self._buffer.split([tensor.numel() for tensor in own] + [self._left(own)])[: len(own)]
            for piece, tensor in zip(pieces, own, strict=True):
                piece.copy_(tensor.reshape(-1))
            self._reducer.sum_(self._buffer).div_(self._reducer.world_size)
            for piece, tensor in zip(pieces, own, strict=True):
                tensor.copy_(piece.view_as(tensor))

    def _left(self, own: Sequence[Tensor]) -> int:
        return self._buffer.numel() - sum(tensor.numel() for tensor in own)


def rebuild(
    prober: Prober,
    lock: Lockstep,
    micro_batches: Sequence[MicroBatch | None],
    closed_units: Mapping[int, Sequence[int]],
    *,
    like: Sequence[Tensor | None],
    averager: Averager | None,
) -> list[Tensor | None] | None:
    """Run the step's micro-batches again without some units: exactly the gradient that is left of it.

    Args:
        prober: Runs them.
        lock: Keeps the ranks together.
        micro_batches: Of the step; `None` where this rank has fewer than another.
        closed_units: Of this rank, by micro-batch.
        like: The step's gradients, which exist or not on every rank alike.
        averager: Where gradients are a rank's own; `None` where they are reduced.

    Returns:
        By parameter, with the loss scale in it; `None` if any rank has failed.
    """
    sums: list[Tensor | None] = []
    for micro_batch in micro_batches:
        lock.attempt(lambda micro_batch=micro_batch: prober.forward(micro_batch))  # type: ignore[misc]
        if lock.agree().has_failed:
            return None
        closed = () if micro_batch is None else closed_units.get(micro_batch.index, ())
        lock.attempt(lambda closed=closed: prober.backward(_without(prober, closed)))  # type: ignore[misc]
        if lock.agree().has_failed:
            return None
        gradients = prober.take_gradients()
        prober.drop()
        with torch.no_grad():
            sums = gradients if not sums else [_added(a, b) for a, b in zip(sums, gradients, strict=True)]
    if averager is None:
        return sums
    # A rank's own tokens may not reach a parameter that other ranks' tokens do.
    whole = lock.attempt(lambda: [zero if own is None else own for own, zero in zip(sums, _zeros(like), strict=True)])
    if lock.agree().has_failed or whole is None:
        return None
    averager.average_([own if wanted is not None else None for own, wanted in zip(whole, like, strict=True)])
    return whole


def error_of_subtraction(dtype: torch.dtype, *, taken: float) -> float:
    """How wrong the norm of a difference may be: what was taken out is known to a few bits of its type only.

    Args:
        dtype: Of the gradients.
        taken: Norm of what was subtracted.
    """
    return 4 * torch.finfo(dtype).eps * taken if math.isfinite(taken) else math.inf


def copy_into_(gradients: Sequence[Tensor | None], rebuilt: Sequence[Tensor | None], *, factor: Tensor | float) -> None:
    """Put a rebuilt gradient where the step's is.

    Args:
        gradients: Of the step; changed in place.
        rebuilt: In their order.
        factor: What brings it to their scale.
    """
    with torch.no_grad():
        for gradient, new in zip(gradients, rebuilt, strict=True):
            if gradient is None:
                continue
            target, source = _local(gradient), None if new is None else _local(new)
            if source is None:
                target.zero_()
            else:
                target.copy_(source)
                if isinstance(factor, Tensor) or factor != 1.0:
                    target.mul_(_on(factor, target))


def _on(factor: Tensor | float, tensor: Tensor) -> Tensor | float:
    return factor.to(tensor.device) if isinstance(factor, Tensor) else factor


def _zeros(like: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if gradient is None else torch.zeros_like(gradient) for gradient in like]


def _without(prober: Prober, closed: Sequence[int]) -> Tensor | None:
    if not closed:
        return None
    opened = torch.ones(prober.gate.num_units, dtype=torch.bool)
    opened[list(closed)] = False
    return opened


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one.add_(other)


def _local(tensor: Tensor) -> Tensor:
    dtensor = dtensor_class()
    if dtensor is not None and isinstance(tensor, dtensor):
        sharded: object = tensor
        local: Tensor = sharded.to_local()  # type: ignore[attr-defined]
        return local
    return tensor
