"""ParameterIndex: which parameters there are, what they are called, and how much of each one this rank answers for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.fsdp import check_shards, dtensor_class, fsdp1_shard_sizes, reshard
from stabilizer.names import clean_name
from stabilizer.reduction import Agreement, Entry, Reducer, agree, world_size

__all__ = ["ParameterIndex", "named_parameters"]


class ParameterIndex:
    """The trainable parameters of a model or of one optimizer, in one order on every rank.

    Every rank's local elements times its ownership weight, summed over the world, count each element of the model
    once: the weight is 1 / (number of ranks that hold the same elements). Tied parameters appear once, frozen ones not
    at all.

    Args:
        model: The model as it trains, wrapped or not, sharded or not; or its parameters (a list, a generator, one
            tensor), which are then named by their position.
        parameters: Only these (an optimizer's); default all that require a gradient.
        groups: Regular expression -> process group, for parameters that live on some ranks only (pipeline stages,
            experts as plain tensors): the elements of a parameter whose name matches are split over the group's ranks.

    Raises:
        ValueError: If nothing is left to measure, or an expression of `groups` is none.

    Example:
        >>> index = ParameterIndex(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        >>> index.names
        ('0.weight', '0.bias', '2.weight', '2.bias')
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Tensor] | Tensor,
        *,
        parameters: Iterable[Tensor] | None = None,
        groups: Mapping[str, Any] | None = None,
    ) -> None:
        wanted = None if parameters is None else list(parameters)
        if isinstance(model, nn.Module):
            reshard(model)
            named = dict(named_parameters(model))
            check_shards(model, named, wanted or ())
        else:
            named = _numbered([model] if isinstance(model, Tensor) else model)
        if wanted is None:
            wanted = list(named)
        self.parameters: tuple[Tensor, ...] = tuple(_unique(p for p in wanted if p.requires_grad))
        if not self.parameters:
            raise ValueError(
                f"0 of {len(wanted)} parameters require a gradient: nothing to measure. Pass the model that trains, "
                "and pass parameters as a list (a generator that was used before is empty)."
            )
        # The order of the model, not of the optimizer: layers appear as they are computed.
        order = {parameter: position for position, parameter in enumerate(named)}
        self.parameters = tuple(sorted(self.parameters, key=lambda p: order.get(p, len(order))))
        self.names: tuple[str, ...] = tuple(
            named.get(parameter, f"optimizer.parameter_{number}") for number, parameter in enumerate(self.parameters)
        )
        self._groups, self._group_patterns = _groups_of(self.names, groups or {})
        self.group_sizes = {position: len(ranks) for position, ranks in self._groups.items()}
        self._fsdp1_shards = fsdp1_shard_sizes(model) if isinstance(model, nn.Module) else {}
        self._agreement: Agreement | None = None
        self._dtensor = dtensor_class()
        self.dtensor_positions = frozenset(
            position for position, p in enumerate(self.parameters) if self._is_dtensor(p)
        )

    def __len__(self) -> int:
        return len(self.parameters)

    @property
    def whole_positions(self) -> list[int]:
        """Positions of the parameters of which every rank holds the whole."""
        sharded = self.dtensor_positions | self.group_sizes.keys()
        return [
            position
            for position, parameter in enumerate(self.parameters)
            if position not in sharded and self._fsdp1_shards.get(parameter, 1) == 1
        ]

    @property
    def device(self) -> torch.device:
        """Where most of the elements are, and so where statistics are computed."""
        sizes: dict[torch.device, int] = {}
        for parameter in self.parameters:
            sizes[parameter.device] = sizes.get(parameter.device, 0) + parameter.numel()
        return max(sizes, key=lambda device: sizes[device])

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole of every gradient (one process, plain DDP): norms need no reduction.

        The same on all ranks once `all_names` was called: a rank without experts has the collectives of those with.
        """
        if self._agreement is not None:
            return self._agreement.is_replicated
        return not self.dtensor_positions and not self._fsdp1_shards and not self.group_sizes

    @property
    def overall_names(self) -> tuple[str, ...]:
        """Names of the parameters of all ranks once `all_names` was called, the own ones before."""
        return self.names if self._agreement is None else self._agreement.names

    def gradients(self) -> list[Tensor | None]:
        """The gradient of every parameter as the model has it now (a DTensor where it is one)."""
        return [parameter.grad for parameter in self.parameters]

    def local(self, gradient: Tensor) -> Tensor:
        """The elements of a gradient that are on this rank.

        Args:
            gradient: One of `gradients()`.

        Returns:
            A plain tensor, possibly without elements; shares memory with the gradient.
        """
        if not self._is_dtensor(gradient):
            return gradient
        sharded: Any = gradient
        local: Tensor = sharded.to_local()
        return local.wait() if hasattr(local, "wait") else local

    def placements(self, position: int, gradient: Tensor | None) -> tuple[Any, ...]:
        """How a gradient lies over its mesh.

        Args:
            position: Of the parameter.
            gradient: Its gradient; `None` asks for the parameter's own placements.

        Returns:
            DTensor placements, one a mesh axis; empty for a plain tensor.
        """
        tensor: Any = self.parameters[position] if gradient is None else gradient
        return tensor.placements if self._is_dtensor(tensor) else ()

    def weight(self, position: int, placements: tuple[Any, ...]) -> float:
        """Ownership weight of what this rank holds of a parameter.

        Args:
            position: Of the parameter.
            placements: How its gradient lies over the mesh.

        Returns:
            1 / (number of ranks that hold the same elements).
        """
        parameter = self.parameters[position]
        pieces = self._fsdp1_shards.get(parameter, 1)
        if placements:
            sizes = parameter.device_mesh.shape  # type: ignore[attr-defined]
            for placement, size in zip(placements, sizes, strict=True):
                # Not `is_shard()`: FSDP2 over TP shards with a class of its own that does not answer to it.
                pieces *= 1 if placement.is_replicate() or placement.is_partial() else size
        copies = world_size() / self.group_sizes.get(position, 1)
        if self._agreement is not None:
            copies = self._agreement.copies.get(self.names[position], copies)
        return min(1.0, pieces / copies)

    def mesh_ranks(self, position: int, axis: int) -> list[int]:
        """The ranks of this rank's slice of one mesh axis.

        Args:
            position: Of the parameter.
            axis: Of its mesh.

        Returns:
            Global ranks.
        """
        mesh = self.parameters[position].device_mesh  # type: ignore[attr-defined]
        return torch.distributed.get_process_group_ranks(mesh.get_group(axis))

    def is_held(self, position: int) -> bool:
        """Whether this rank takes part in a parameter: not if it is outside of the mesh of a DTensor.

        Args:
            position: Of the parameter.
        """
        parameter: Any = self.parameters[position]
        return not self._is_dtensor(parameter) or parameter.device_mesh.get_coordinate() is not None

    def owns_elements(self, position: int) -> bool:
        """Whether this rank holds any element of a parameter (so that a missing gradient means something).

        Args:
            position: Of the parameter.
        """
        parameter = self.parameters[position]
        return self.local(parameter.detach()).numel() > 0

    def all_names(self, reducer: Reducer) -> tuple[str, ...]:
        """Names of the parameters of all ranks, in one order.

        Args:
            reducer: Reaches the other ranks; every rank calls this at the same place.

        Returns:
            The own names if all ranks have the same, else the union, which `groups` must have announced.

        Raises:
            ValueError: If ranks hold different parameters and `groups` does not name them; on every rank alike.
        """
        own = [
            Entry(
                name,
                self._layout(position),
                self.group_sizes.get(position, 0),
                self.is_held(position),
                self._groups.get(position, ()),
            )
            for position, name in enumerate(self.names)
        ]
        # Anew at every call: only what this rank sees may enter.
        self._agreement = None
        self._agreement = agree(own, reducer=reducer, is_replicated=self.is_replicated, patterns=self._group_patterns)
        return self._agreement.names

    def _layout(self, position: int) -> tuple[Any, ...]:
        """What must be equal on all ranks: the global shape and the placements."""
        parameter = self.parameters[position]
        if parameter in self._fsdp1_shards or position in self.group_sizes:
            return ((), "")  # a rank's own piece
        return (tuple(parameter.shape), str(self.placements(position, None)))

    def _is_dtensor(self, tensor: Tensor) -> bool:
        return self._dtensor is not None and isinstance(tensor, self._dtensor)


def _unique(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for parameter in parameters:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter


def named_parameters(model: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Parameters with their clean names; a tied one under the name it has first.

    Args:
        model: Wrapped or not.

    Yields:
        Parameter and name, in the model's order.
    """
    # DDP and DataParallel keep the model in an attribute `module`, a name that a model of its own may use as well.
    wrappers = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
    prefixes = [f"{path}." if path else "" for path, module in model.named_modules() if isinstance(module, wrappers)]
    for name, parameter in model.named_parameters():
        for prefix in sorted(prefixes, key=len, reverse=True):
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        yield parameter, clean_name(name)


