"""Norms, largest values and non-finite counts of lists of tensors: one value a tensor, on the device, nothing changed.

Measuring only: no reduction over ranks, no layers, no names. `None` stands for an absent gradient and an empty tensor
for a shard without elements; both give the neutral element, so that the result's shape never depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["count_nan", "count_nonfinite", "largest", "norms", "square_sums"]

# On a CPU, torch adds squares one after the other in float32: 2.6 % off for 38 M equal elements. Rows of this length
# keep the error of every step of the sum under 2e-6 (and cost less than one long row).
_ROW = 2048
# Reduced-precision gradients are widened piece by piece, so that the float32 copy stays in the cache.
_PIECE = 65536


@torch.no_grad()
def norms(tensors: Sequence[Tensor | None], *, device: torch.device) -> Tensor:
    """L2 norm of every tensor, accumulated in float32 whatever its dtype.

    Args:
        tensors: Dense or sparse tensors of any shape, dtype and device.
        device: Where the result goes.

    Returns:
        Norms, shape (len(tensors),), float32. Not finite where a tensor is not, and where the norm of a finite tensor
        exceeds 1.8e19, the root of what float32 holds.

    Example:
        >>> norms([torch.tensor([3.0, 4.0]), None], device=torch.device("cpu"))
        tensor([5., 0.])
    """
    return _map(tensors, _l2, device)


@torch.no_grad()
def largest(tensors: Sequence[Tensor | None], *, device: torch.device) -> Tensor:
    """Largest absolute value of every tensor, the norm of order infinity.

    Args:
        tensors: Dense or sparse tensors of any shape, dtype and device.
        device: Where the result goes.

    Returns:
        Largest absolute values, shape (len(tensors),), float32. Infinity stands for any non-finite element, NaN
        included: unlike NaN, it survives a maximum on every backend.

    Example:
        >>> largest([torch.tensor([3.0, -4.0]), torch.empty(0), torch.tensor(float("nan"))], device=torch.device("cpu"))
        tensor([4., 0., inf])
    """
    return _map(tensors, _max_abs, device, real=torch.abs).nan_to_num_(nan=torch.inf, posinf=torch.inf)


@torch.no_grad()
def count_nonfinite(tensors: Sequence[Tensor | None], *, device: torch.device) -> Tensor:
    """Number of elements that are NaN or infinite in every tensor.

    Args:
        tensors: Dense or sparse tensors of any shape, dtype and device.
        device: Where the result goes.

    Returns:
        Counts, shape (len(tensors),), float64 (exact up to 2**53, and it can be packed with sums).

    Example:
        >>> count_nonfinite([torch.tensor([1.0, float("inf")]), None], device=torch.device("cpu"))
        tensor([1., 0.], dtype=torch.float64)
    """
    return _count(tensors, lambda tensor: ~torch.isfinite(tensor), device)


@torch.no_grad()
def count_nan(tensors: Sequence[Tensor | None], *, device: torch.device) -> Tensor:
    """Number of elements that are NaN in every tensor.

    Args:
        tensors: Dense or sparse tensors of any shape, dtype and device.
        device: Where the result goes.

    Returns:
        Counts, shape (len(tensors),), float64.

    Example:
        >>> count_nan([torch.tensor([float("nan"), float("inf")]), None], device=torch.device("cpu"))
        tensor([1., 0.], dtype=torch.float64)
    """
    return _count(tensors, torch.isnan, device)


@torch.no_grad()
def square_sums(tensors: Sequence[Tensor | None], *, device: torch.device) -> Tensor:
    """Sum of squares of every tensor in float64: slow, and right for any finite gradient.

    Args:
        tensors: Dense or sparse tensors of any shape, dtype and device.
        device: Where the result goes.

    Returns:
        Square sums, shape (len(tensors),), float64.

    Example:
        >>> square_sums([torch.tensor([1e30])], device=torch.device("cpu"))
        tensor([1.0000e+60], dtype=torch.float64)
    """
    return _map(
        tensors,
        lambda group: [tensor.to(torch.float64).square().sum() for tensor in group],
        device,
        dtype=torch.float64,
    )


def _count(tensors: Sequence[Tensor | None], is_counted: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    def function(group: list[Tensor]) -> list[Tensor]:
        return [is_counted(tensor).sum().to(torch.float64) for tensor in group]

    return _map(tensors, function, device, dtype=torch.float64, real=torch.abs)


def _map(
    tensors: Sequence[Tensor | None],
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    real: Callable[[Tensor], Tensor] = lambda tensor: torch.view_as_real(tensor.resolve_conj()),
) -> Tensor:
    """Apply `function` to the tensors that have elements, a group at a time (one device, one dtype).

    `real` makes a complex tensor real: its parts for sums of squares, its absolute values for what looks at elements.
    """
    groups: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for position, tensor in enumerate(tensors):
        if tensor is not None and tensor.layout != torch.strided:
            # Repeated rows of a sparse embedding gradient count with their sum; nothing is made dense.
            tensor = tensor.coalesce().values()
        if tensor is not None and tensor.is_complex():
            tensor = real(tensor)
        if tensor is not None and tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), {})[position] = tensor
    results: dict[int, Tensor] = {}
    for (group_device, _), group in groups.items():
        values = function(list(group.values()))
        if group_device != device:
            # Only a copy to a device waits for itself: the host would read before one from a device is done.
            values = torch.stack(list(values)).to(device, non_blocking=device.type != "cpu").unbind()
        results.update(zip(group, values, strict=True))
    if len(results) < len(tensors):  # seldom, and every operator less is time on small models
        neutral = torch.zeros((), dtype=dtype, device=device)
        results = {position: results.get(position, neutral) for position in range(len(tensors))}
    ordered = [results[position] for position in range(len(tensors))]
    return torch.stack(ordered) if ordered else torch.zeros(0, dtype=dtype, device=device)


def _l2(group: list[Tensor]) -> Sequence[Tensor]:
    if group[0].device.type != "cpu":
        return _foreach(group, 2.0)
    # One call for what is left of all of them: each call costs more than the sum it makes.
    return _foreach([_shortened(tensor) for tensor in group], 2.0)


def _max_abs(group: list[Tensor]) -> Sequence[Tensor]:
    if group[0].device.type != "cpu":
        return _foreach(group, torch.inf)
    # `aminmax` reads once and hands NaN on; the norm of order infinity takes three times as long on a CPU.
    extremes = [torch.aminmax(tensor) for tensor in group]
    return [torch.maximum(-low, high).to(torch.float32) for low, high in extremes]


def _foreach(group: list[Tensor], order: float) -> Sequence[Tensor]:
    dtype = torch.promote_types(group[0].dtype, torch.float32)
    values = torch._foreach_norm(group, order, dtype=dtype)
    return values if dtype == torch.float32 else [value.to(torch.float32) for value in values]


def _shortened(tensor: Tensor) -> Tensor:
    """At most a row of numbers with the same norm, of float32 or float64."""
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return _in_rows(_flat(tensor)) if tensor.numel() > _ROW else tensor
    pieces = [_in_rows(piece.to(torch.float32)) for piece in _flat(tensor).split(_PIECE)]
    return pieces[0] if len(pieces) == 1 else _in_rows(torch.cat(pieces))


def _in_rows(flat: Tensor) -> Tensor:
    while flat.numel() > _ROW:
        whole = flat.numel() // _ROW * _ROW
        if whole == flat.numel():
            flat = torch.linalg.vector_norm(flat.view(-1, _ROW), dim=1)
            continue
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
        flat = torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).view(1)])
    return flat


def _flat(tensor: Tensor) -> Tensor:
    """All elements as one row, in memory order: a norm does not depend on the order, and a copy costs two reads."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.reshape(-1)
