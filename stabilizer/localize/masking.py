"""Gradients by unit, a token or a sample: their norms, and the gradient of some units alone; of DTensors too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stabilizer.fsdp import dtensor_class

__all__ = ["check_dims", "masked", "unit_norms", "whole"]


def check_dims(x: Tensor, dims: int) -> None:
    """Refuse a tensor without units.

    Args:
        x: That is to be gated.
        dims: How many of its dimensions are units.

    Raises:
        ValueError: If it has not as many.
    """
    if not 1 <= dims <= x.dim():
        raise ValueError(
            f"dims={dims}: a tensor of shape {tuple(x.shape)} has not as many dimensions of tokens or samples; gate "
            "per-token terms before they are summed up"
        )


@torch.no_grad()
def unit_norms(x: Tensor, *, dims: int, ord: float = 2) -> Tensor:  # noqa: A002
    """Norm of every unit, accumulated in float32 whatever the dtype.

    Args:
        x: Its leading dimensions are the units; of a DTensor whole norms are made (collective).
        dims: How many.
        ord: Of the norm.

    Returns:
        Shape of the leading dimensions, float32.

    Example:
        >>> unit_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), dims=1)
        tensor([5., 2.])
    """
    if x.dim() == dims:
        return whole(x.abs()).to(torch.float32)
    wide = torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32
    rest = tuple(range(dims, x.dim()))
    return whole(torch.linalg.vector_norm(x, ord, dim=rest, dtype=None if x.is_complex() else wide)).to(torch.float32)


def masked(gradient: Tensor, open: Tensor) -> Tensor:  # noqa: A002
    """A gradient without that of closed units, whatever it may be: NaN and infinity too.

    Args:
        gradient: Its leading dimensions are the units; of a DTensor the local part is taken, without communication.
        open: Which units stay, bool, shape of the leading dimensions; of a DTensor those of the whole.

    Returns:
        A new tensor of the same kind.

    Example:
        >>> masked(torch.tensor([[1.0, 2.0], [torch.nan, 4.0]]), torch.tensor([True, False]))
        tensor([[1., 2.],
                [0., 0.]])
    """
    trailing = (1,) * (gradient.dim() - open.dim())
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(gradient, dtensor):
        return torch.where(open.view(*open.shape, *trailing), gradient, 0)
    sharded: Any = gradient
    local = _local(sharded)
    mask = _local(_cut_like(open, sharded)).view(*local.shape[: open.dim()], *trailing)
    closed = torch.where(mask, local, 0)
    return _as(sharded, closed)


def _as(sharded: Any, local: Tensor) -> Tensor:
    made: Tensor = type(sharded).from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
    return made


def _cut_like(open: Tensor, gradient: Any) -> Any:  # noqa: A002
    """The mask as a DTensor whose local part belongs to the gradient's."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    # What is split along the features, or a summand, has the whole mask.
    dims = [p.dim % gradient.dim() if isinstance(p, Shard) else open.dim() for p in gradient.placements]
    cut = [Shard(dim) if dim < open.dim() else Replicate() for dim in dims]
    same = DTensor.from_local(open, gradient.device_mesh, [Replicate()] * len(cut), run_check=False)
    return same.redistribute(placements=cut)


def whole(x: Tensor) -> Tensor:
    """A DTensor's whole tensor (collective); any other tensor as it is.

    Args:
        x: Any.
    """
    dtensor = dtensor_class()
    if dtensor is not None and isinstance(x, dtensor):
        sharded: Any = x
        gathered: Tensor = sharded.full_tensor()
        return gathered
    return x


def _local(x: Any) -> Tensor:
    local: Any = x.to_local()
    plain: Tensor = local.wait() if hasattr(local, "wait") else local
    return plain
