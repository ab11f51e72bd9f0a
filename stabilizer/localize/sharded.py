"""What FSDP keeps aside, beside parameters and modules: gradients, gathered parameters and their names."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from stabilizer.fsdp import fsdp1_shard_sizes, reshard

__all__ = ["hidden_gradients", "let_go", "managed_names", "managed_parameters"]


def hidden_gradients(model: nn.Module) -> list[tuple[Any, str]]:
    """Where FSDP keeps gradients that no parameter of the model shows.

    Args:
        model: FSDP1 keeps a flat gradient of each unit, FSDP2 one of the gathered parameters while it does not reduce.

    Returns:
        Objects, and the attribute that is a gradient or `None`.
    """
    points: list[tuple[Any, str]] = [(unit._handle.flat_param, "grad") for unit in _fsdp1_units(model)]
    for unit in _fsdp2_units(model):
        state = unit._get_fsdp_state()
        # Several from torch 2.11 on.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                points.append((parameter, "unsharded_accumulated_grad"))
                gathered = getattr(parameter, "_unsharded_param", None)
                if gathered is not None:
                    points.append((gathered, "grad"))
    return points


def managed_names(model: nn.Module) -> dict[int, frozenset[str]]:
    """Attributes of modules that FSDP1 sets to views of what it has gathered, and lets go.

    Args:
        model: With FSDP1 units or without.

    Returns:
        Names, by the identity of the module.
    """
    names: dict[int, set[str]] = {}
    for unit in _fsdp1_units(model):
        flat = unit._handle.flat_param
        for info in [*flat._param_infos, *flat._shared_param_infos]:
            names.setdefault(id(info.module), set()).add(info.param_name)
    return {module: frozenset(found) for module, found in names.items()}


def managed_parameters(model: nn.Module) -> set[int]:
    """Identities of parameters whose memory comes and goes.

    Args:
        model: With FSDP1 units or without.
    """
    return {id(parameter) for parameter in fsdp1_shard_sizes(model)}


def let_go(model: nn.Module) -> None:
    """Free what a forward pass has gathered and no backward pass has let go.

    The optimizer is about to move the shards: gathered parameters that stay would be the old ones in the next forward.

    Args:
        model: With units or without.
    """
    reshard(model)
    for unit in _fsdp1_units(model):
        handle = unit._handle
        if handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(True)
            handle.post_reshard()


def _fsdp1_units(model: nn.Module) -> list[Any]:
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return []
    units: list[Any] = module.FullyShardedDataParallel.fsdp_modules(model)
    return [unit for unit in units if unit._handle is not None]


def _fsdp2_units(model: nn.Module) -> list[Any]:
    module = sys.modules.get("torch.distributed.fsdp")
    kind = None if module is None else getattr(module, "FSDPModule", None)
    return [] if kind is None else [part for part in model.modules() if isinstance(part, kind)]