def _numbered(parameters: Iterable[Tensor]) -> dict[Tensor, str]:
    """Parameters as they were given (a module would wrap plain tensors anew), named by their position."""
    named: dict[Tensor, str] = {}
    for number, parameter in enumerate(parameters):
        if not isinstance(parameter, Tensor):
            raise ValueError(
                f"parameters: element {number} is a {type(parameter).__name__}, no tensor; pass the model, or "
                "model.parameters()"
            )
        named.setdefault(parameter, str(number))
    return named


def _groups_of(
    names: Sequence[str], groups: Mapping[str, Any]
) -> tuple[dict[int, tuple[int, ...]], dict[str, str | None]]:
    """Ranks of the group of every parameter that has one, and what each expression found (see `agree`)."""
    ranks: dict[int, tuple[int, ...]] = {}
    patterns: dict[str, str | None] = {}
    for pattern, group in groups.items():
        try:
            found = [position for position, name in enumerate(names) if re.search(pattern, name)]
        except re.error as error:
            raise ValueError(f"groups: {pattern!r} is no regular expression ({error})") from None
        patterns[pattern] = names[found[0]] if found else None
        if not found:
            continue
        if torch.distributed.get_world_size(group) < 1:
            # Said by `all_names`, on all ranks together: here it would leave the others waiting.
            patterns[pattern] = f"({names[found[0]]})"
            continue
        members = torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD)
        ranks.update(dict.fromkeys(found, tuple(members)))
    return ranks, patterns
