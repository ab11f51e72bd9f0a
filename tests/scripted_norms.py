"""A loop whose gradient norms are written down: every layer is one number, and the loss is linear in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from stabilizer.callbacks import LayerHealthCallback, attach
from stabilizer.errors import StabilizerWarning
from stabilizer.health import Finding

__all__ = ["BLOCKS", "NUM_BLOCKS", "SHORT", "Scripted", "kinds", "names_of", "noise", "only", "play"]

#: Short windows, for short runs.
SHORT: dict[str, Any] = {"window": 20, "warmup_steps": 4, "every_n_steps": 10, "loss_window": 20, "strict": True}
NUM_BLOCKS = 8
BLOCKS = [f"layers.{block}" for block in range(NUM_BLOCKS)]


class Scripted(nn.Module):
    """Parameters of one element under given names.

    Args:
        names: Of modules, each with one parameter `weight`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.cells = []
        for name in names:
            *path, last = name.split(".")
            at: nn.Module = self
            for piece in path:
                if not hasattr(at, piece):
                    at.add_module(piece, nn.Module())
                at = getattr(at, piece)
            cell = nn.Linear(1, 1, bias=False)
            at.add_module(last, cell)
            self.cells.append(cell)

    def loss(self, norms: Sequence[float]) -> Tensor:
        """A loss whose gradient in each parameter is the given number."""
        return torch.stack([norm * cell.weight.sum() for norm, cell in zip(norms, self.cells, strict=True)]).sum()


def names_of(num_blocks: int, *, has_parts: bool = False) -> list[str]:
    """Names of an embedding, blocks and a head.

    Args:
        num_blocks: How many blocks.
        has_parts: Whether a block has an attention and an MLP part, else it is one module.
    """
    parts = (".attn", ".mlp") if has_parts else (".fc",)
    return ["embed", *(f"layers.{block}{part}" for block in range(num_blocks) for part in parts), "head"]


def noise(num_steps: int, names: Sequence[str]) -> npt.NDArray[np.float64]:
    """Norms around 1, with the scatter of a small healthy model.

    Args:
        num_steps: How many rows.
        names: One column each.
    """
    return np.asarray(np.exp(np.random.default_rng(0).normal(0, 0.2, (num_steps, len(names)))))


def kinds(callback: LayerHealthCallback) -> list[str]:
    """What was found, in order."""
    return [finding.kind for finding in callback.findings]


def only(callback: LayerHealthCallback, kind: str) -> Finding:
    """The one finding of a kind."""
    [found] = [finding for finding in callback.findings if finding.kind == kind]
    return found


def play(
    callback: LayerHealthCallback,
    norms: npt.ArrayLike,
    *,
    names: Sequence[str],
    losses: Sequence[float] | None = None,
    others: Sequence[Any] = (),
    state: Mapping[str, Any] | None = None,
    first: int = 0,
    each: Callable[[int, Any], None] | None = None,
) -> tuple[dict[tuple[str, int], float], list[str]]:
    """Train by a script.

    Args:
        callback: The callback.
        norms: By step and module.
        names: Of the modules.
        losses: By step; none is recorded without them.
        others: More callbacks.
        state: Of the handle, to go on from.
        first: Step to begin with.
        each: Called after every step with its number and the handle.

    Returns:
        (tag, step) -> value of what was logged, and what was warned of by us.
    """
    model = Scripted(names)
    points: dict[tuple[str, int], float] = {}

    def log(values: dict[str, float], step: int) -> None:
        points.update({(tag, step): value for tag, value in values.items()})

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(None, model=model, optimizer=optimizer, callbacks=[callback, *others], log=log) as handle:
            if state is not None:
                handle.load_state_dict(state)
            for step, row in list(enumerate(torch.as_tensor(norms).tolist()))[first:]:
                model.loss(row).backward()
                if losses is not None:
                    handle.record_loss(torch.tensor(losses[step]), weight=1)
                optimizer.step()
                optimizer.zero_grad()
                if each is not None:
                    each(step, handle)
    said = [str(one.message) for one in caught if isinstance(one.message, StabilizerWarning)]
    return points, said
