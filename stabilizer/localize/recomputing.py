"""Which part of a forward pass is being computed again, under reentrant activation checkpointing.

It runs a part without a graph, and once more inside of its backward, where the parts come in the reverse order. Only
the context of its autograd function, one and the same object in both, says which part it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Region", "function_calls", "is_backward"]

T = TypeVar("T")


def is_backward() -> bool:
    """Whether this thread is inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


class Region(Generic[T]):
    """What happens inside one call of an autograd function that computes its forward again in its backward.

    Attributes:
        parts: In the order of the forward pass.
    """

    def __init__(self) -> None:
        self.parts: list[T] = []
        self._task, self._next = -1, 0

    def next(self) -> T | None:
        """The part that is computed again, in order; each backward pass begins anew."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._next = task, 0
        self._next += 1
        return self.parts[self._next - 1] if self._next <= len(self.parts) else None


def function_calls() -> Iterator[tuple[str, Any]]:
    """Forward and backward calls of autograd functions that we are inside of.

    Yields:
        "forward" or "backward", and the function's context; the innermost call first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_code.co_varnames
        if frame.f_code.co_name in ("forward", "backward") and names:
            context = frame.f_locals.get(names[0])
            if isinstance(context, torch._C._FunctionBase):
                yield frame.f_code.co_name, context
        frame = frame.f_back
