"""One rank's losses, collected on the device with each backward pass, and what each of them weighs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from stabilizer.batches import count
from stabilizer.errors import warn
from stabilizer.reduction import world_size

__all__ = ["LossTally", "MicroBatchLoss", "Weight", "find_loss"]

Weight: TypeAlias = Literal["auto", "tokens", "samples"]


class MicroBatchLoss(NamedTuple):
    """A loss, shape (), and its weight of every kind that is asked for: numbers, or tensors of shape ()."""

    loss: Tensor
    weights: tuple[Tensor | float, ...]


def find_loss(output: Any) -> Tensor:
    """The loss in what a training step or a model returns.

    Args:
        output: A number, a tensor of one element, or a mapping with the key "loss" (so also an output of transformers).

    Returns:
        The loss, shape (), detached.

    Raises:
        ValueError: If it is neither.

    Example:
        >>> find_loss({"loss": torch.tensor([2.5]), "logits": torch.zeros(3)})
        tensor(2.5000)
    """
    found = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(found, int | float):
        return torch.tensor(float(found))
    if not isinstance(found, Tensor) or found.numel() != 1:
        described = f"a mapping with {sorted(map(str, output))}" if isinstance(output, Mapping) else _describe(found)
        raise ValueError(f'loss: {described}: expected a tensor of one element, or a mapping with one under "loss"')
    # A copy: what was handed to us may be scaled in place a moment later.
    return found.detach().reshape(()).clone()


class LossTally:
    """One rank's losses since the last optimizer step.

    A host tells when a micro-batch begins and what losses are propagated. Several losses of one micro-batch are parts
    of one loss and are added; without word of micro-batches each loss is one.

    Args:
        weights: The kinds of weight that anybody will read.

    Example:
        >>> tally = LossTally(["samples"])
        >>> tally.begin({"inputs": torch.zeros(8, 3)})
        >>> tally.add(torch.tensor(2.0))
        >>> tally.add(torch.tensor(0.5))  # an auxiliary loss with a backward pass of its own
        >>> [(float(piece.loss), piece.weights) for piece in tally.take()]
        [(2.5, (8,))]
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)
        self._pieces: list[MicroBatchLoss] = []
        self._taken: list[MicroBatchLoss] = []
        self._batch: Any = None
        self._has_batch = self._is_begun = self._is_told = False
        self._odd: str | None = None  # why a weight is not known
        self._has_warned = False

    def begin(self, batch: Any) -> None:
        """Start a micro-batch.

        Args:
            batch: What the model gets, to count its tokens or samples; kept until the loss comes.
        """
        self._batch, self._has_batch, self._is_begun = batch, True, True

    def add(self, loss: Tensor, *, scale: Tensor | float | None = None) -> None:
        """Take a loss that a host has seen being propagated.

        Args:
            loss: Of one element; the mean over the micro-batch.
            scale: What it has been multiplied by, a number or shape ().
        """
        if not self.weights or self._is_told:
            return
        value = loss.detach().to(torch.float32).mean() if loss.numel() != 1 else find_loss(loss)
        if scale is not None:
            value = value.to(torch.float32) / (scale.to(value.device) if isinstance(scale, Tensor) else scale)
        if self._pieces and self._has_batch and not self._is_begun:
            last = self._pieces[-1]
            self._pieces[-1] = last._replace(loss=last.loss + value)
            return
        self._append(value, None)

    def tell(self, loss: Any, *, weight: Tensor | float | None = None) -> None:
        """Take a loss from the user; from now on losses that a host sees are left alone.

        Args:
            loss: See `find_loss`.
            weight: Tokens or samples in the mean; default: counted where the batch is known.
        """
        if not self.weights:
            return
        if not self._is_told:
            self._is_told, self._pieces, self._odd = True, [], None
        self._append(find_loss(loss), weight)

    def take(self) -> list[MicroBatchLoss]:
        """The losses of the step at hand. A second optimizer after the same backward passes gets the same ones."""
        if self._pieces:
            self._taken, self._pieces = self._pieces, []
        # Of a single micro-batch the weight is of no consequence.
        if self._odd is not None and not self._has_warned and (len(self._taken) > 1 or world_size() > 1):
            self._has_warned = True
            warn(
                f"{self._odd}; all micro-batches count alike in the mean loss. record_loss(weight=) gives their weights"
            )
        return self._taken

    def _append(self, value: Tensor, weight: Tensor | float | None) -> None:
        if weight is not None:
            weights: tuple[Tensor | float, ...] = (weight,) * len(self.weights)
        else:
            weights = tuple(self._count(kind) for kind in self.weights)
        self._pieces.append(MicroBatchLoss(value, weights))
        self._batch, self._is_begun = None, False
        self._last_weights = weights

    def _count(self, kind: Weight) -> Tensor | float:
        if not self._has_batch:
            self._odd = f"weight={kind!r}: the batch is not known here"
            return 1.0
        if not self._is_begun:
            return self._last_weights[self.weights.index(kind)]
        try:
            return count(self._batch, kind)
        except Exception as error:
            self._odd = str(error)
            return 1.0


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
