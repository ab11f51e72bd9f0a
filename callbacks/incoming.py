"""Numbers of steps on their way to the host, taken in order when they have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from stabilizer.late import HostCopy

__all__ = ["Arrived", "Incoming"]

Extra = TypeVar("Extra")


class Arrived(NamedTuple, Generic[Extra]):
    """Numbers of a step, and what the host has known of it all along."""

    step: int
    numbers: list[float]
    extra: Extra


class Incoming(Generic[Extra]):
    """A queue. Each rank has its own; on a CPU nothing waits in it.

    Example:
        >>> import torch
        >>> incoming = Incoming[str]()
        >>> incoming.push(7, torch.tensor([1.0, 2.0]), "batch 3")
        >>> [(one.step, one.numbers, one.extra) for one in incoming.arrived()]
        [(7, [1.0, 2.0], 'batch 3')]
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[int, HostCopy, Extra]] = deque()

    def push(self, step: int, numbers: Tensor, extra: Extra) -> None:
        """Send numbers on their way.

        Args:
            step: That they belong to.
            numbers: Shape (n,), on any device.
            extra: What the host knows.
        """
        self._rows.append((step, HostCopy(numbers), extra))

    def arrived(self, *, before: int | None = None, waits: bool = False) -> Iterator[Arrived[Extra]]:
        """Take what has come, oldest first.

        Args:
            before: Take all of earlier steps than this, waiting if they have not come, and nothing else.
            waits: Take all, waiting.
        """
        while self._rows:
            step, copy, extra = self._rows[0]
            is_due = waits or (copy.is_ready if before is None else step < before)
            if not is_due:
                return
            self._rows.popleft()
            yield Arrived(step, copy.read().tolist(), extra)

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()
