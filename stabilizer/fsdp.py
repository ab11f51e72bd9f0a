"""What only FSDP and DTensor know: how they cut parameters, looked up where the program has imported them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["check_shards", "dtensor_class", "fsdp1_shard_sizes", "fsdp2_groups", "has_fsdp1", "has_fsdp2", "reshard"]


def dtensor_class() -> type | None:
    """The class of DTensors, `None` where there cannot be any."""
    # A DTensor can only exist where its module was imported; importing it ourselves costs half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def fsdp1_shard_sizes(model: nn.Module) -> dict[Tensor, int]:
    """Number of pieces that FSDP1 cuts each parameter's flat gradient into; nothing for unsharded units."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return {}
    fsdp, strategy = module.FullyShardedDataParallel, module.ShardingStrategy
    sizes: dict[Tensor, int] = {}
    # Outer units come first, so that the innermost unit that holds a parameter has the last word.
    for unit in fsdp.fsdp_modules(model):
        pieces = 1 if unit.sharding_strategy == strategy.NO_SHARD else unit.process_group.size()
        ignored: set[Tensor] = getattr(unit, "_ignored_params", set())
        sizes.update({parameter: pieces for parameter in unit.parameters() if parameter not in ignored})
        for parameter, factor in _fsdp1_tensor_parallel(unit).items():
            sizes[parameter] = pieces * factor
        for parameter in ignored:
            sizes.pop(parameter, None)
    return sizes


def _fsdp1_tensor_parallel(unit: Any) -> dict[Tensor, int]:
    """Number of pieces of a unit's parameters that were DTensors before FSDP1 made one flat, plain tensor of them."""
    handle = getattr(unit, "_handle", None)
    flat = None if handle is None else handle.flat_param
    # DTensorSpecs, `None` for a plain parameter; private, and the only trace that is left.
    specs = getattr(flat, "_param_extensions", None) or ()
    factors = [
        1
        if spec is None
        else math.prod(n for p, n in zip(spec.placements, spec.mesh.shape, strict=True) if p.is_shard())
        for spec in specs
    ]
    if flat is None or all(factor == 1 for factor in factors):
        return {}
    if flat._params is not None:
        return dict(zip(flat._params, factors, strict=True))
    if len(set(factors)) > 1:
        raise ValueError(
            f"an FSDP unit holds parameters that tensor parallelism cuts into {sorted(set(factors))} pieces in one "
            "flat parameter: their norms cannot be told apart. Use FSDP(..., use_orig_params=True) or fully_shard."
        )
    return {flat: factors[0]}


def _fsdp2_class() -> type | None:
    module = sys.modules.get("torch.distributed.fsdp")
    return None if module is None else getattr(module, "FSDPModule", None)


def has_fsdp1(model: nn.Module) -> bool:
    """Whether any part of a model is wrapped by FSDP1."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and any(isinstance(part, module.FullyShardedDataParallel) for part in model.modules())


def has_fsdp2(model: nn.Module) -> bool:
    """Whether any part of a model is sharded by `fully_shard`."""
    fsdp2 = _fsdp2_class()
    return fsdp2 is not None and any(isinstance(part, fsdp2) for part in model.modules())


def fsdp2_groups(modules: Iterable[nn.Module]) -> list[Any]:
    """What FSDP2 itself keeps of the parameters of its units: private, and moved with torch 2.12.

    Args:
        modules: Those that are no units count for nothing.
    """
    fsdp2 = _fsdp2_class()
    units: list[Any] = [module for module in modules if fsdp2 is not None and isinstance(module, fsdp2)]
    groups: list[Any] = []
    for state in (unit._get_fsdp_state() for unit in units):
        groups += state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reshard(model: nn.Module) -> None:
    """Give FSDP2 units their shards back: a gathered one (after an evaluation) shows parameters without gradients."""
    fsdp2 = _fsdp2_class()
    if fsdp2 is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp2):
            unit: Any = module
            unit.reshard()


def check_shards(model: nn.Module, named: Mapping[Tensor, str], wanted: Sequence[Tensor]) -> None:
    """Refuse FSDP2 units that still show gathered parameters while the optimizer has the shards."""
    fsdp2, dtensor = _fsdp2_class(), dtensor_class()
    if fsdp2 is None or dtensor is None or not any(isinstance(module, fsdp2) for module in model.modules()):
        return
    known = {id(parameter) for parameter in wanted}
    gathered = [name for p, name in named.items() if not isinstance(p, dtensor) and id(p) not in known]
    unknown = sum(isinstance(parameter, dtensor) and parameter not in named for parameter in wanted)
    if gathered and unknown:
        raise ValueError(
            f"parameters {gathered[:5]} ({len(gathered)} in all) of FSDP2 units are gathered, while the optimizer has "
            f"{unknown} shards that the model does not show: call reshard() on every FSDPModule before the step"
        )
