"""RunHost: what a callback may do with its host beside what the hooks of a step give it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from stabilizer.callbacks.replays import Replays

__all__ = ["HostKind", "RunHost", "join_all"]

HostKind: TypeAlias = Literal["lightning", "accelerate", "plain", "transformers"]


@dataclasses.dataclass(frozen=True, eq=False)
class RunHost:
    """A run as it begins, for a callback that stands before methods of its host; see `StabilizerCallback.join_run`.

    Attributes:
        kind: Of the host.
        engine: The Trainer (a weak proxy), the Accelerator, transformers' trainer; `None` in a plain loop.
        model: As it trains, wrapped.
        optimizers: Those of torch, not wrapped.
        replays: The micro-batches of the step at hand.
        undo: Takes functions that put back what a callback changes; called when the run ends, however it does.
    """

    kind: HostKind
    engine: Any
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    replays: Replays
    undo: list[Callable[[], None]]


def join_all(callbacks: Sequence[Any], host: RunHost) -> None:
    """Let callbacks join a run; on every rank.

    Args:
        callbacks: Ours.
        host: What they get.

    Raises:
        ValueError: If one of them cannot work there as it was told to.
    """
    for callback in callbacks:
        callback.host = host
        callback.join_run(host)
