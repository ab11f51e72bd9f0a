"""Which of an optimizer's parameters are embeddings whose rows can be told apart, and which of them this rank holds."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from stabilizer.optimizer_health.layers import OptimizerLayers

__all__ = ["Embedding", "find_embeddings"]


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Rows of one embedding that lie on this rank.

    Attributes:
        name: Of the module.
        number: Position of the parameter among those of the layers.
        num_rows: Of the whole embedding.
        num_columns: Of the whole embedding.
        offset: Number of this rank's first row.
    """

    name: str
    number: int
    num_rows: int
    num_columns: int
    offset: int


def find_embeddings(model: nn.Module, layers: OptimizerLayers) -> tuple[list[Embedding], list[str]]:
    """Embeddings among the parameters of an optimizer.

    Args:
        model: As it trains, wrapped.
        layers: Of the optimizer; sharded parameters as they are between steps.

    Returns:
        Those whose rows lie whole on a rank, and the names of others: cut by column, or cut as part of a flat tensor.

    Example:
        >>> from stabilizer.parameters import ParameterIndex
        >>> model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 5))
        >>> find_embeddings(model, OptimizerLayers(ParameterIndex(model), layers=["0", "1"]))
        ([Embedding(name='0', number=0, num_rows=5, num_columns=2, offset=0)], [])
    """
    numbers = {id(parameter): number for number, parameter in enumerate(layers.parameters)}
    found: dict[int, Embedding] = {}
    others = []
    for module in model.modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or id(module.weight) not in numbers:
            continue
        number = numbers[id(module.weight)]
        name = layers.names[number].removesuffix(".weight")
        offset = _offset(module.weight, layers.placements(number))
        [local] = layers.local([module.weight])
        if offset is None or local.dim() != 2 or local.shape[1] != module.embedding_dim:
            others.append(name)
        else:
            found[number] = Embedding(name, number, module.num_embeddings, module.embedding_dim, offset)
    return list(found.values()), list(dict.fromkeys(others))


def _offset(weight: Tensor, placements: tuple[Any, ...]) -> int | None:
    """Number of the first row on this rank; `None` where rows are not dealt out in one go."""
    cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if not cut:
        return 0
    placement: Any = placements[cut[0]]
    # Not a subclass: FSDP2 over TP deals rows out in another order.
    if len(cut) > 1 or type(placement).__name__ != "Shard" or placement.dim != 0:
        return None
    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    num_rows, num_pieces = weight.shape[0], int(mesh.shape[cut[0]])
    size = -(-num_rows // num_pieces)  # as `torch.chunk` cuts
    return min(int(coordinate[cut[0]]) * size, num_rows)
