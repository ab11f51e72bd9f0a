"""How a wrapped model reduces its gradients and what it computes with, found by looking; nothing is exchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.fsdp import dtensor_class, fsdp2_groups
from stabilizer.reduction import world_size

__all__ = ["Reduction", "compute_shapes", "inner_optimizer", "reductions", "whole_sizes"]

# By name: DDP and FSDP1 have hooks of the same names in different modules, and none is imported to ask.
_HOOKS = {
    "bf16_compress_hook": torch.bfloat16,
    "bf16_compress_wrapper_hook": torch.bfloat16,
    "fp16_compress_hook": torch.float16,
    "fp16_compress_wrapper_hook": torch.float16,
    "FP16_COMPRESS": torch.float16,
}
_TRANSPARENT_HOOKS = ("", "allreduce_hook", "ALLREDUCE", "reduce_scatter_hook")

# Of a parameter: who reduces its gradient, and in which type; or a reason why that is not known.
Reduction = tuple[str, "torch.dtype | str"]


def reductions(model: nn.Module) -> dict[Reduction, int]:
    """In which types gradients are reduced over the ranks.

    Args:
        model: As it trains, wrapped.

    Returns:
        Who reduces ("DDP", "FSDP1", "FSDP2", "tensor parallelism", "nobody") and the type, or a reason why it is not
        known, with the number of trainable parameter tensors that this is true of. Nothing on one process without a
        wrapper.
    """
    found: dict[Tensor, Reduction] = {}
    # Outer modules come first, so that the innermost wrapper that holds a parameter has the last word.
    for module in model.modules():
        found.update(_reductions_of(module))
    counts: dict[Reduction, int] = {}
    for parameter in model.parameters():
        reduction = found.get(parameter) or _unwrapped(parameter)
        if parameter.requires_grad and reduction is not None:
            counts[reduction] = counts.get(reduction, 0) + 1
    return counts


def _reductions_of(module: Any) -> Iterator[tuple[Tensor, Reduction]]:
    """By parameter, if the module is a wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        ignored: set[str] = module.parameters_to_ignore
        for name, parameter in module.module.named_parameters():
            if name not in ignored:
                yield parameter, ("DDP", _ddp_dtype(module, parameter.dtype))
    elif isinstance(module, _fsdp_class("FullyShardedDataParallel")):
        for parameter in module.parameters():
            yield parameter, ("FSDP1", _fsdp1_dtype(module, parameter.dtype))
    elif isinstance(module, _fsdp_class("FSDPModule")):
        policy = module._get_fsdp_state()._mp_policy
        for shard in _fsdp2_parameters(module):
            parameter = shard.sharded_param
            yield parameter, ("FSDP2", policy.reduce_dtype or policy.param_dtype or parameter.dtype)


def whole_sizes(model: nn.Module) -> dict[Tensor, int]:
    """Numbers of elements of parameters over all ranks, where `numel()` tells of one rank's piece: under FSDP1.

    Args:
        model: As it trains, wrapped.
    """
    sizes: dict[Tensor, int] = {}
    for flat in _flat_parameters(model):
        if flat._params is None:
            sizes[flat] = sum(flat._numels)
        else:
            sizes.update(zip(flat._params, flat._numels, strict=True))
    return sizes


def compute_shapes(model: nn.Module) -> Iterator[tuple[Tensor, torch.Size]]:
    """Shapes that a rank multiplies with: gathered from data-parallel shards, cut by tensor parallelism.

    Args:
        model: As it trains, wrapped.

    Yields:
        Parameter and shape; a flat parameter of FSDP1 comes once for each parameter in it.
    """
    gathered: dict[Tensor, list[torch.Size]] = {}
    for flat in _flat_parameters(model):
        if flat._params is None:
            gathered[flat] = list(flat._shapes)
        else:
            gathered.update((parameter, [shape]) for parameter, shape in zip(flat._params, flat._shapes, strict=True))
    for module in model.modules():
        if isinstance(module, _fsdp_class("FSDPModule")):
            gathered.update((shard.sharded_param, [shard._orig_size]) for shard in _fsdp2_parameters(module))
    dtensor = dtensor_class()
    for parameter in model.parameters():
        is_cut = dtensor is not None and isinstance(parameter, dtensor)
        local: Any = parameter.detach()
        for shape in gathered.get(parameter, [local.to_local().shape if is_cut else parameter.shape]):
            yield parameter, shape


def _fsdp_class(name: str) -> Any:
    module = sys.modules.get("torch.distributed.fsdp")
    return getattr(module, name, _Nobody)


class _Nobody:
    """Stands for a class that nobody has imported."""


def _flat_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, _fsdp_class("FullyShardedDataParallel")):
            handle: Any = getattr(module, "_handle", None)
            if handle is not None:
                yield handle.flat_param


def _fsdp2_parameters(module: Any) -> list[Any]:
    """What FSDP2 itself keeps of the parameters of one unit."""
    return [shard for group in fsdp2_groups([module]) for shard in group.fsdp_params]


def _ddp_dtype(wrapper: Any, own: torch.dtype) -> torch.dtype | str:
    mixed = getattr(wrapper, "mixed_precision", None)
    if mixed is not None:
        # DDP's own hook casts from the one to the other only where both are given.
        return mixed.reduce_dtype or mixed.param_dtype or own
    hooks = [hook for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    if hooks:
        return _hook_dtype(hooks[-1], own)
    # Hooks of C++ leave their name in DDP's own record only.
    name = wrapper._get_ddp_logging_data().get("comm_hook", "")
    return _named_hook_dtype(str(name).rpartition(".")[2], own)


def _fsdp1_dtype(unit: Any, own: torch.dtype) -> torch.dtype | str:
    mixed = unit.mixed_precision
    dtype = mixed.reduce_dtype or mixed.param_dtype or own
    hook = getattr(unit, "_comm_hook", None)
    return dtype if hook is None else _hook_dtype(hook, dtype)


def _hook_dtype(hook: Any, own: torch.dtype) -> torch.dtype | str:
    # A hook around a user's hook names it as functools.wraps does.
    inner = getattr(hook, "__wrapped__", hook)
    return _named_hook_dtype(getattr(inner, "__name__", type(inner).__name__), own)


def _named_hook_dtype(name: str, own: torch.dtype) -> torch.dtype | str:
    if name in _HOOKS:
        return _HOOKS[name]
    return own if name in _TRANSPARENT_HOOKS else f"not known, the communication hook {name} decides"


def _unwrapped(parameter: Tensor) -> Reduction | None:
    dtensor = dtensor_class()
    if dtensor is not None and isinstance(parameter, dtensor):
        return ("tensor parallelism", "activations are reduced, gradients of weights are not")
    return None if world_size() == 1 else ("nobody", "there is no DDP or FSDP around the model")


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer of torch inside what `accelerator.prepare` returned.

    Args:
        optimizer: Wrapped or not.
    """
    while hasattr(optimizer, "optimizer") and isinstance(optimizer.optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
