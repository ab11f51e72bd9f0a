"""One packed buffer, one collective, on a process group of our own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stabilizer.timed import all_reduce

__all__ = ["Agreement", "Entry", "Reducer", "accumulation_dtype", "agree", "collective_device", "rank", "world_size"]

# (default group, our group): the default group is the key, since it is replaced when a program initializes it anew.
_own_group: tuple[Any, Any] | None = None
_own_subgroups: dict[tuple[int, ...], Any] = {}


def world_size() -> int:
    """Number of processes that train together, 1 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, 0 without `torch.distributed`."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The type in which a few square sums are added up: float64 where the device has it.

    Args:
        device: Where the sums are.

    Returns:
        float64 (squares of float32 norms can neither overflow nor underflow in it), else float32.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def collective_device(group: Any, preferred: torch.device) -> torch.device:
    """Where a tensor must be for a collective of this group.

    With gradients offloaded to the CPU and a group that only has NCCL, a reduction of a CPU tensor ends every rank.

    Args:
        group: The process group.
        preferred: Where the tensor is.

    Returns:
        `preferred` if the group has a backend for it, else the current device of a type that it has one for.
    """
    types = [device.type for device in group._device_types]
    if preferred.type in types or not types:
        return preferred
    if types[0] == "cpu":
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


class Reducer:
    """Sums over all ranks: one collective a call, the same shape on every rank.

    Making one is a collective too (the process group), so all ranks make theirs at the same place.

    Args:
        device: Where the vectors to reduce are.

    Example:
        >>> Reducer(torch.device("cpu")).sum(torch.tensor([3.0]))  # one process: nothing to do
        tensor([3.])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.world_size = world_size()
        self._group = _group_of_our_own() if self.world_size > 1 else None
        self._collective_device = device if self._group is None else collective_device(self._group, device)

    def sum(self, vector: Tensor) -> Tensor:
        """Sum of a vector over all ranks.

        Args:
            vector: Shape (n,), not changed.

        Returns:
            The sum, shape (n,), the same on every rank.
        """
        if self._group is None:
            return vector
        buffer = vector.to(self._collective_device, copy=True)
        all_reduce(buffer, group=self._group)
        return buffer.to(self.device)

    def sum_(self, vector: Tensor) -> Tensor:
        """Sum of a vector over all ranks, in place where the group can reach it: without further memory.

        Args:
            vector: Shape (n,).

        Returns:
            The vector.
        """
        if self._group is None:
            return vector
        if vector.device == self._collective_device:
            all_reduce(vector, group=self._group)
            return vector
        return vector.copy_(self.sum(vector))

    def maximum(self, vector: Tensor) -> Tensor:
        """Largest value of every element over all ranks.

        Args:
            vector: Shape (n,), not changed; NaN must have been replaced (backends disagree on its maximum).

        Returns:
            The maximum, shape (n,), the same on every rank.
        """
        if self._group is None:
            return vector
        buffer = vector.to(self._collective_device, copy=True)
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=self._group)
        return buffer.to(self.device)

    def gather(self, vector: Tensor) -> Tensor:
        """The vectors of all ranks, for steps that need sums, maxima and a comparison at once.

        Args:
            vector: Shape (n,).

        Returns:
            Shape (ranks, n), the same on every rank.
        """
        if self._group is None:
            return vector.unsqueeze(0)
        source = vector.to(self._collective_device)
        gathered = source.new_empty(self.world_size * source.numel())
        # Newer versions of torch warn of the older name.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(gathered, source.contiguous(), group=self._group)
        return gathered.view(self.world_size, -1).to(self.device)

    def objects(self, value: Any) -> list[Any]:
        """Plain Python values of all ranks; slow, for set-up only.

        Args:
            value: Anything that pickles.

        Returns:
            One value a rank, in rank order.
        """
        values: list[Any] = [value] * self.world_size
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values


class Entry(NamedTuple):
    """What a rank tells the others of one of its parameters; `group` are the ranks that split its elements, if any."""

    name: str
    layout: tuple[Any, ...]
    group_size: int
    is_held: bool
    group: tuple[int, ...]


class Agreement(NamedTuple):
    """What all ranks know alike.

    Attributes:
        names: Of the parameters of all ranks, in one order.
        is_replicated: Whether every rank holds the whole of every gradient.
        copies: How many ranks (of a parameter with a group: how many groups) hold each parameter; none where the usual
            number holds, which is that of all.
    """

    names: tuple[str, ...]
    is_replicated: bool
    copies: Mapping[str, int]


def agree(
    own: Sequence[Entry], *, reducer: Reducer, is_replicated: bool, patterns: Mapping[str, str | None]
) -> Agreement:
    """Compare the parameters of all ranks: one small collective where they are the same everywhere.

    Args:
        own: This rank's parameters.
        reducer: Reaches the other ranks; every rank calls this at the same place.
        is_replicated: Whether this rank holds the whole of all its gradients and knows of no other rank's piece.
        patterns: Expressions of `groups`, each with the parameter that this rank found by it: `None` if there is none,
            in parentheses if the rank is no member of the group.

    Raises:
        ValueError: If ranks hold different parameters that no group announces, or a group cannot be; everywhere alike.
    """
    names = tuple(entry.name for entry in own)
    if reducer.world_size == 1:
        _check_patterns([patterns], names)
        return Agreement(names, is_replicated, {})
    # Not the group itself: replicas of a group of experts have groups of their own, of the same size.
    text = repr(([entry[:4] for entry in own], list(patterns.items())))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    numbers = [float(digest), -float(digest), float(not is_replicated)]
    highest, negative_lowest, any_sharded = reducer.maximum(
        torch.tensor(numbers, dtype=torch.float64, device=reducer.device)
    ).tolist()
    if highest == -negative_lowest:
        _check_patterns([patterns], names)
        return Agreement(names, not any_sharded, {})
    all_ranks = reducer.objects((list(own), dict(patterns)))
    rows: list[list[Entry]] = [row for row, _ in all_ranks]
    _check_patterns([found for _, found in all_ranks], [entry.name for row in rows for entry in row])
    return Agreement(_union(rows), not any_sharded, _copies(rows))


def sum_over_(vector: Tensor, ranks: Sequence[int]) -> Tensor:
    """Sum a vector over some ranks, in place.

    Args:
        vector: Shape (n,).
        ranks: The ranks of one mesh axis; all of them call this.

    Returns:
        The vector.
    """
    key = tuple(ranks)
    if key not in _own_subgroups:
        # Only the members take part: ranks of another slice of the mesh make theirs.
        _own_subgroups[key] = dist.new_group(list(key), use_local_synchronization=True)
    group = _own_subgroups[key]
    buffer = vector.to(collective_device(group, vector.device))
    dist.all_reduce(buffer, group=group)
    return vector.copy_(buffer)


def _group_of_our_own() -> Any:
    """A group apart from the training's: its collectives can neither be taken for, nor wait behind, ours."""
    global _own_group
    world = dist.group.WORLD
    if _own_group is None or _own_group[0] is not world:
        _own_group = (world, dist.new_group())
        _own_subgroups.clear()
    return _own_group[1]


