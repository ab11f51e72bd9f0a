"""Where the collectives of this package can be timed."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

__all__ = ["CollectiveWatch", "all_reduce", "watches"]


class CollectiveWatch(Protocol):
    """Stands around every sum over ranks of this package."""

    def begin(self, tensor: Tensor) -> None:
        """One begins.

        Args:
            tensor: That is summed.
        """

    def end(self, tensor: Tensor) -> None:
        """It is over, or on its way on a device.

        Args:
            tensor: As of `begin`.
        """


#: Those at work; whoever adds one takes it away.
watches: list[CollectiveWatch] = []


def all_reduce(tensor: Tensor, *, group: Any) -> None:
    """Sum a tensor over the ranks of a group, in place.

    Args:
        tensor: Of this rank.
        group: The process group.
    """
    for watch in watches:
        watch.begin(tensor)
    dist.all_reduce(tensor, group=group)
    for watch in watches:
        watch.end(tensor)
