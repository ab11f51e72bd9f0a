"""What a model's checkpoints should have."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stabilizer.checkpoints.finiteness import is_finite
from stabilizer.checkpoints.guard_file import Weight
from stabilizer.names import clean_name

__all__ = ["nonfinite_buffers", "weights_of"]


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """The parameters of a model, with the shapes that they have in a gathered state dict.

    Args:
        model: As it trains, wrapped or not; sharded by FSDP, a DTensor has the shape of the whole.

    Example:
        >>> weights_of(nn.Linear(3, 2))[0]
        Weight(names=('weight',), shape=(2, 3), required=True)
    """
    model = _inner(model)
    flat = _flat_weights(model)
    if flat:
        return tuple(flat)
    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_name(name))
        parameters[id(parameter)] = parameter
    return tuple(
        Weight(tuple(names[key]), tuple(parameter.shape), parameter.requires_grad)
        for key, parameter in parameters.items()
        if not isinstance(parameter, nn.parameter.UninitializedParameter)
    )


def nonfinite_buffers(model: nn.Module) -> tuple[str, ...]:
    """Clean names of the buffers that are not finite; waits for the device.

    Args:
        model: Wrapped or not.

    Example:
        >>> module = nn.Module()
        >>> module.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        >>> nonfinite_buffers(module)
        ('mask',)
    """
    found = []
    for name, buffer in _inner(model).named_buffers():
        local = getattr(buffer, "_local_tensor", buffer)
        if local.is_floating_point() and local.device.type != "meta" and not is_finite(local.cpu()):
            found.append(clean_name(name))
    return tuple(found)


def _inner(model: nn.Module) -> nn.Module:
    wrappers = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
    return model.module if isinstance(model, wrappers) else model


def _flat_weights(model: nn.Module) -> list[Weight]:
    """Under FSDP1 parameters are pieces of flat ones, which know what they were made of."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not any(isinstance(unit, module.FullyShardedDataParallel) for unit in model.modules()):
        return []
    weights = []
    for path, unit in model.named_modules():
        handle = getattr(unit, "_handle", None) if isinstance(unit, module.FullyShardedDataParallel) else None
        if handle is not None:
            flat = handle.flat_param
            described: Iterable[tuple[str, torch.Size]] = zip(flat._fqns, flat._shapes, strict=True)
            for name, shape in described:
                full = clean_name(f"{path}.{name}" if path else name)
                # Whether one of them trains is no longer known where they share a flat parameter.
                weights.append(Weight((full,), tuple(shape), required=False))
    return weights
