"""The tensors that autograd takes for parameters, whatever the model shows of them."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from stabilizer.fsdp import dtensor_class, fsdp2_groups
from stabilizer.parameters import ParameterIndex
from stabilizer.reduction import world_size

__all__ = ["Leaf", "NotPossibleError", "count_copies", "is_dtensor", "leaves_of"]


class NotPossibleError(Exception):
    """No local norms for this model."""


@dataclasses.dataclass(eq=False)
class Leaf:
    """A tensor that autograd accumulates a gradient for.

    Attributes:
        find: Gives the tensor; `None` as long as there is none.
        positions: Parameters of the index that it consists of; `None` for a piece that is none of them.
        sizes: Elements of each piece of a flat tensor; `None` if there is one piece.
        num_ranks: Over how many ranks its wrapper spreads the data.
        mesh_size: Ranks of its own mesh, if it is a DTensor.
        copies: How many ranks with the same data hold the same gradient, if it is no DTensor.
    """

    find: Callable[[], Tensor | None]
    positions: Sequence[int | None]
    sizes: Sequence[int] | None = None
    num_ranks: int = 1
    mesh_size: int = 1
    copies: int = 1


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; imports nothing to find out.

    Args:
        tensor: Any.
    """
    dtensor = dtensor_class()
    return dtensor is not None and isinstance(tensor, dtensor)


def count_copies(leaves: Sequence[Leaf]) -> None:
    """How many ranks hold the same gradient of a plain tensor: those of a tensor-parallel group, where there is one.

    Experts are DTensors too, over ranks with data of their own; what spreads the data over all ranks has no copies.
    """
    mesh_size = max((leaf.mesh_size for leaf in leaves), default=1)
    for leaf in leaves:
        leaf.copies = min(mesh_size, max(1, world_size() // leaf.num_ranks))


def leaves_of(model: nn.Module, index: ParameterIndex) -> list[Leaf]:
    """Where gradients of a model's parameters arrive before any reduction.

    Args:
        model: As it trains, wrapped.
        index: Of the parameters that are asked for.

    Raises:
        NotPossibleError: If some cannot be told apart.
    """
    positions = {parameter: position for position, parameter in enumerate(index.parameters)}
    leaves = _fsdp1_leaves(model, positions) + _fsdp2_leaves(model, positions)
    wrapped = {position for leaf in leaves for position in leaf.positions}
    plain = [(parameter, position) for parameter, position in positions.items() if position not in wrapped]
    return leaves + [Leaf(_always(parameter), (position,)) for parameter, position in plain]


def _always(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _fsdp1_leaves(model: nn.Module, positions: Mapping[Tensor, int]) -> list[Leaf]:
    module = sys.modules.get("torch.distributed.fsdp")
    units = [] if module is None else module.FullyShardedDataParallel.fsdp_modules(model)
    leaves = []
    for flat in (unit._handle.flat_param for unit in units if unit._handle is not None):
        if any(spec is not None for spec in flat._param_extensions):
            raise NotPossibleError(
                "FSDP1 made one plain, flat tensor of tensor-parallel parameters; fully_shard keeps them apart"
            )
        pieces, sizes = [positions.get(flat)], None
        if flat._params is not None:
            parameters = iter(flat._params)
            pieces = [None if is_padding else positions.get(next(parameters)) for is_padding in flat._is_padding_mask]
            sizes = flat._numels_with_padding
        if any(position is not None for position in pieces):
            # Tensor parallelism is refused: no rank has a copy of another's gradient.
            leaves.append(Leaf(_always(flat), pieces, sizes=sizes, num_ranks=world_size()))
    return leaves


def _fsdp2_leaves(model: nn.Module, positions: Mapping[Tensor, int]) -> list[Leaf]:
    leaves = []
    for parameter in (parameter for group in fsdp2_groups(model.modules()) for parameter in group.fsdp_params):
        position = positions.get(parameter.sharded_param)
        if position is not None:
            # Made by the first forward pass and kept from then on; only its memory comes and goes.
            gathered = functools.partial(getattr, parameter, "_unsharded_param", None)
            num_ranks = parameter.sharded_param.device_mesh.size()
            leaves.append(Leaf(gathered, [position], num_ranks=num_ranks))
    return leaves
