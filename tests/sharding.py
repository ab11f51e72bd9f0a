"""Every way to spread the models of `tests.models` over the ranks of a running process group, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.models import MLP, TinyTransformer

__all__ = [
    "full",
    "hsdp_mesh",
    "mesh_1d",
    "mesh_2d",
    "sequence_parallel",
    "shard_fsdp1",
    "shard_fsdp2",
    "tensor_parallel",
]


def mesh_1d(*, name: str = "data") -> DeviceMesh:
    """All ranks in one axis.

    Args:
        name: Of the axis.
    """
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def mesh_2d(first: int, second: int, *, names: tuple[str, str] = ("data", "tensor")) -> DeviceMesh:
    """`first` x `second` ranks.

    Args:
        first: Size of the outer axis.
        second: Size of the inner axis.
        names: Of the axes.
    """
    return init_device_mesh("cpu", (first, second), mesh_dim_names=names)


def hsdp_mesh() -> DeviceMesh:
    """2 x 2: replicas of shards, for `fully_shard`."""
    return mesh_2d(2, 2, names=("replicate", "shard"))


def shard_fsdp2(model: nn.Module, *, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """`fully_shard` each block, then the root.

    Args:
        model: Changed in place.
        mesh: One axis (FSDP), or replicate x shard (HSDP); default all ranks in one axis.
        **options: Of `fully_shard`.

    Returns:
        The model itself.
    """
    mesh = mesh if mesh is not None else mesh_1d()
    for module in [*_blocks(model), model]:
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            # Tensor parallelism returns views, and `fully_shard` warns of a view that might be changed in place.
            module.register_forward_hook(lambda module, inputs, output: output.clone())
        fully_shard(module, mesh=mesh, **options)
    return model


def shard_fsdp1(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """Wrap each block, then the root, with original parameters.

    Args:
        model: Its blocks are replaced by wrapped ones.
        **options: Of FullyShardedDataParallel.

    Returns:
        The wrapper.
    """
    options = {"device_id": torch.device("cpu"), "use_orig_params": True, **options}
    blocks = set(_blocks(model))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in blocks:
                setattr(parent, name, FullyShardedDataParallel(child, **options))
    return FullyShardedDataParallel(model, **options)


def tensor_parallel(model: nn.Module, *, mesh: DeviceMesh) -> nn.Module:
    """Plain tensor parallelism: columns, then rows; what lies between is replicated (a plain tensor on every rank).

    Args:
        model: An MLP or a TinyTransformer (not with adapters or tied weights), changed in place.
        mesh: One axis.

    Returns:
        The model itself.
    """
    if isinstance(model, MLP):
        plan: dict[str, ParallelStyle] = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    for block in _blocks(model):
        parallelize_module(block, mesh, _block_plan())
    return model


def sequence_parallel(model: nn.Module, *, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism with the norms split along the sequence: the gradients of the norms' weights stay Partial.

    Args:
        model: A TinyTransformer (not with adapters or tied weights), changed in place.
        mesh: One axis, whose size divides the sequence length.

    Returns:
        The model itself.
    """
    root: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, root)
    split: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for block in _blocks(model):
        plan = {
            **_block_plan(output_layouts=Shard(1)),
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**split),
            "feed_forward_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**split),
        }
        parallelize_module(block, mesh, plan)
    return model


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank: collective for a DTensor.

    Args:
        tensor: A gradient, sharded, partial or neither.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _blocks(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, TinyTransformer):
        return list(model.layers)
    return [model.first] if isinstance(model, MLP) else []


def _block_plan(**rows: Any) -> dict[str, ParallelStyle]:
    return {
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(**rows),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(**rows),
    }
