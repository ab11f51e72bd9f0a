"""OptimizerLayers: which of this rank's elements an optimizer moves, and the layers that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.names import Granularity, layer_names
from stabilizer.parameters import ParameterIndex
from stabilizer.reduction import Reducer, accumulation_dtype
from stabilizer.segments import Segments

__all__ = ["OptimizerLayers"]


class OptimizerLayers:
    """The parameters of one optimizer by layer, for sums over all elements of a layer on all ranks.

    Making one is a collective where there are several processes: every rank does it at the same place.

    Args:
        index: The parameters.
        layers: Layers that are looked at, in order, the same on every rank.
        granularity: What a layer is.

    Attributes:
        layers: As given.
        parameters: Those of these layers, in the order of the model.
        names: Of the parameters.
        numbers: Position of its layer for every parameter.
        reducer: Reaches the other ranks.
        is_replicated: Whether every rank holds all elements.
        sizes: Elements of every layer over all ranks, shape (layers,).

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> layers = OptimizerLayers(ParameterIndex(model), layers=["0", "1"])
        >>> layers.sizes.tolist()
        [9.0, 4.0]
        >>> layers.sums(torch.ones(1, len(layers.parameters)))
        tensor([[2., 2.]], dtype=torch.float64)
    """

    def __init__(self, index: ParameterIndex, *, layers: Sequence[str], granularity: Granularity = "block") -> None:
        self.layers = tuple(layers)
        self._index, self.device = index, index.device
        self.reducer = Reducer(self.device)
        if self.reducer.world_size > 1:
            index.all_names(self.reducer)  # ranks that hold other parameters change what this one answers for
        places = {layer: place for place, layer in enumerate(self.layers)}
        # What a layer is follows from the names on all ranks.
        overall = dict(zip(index.overall_names, layer_names(index.overall_names, granularity), strict=True))
        own = [overall[name] for name in index.names]
        self.positions = [position for position, layer in enumerate(own) if layer in places]
        self.parameters = [index.parameters[position] for position in self.positions]
        self.names = [index.names[position] for position in self.positions]
        self.numbers = [places[own[position]] for position in self.positions]
        self.is_replicated = self.reducer.world_size == 1 or index.is_replicated
        self._dtype = accumulation_dtype(self.device)
        shares = [self.share(number) for number in range(len(self.positions))]
        self._shares = torch.tensor(shares, dtype=self._dtype, device=self.device)
        self._segments: dict[int, Segments] = {}
        elements = [float(local.numel()) for local in self.local(self.parameters)]
        [self.sizes] = self.sums(torch.tensor([elements], dtype=self._dtype, device=self.device))

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's elements of tensors, for changing them too.

        Args:
            tensors: Parameters, or what lies on the ranks as they do.

        Returns:
            Plain tensors, which share memory with what was given; some may have no elements.
        """
        return [self._index.local(tensor.detach()) for tensor in tensors]

    def placements(self, number: int) -> tuple[Any, ...]:
        """How a parameter lies over its mesh; see `ParameterIndex.placements`.

        Args:
            number: Position in `parameters`.
        """
        return self._index.placements(self.positions[number], None)

    def share(self, number: int) -> float:
        """What this rank's elements of a parameter count: 1 / (number of ranks that hold the same).

        Args:
            number: Position in `parameters`.
        """
        return self._index.weight(self.positions[number], self.placements(number))

    def sums_here(self, values: Tensor) -> Tensor:
        """Sums by layer of this rank's part.

        Args:
            values: What this rank's elements of each parameter sum up to, shape (n, parameters).

        Returns:
            Shape (n, layers), float64 where the device has it.
        """
        num, num_layers = len(values), len(self.layers)
        if num not in self._segments:
            ids = [row * num_layers + number for row in range(num) for number in self.numbers]
            self._segments[num] = Segments(ids, num_segments=num * num_layers, device=self.device)
        weighted = values.to(self.device, self._dtype)
        if not self.is_replicated:
            weighted = weighted * self._shares
        return self._segments[num].sum(weighted.reshape(-1)).view(num, num_layers)

    def sums(self, values: Tensor) -> Tensor:
        """Sums by layer over all ranks: a collective, but where every rank holds all elements.

        Args:
            values: What this rank's elements of each parameter sum up to, shape (n, parameters).

        Returns:
            Shape (n, layers), the same on every rank.
        """
        own = self.sums_here(values)
        return own if self.is_replicated else self.reducer.sum(own.reshape(-1)).view(own.shape)