def _check_patterns(ranks: Sequence[Mapping[str, str | None]], names: Sequence[str]) -> None:
    for pattern in dict.fromkeys(pattern for patterns in ranks for pattern in patterns):
        found = [patterns.get(pattern) for patterns in ranks]
        for number, name in enumerate(found):
            if name is not None and name.startswith("("):
                raise ValueError(
                    f"groups: {pattern!r}: rank {number} holds {name[1:-1]!r} but is no member of the group that it "
                    "was given (the group has no size here). Give every rank the group that it belongs to."
                )
        if not any(found):
            raise ValueError(
                f"groups: {pattern!r} is found in no parameter's name on any rank; names here: {list(names[:5])}"
            )


def _union(rows: Sequence[Sequence[Entry]]) -> tuple[str, ...]:
    names: dict[str, tuple[Any, int]] = {}
    holders: dict[str, int] = {}
    for row in rows:
        for entry in row:
            layout = (entry.layout, entry.group_size)
            if names.setdefault(entry.name, layout) != layout:
                _refuse(entry.name, rows)
            holders[entry.name] = holders.get(entry.name, 0) + 1
    for name, (_, group_size) in names.items():
        if not group_size and holders[name] < len(rows):
            _refuse(name, rows)
    return tuple(names)


def _copies(rows: Sequence[Sequence[Entry]]) -> dict[str, int]:
    """Members of one group hold different elements, ranks without a group the same ones (or a DTensor says which)."""
    holders: dict[str, set[Any]] = {}
    for number, row in enumerate(rows):
        for entry in row:
            if entry.is_held:
                holders.setdefault(entry.name, set()).add(entry.group or number)
    return {name: len(found) for name, found in holders.items()}


def _refuse(name: str, rows: Sequence[Sequence[Entry]]) -> None:
    holders = [number for number, row in enumerate(rows) if any(entry.name == name for entry in row)]
    raise ValueError(
        f"parameter {name!r} is not the same on all {len(rows)} ranks (held by ranks {holders[:8]}; its shape, "
        "placement or group may differ). Parameters that live on some ranks only (pipeline stages, experts) need "
        "groups={pattern: process_group}, the group over which their elements are split."
    )
