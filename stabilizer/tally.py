"""One rank's losses, collected on the device with each backward pass, and what each of them weighs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from stabilizer.batches import count
from stabilizer.errors import warn
from stabilizer.reduction import world_size

__all__ = ["Follower", "LossTally", "MicroBatchLoss", "Weight", "as_number", "find_loss"]

Weight: TypeAlias = Literal["auto", "tokens", "samples"]


class MicroBatchLoss(NamedTuple):
    """A loss and its weight of every kind that is asked for: numbers, or tensors of shape ().

    Attributes:
        loss: Mean over the micro-batch.
        weights: Of every kind.
        propagated: What its gradient is the gradient of, up to a factor that all have in common, where that is not the
            mean: a sum, say.
    """

    loss: Tensor | float
    weights: tuple[Tensor | float, ...]
    propagated: Tensor | float | None = None


def find_loss(output: Any) -> Tensor | float:
    """The loss in what a training step or a model returns.

    Args:
        output: A number, a tensor of one element, or a mapping with the key "loss" (so also an output of transformers).

    Returns:
        A number, or the loss, shape (), detached.

    Raises:
        ValueError: If it is none of these.

    Example:
        >>> find_loss({"loss": torch.tensor([2.5]), "logits": torch.zeros(3)})
        tensor(2.5000)
    """
    found = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(found, int | float):
        return float(found)
    if not isinstance(found, Tensor) or found.numel() != 1:
        described = f"a mapping with {sorted(map(str, output))}" if isinstance(output, Mapping) else _describe(found)
        raise ValueError(f'loss: {described}: expected a tensor of one element, or a mapping with one under "loss"')
    found = found.detach()
    # A DTensor's (tensor parallelism) is the same on all ranks of its mesh, or there are parts to add up.
    whole: Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    # A copy: what was handed to us may be scaled in place a moment later.
    return whole.reshape(()).clone()


def as_number(value: Tensor | float, like: Tensor) -> Tensor:
    """A loss or a weight where it is wanted; a fill, since a copy from the host would wait for the device.

    Args:
        value: A number, or of one element.
        like: Of the wanted type and device.

    Returns:
        Shape ().

    Example:
        >>> as_number(2, torch.zeros(3))
        tensor(2.)
    """
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(like.device, like.dtype, non_blocking=True)
    return like.new_full((), float(value))


class Follower(Protocol):
    """Something else that is collected within a step: it is taken with the losses, and put back with them."""

    def take(self, optimizer_index: int) -> None:
        """See `LossTally.take`."""

    def put_back(self, optimizer_index: int) -> None:
        """See `LossTally.put_back`."""

    def discard(self) -> None:
        """See `LossTally.discard`."""


class LossTally:
    """One rank's losses since the last optimizer step.

    A host tells what batch the model gets and what losses are propagated. Several losses of one micro-batch are parts
    of one loss and are added.

    Args:
        weights: The kinds of weight that anybody will read.
        keeps_losses: Whether losses are wanted where no weight is.
        followers: What goes with the losses.

    Example:
        >>> tally = LossTally(["samples"])
        >>> tally.begin({"inputs": torch.zeros(8, 3)})
        >>> tally.add(torch.tensor(2.0))
        >>> tally.add(torch.tensor(0.5))  # an auxiliary loss with a backward pass of its own
        >>> [(float(piece.loss), piece.weights) for piece in tally.take(0)]
        [(2.5, (8,))]
    """

    def __init__(
        self, weights: Sequence[Weight], *, keeps_losses: bool = False, followers: Sequence[Follower] = ()
    ) -> None:
        self.weights = tuple(weights)
        self._followers = tuple(followers)
        self._is_on = keeps_losses or bool(weights)
        self._pieces: list[MicroBatchLoss] = []
        self._taken: list[MicroBatchLoss] = []
        self._takers: set[int] = set()
        self._is_stale = False
        self._batch: Any = None
        self._has_batch = self._is_begun = self._is_told = False
        self._last_weights: tuple[Tensor | float, ...] = ()
        self._odd: str | None = None  # why a weight is not known
        self._has_warned = False

    def begin(self, batch: Any) -> None:
        """Take note of what the model gets.

        Args:
            batch: To count its tokens or samples; kept until the loss comes.
        """
        if self._is_on:
            # A step may take its batch apart before the loss comes.
            own = copy.copy(batch) if isinstance(batch, Mapping | list) else batch
            self._batch, self._has_batch, self._is_begun = own, True, True

    def add(
        self,
        loss: Tensor,
        *,
        scale: Tensor | float | None = None,
        weights: Mapping[Weight, Tensor | float] | None = None,
        propagated: Tensor | None = None,
        starts: bool | None = None,
    ) -> None:
        """Take a loss that a host has seen being propagated.

        Args:
            loss: Of one element; the mean over the micro-batch.
            scale: What it has been multiplied by, a number or shape ().
            weights: Of kinds whose weight is known; the others are counted in the batch.
            propagated: See `MicroBatchLoss`.
            starts: Whether it is the first of its micro-batch; by default, if a batch has come since the last one, or
                never has.
        """
        if not self._is_on or self._is_told:
            return
        value = find_loss(loss if loss.numel() == 1 else loss.detach().to(torch.float32).mean())
        if scale is not None:
            value = torch.as_tensor(value).to(torch.float32)
            value = value / (scale.to(value.device) if isinstance(scale, Tensor) else scale)
        self._drop_stale()
        if starts is None:
            starts = self._is_begun or not self._has_batch
        if self._pieces and not starts:
            last = self._pieces[-1]
            self._pieces[-1] = last._replace(loss=last.loss + value)
            self._batch, self._is_begun = None, False
        else:
            self._append(value, weights, propagated=None if propagated is None else find_loss(propagated))

    def tell(self, loss: Any, *, weight: Tensor | float | None = None) -> None:
        """Take the loss of a micro-batch from the user; from now on losses that a host sees are left alone.

        Args:
            loss: See `find_loss`.
            weight: Tokens or samples in the mean; default: counted where the batch is known.
        """
        if not self._is_on:
            return
        if not self._is_told:
            self._is_told, self._odd = True, None
            self._drop()
        value = find_loss(loss)
        self._drop_stale()
        self._append(value, None if weight is None else dict.fromkeys(self.weights, weight))

    def take(self, optimizer_index: int) -> list[MicroBatchLoss]:
        """The losses of the step at hand.

        Args:
            optimizer_index: Whose step it is. A second optimizer after the same backward passes gets the same losses;
                one that comes again without new ones gets none.
        """
        for follower in self._followers:
            follower.take(optimizer_index)
        if self._pieces:
            self._taken, self._pieces, self._takers, self._is_stale = self._pieces, [], set(), False
        if optimizer_index in self._takers:
            return []
        self._takers.add(optimizer_index)
        # Of a single micro-batch the weight is of no consequence.
        if self._odd is not None and not self._has_warned and (len(self._taken) > 1 or world_size() > 1):
            self._has_warned = True
            warn(
                f"{self._odd}; all micro-batches count alike in the mean loss. record_loss(weight=) gives their weights"
            )
        return self._taken

    def put_back(self, optimizer_index: int) -> None:
        """Let an optimizer take its losses again: its step did not happen, and is to be measured once more.

        Args:
            optimizer_index: As of `take`.
        """
        self._takers.discard(optimizer_index)
        for follower in self._followers:
            follower.put_back(optimizer_index)

    def clear(self) -> None:
        """Gradients are cleared. Losses that no step has taken are thrown away with them when the next one comes.

        Not at once: many loops record a loss, clear the old gradients, and propagate it then.
        """
        self._is_stale = bool(self._pieces)

    def discard(self) -> None:
        """Forget losses that no step has taken."""
        self._drop()
        for follower in self._followers:
            follower.discard()

    def close(self) -> None:
        """Let go of the last batch: its loss may never have come (an evaluation, a run that broke off)."""
        self._batch, self._is_begun = None, False

    def _drop(self) -> None:
        self._pieces, self._is_stale = [], False

    def _drop_stale(self) -> None:
        if self._is_stale:
            self._drop()

    def _append(
        self,
        value: Tensor | float,
        known: Mapping[Weight, Tensor | float] | None,
        *,
        propagated: Tensor | float | None = None,
    ) -> None:
        known = {} if known is None else known
        weights = tuple(known[kind] if kind in known else self._count(kind) for kind in self.weights)
        self._pieces.append(MicroBatchLoss(value, weights, propagated))
        self._batch, self._is_begun = None, False
        self._last_weights = weights

    def _count(self, kind: Weight) -> Tensor | float:
        if not self._is_begun:
            if self._last_weights and self._has_batch:
                # One more loss of the batch before (each of several optimizers has its own).
                return self._last_weights[self.weights.index(kind)]
            self._odd = f"weight={kind!r}: the batch is not known here"
            return 1.0
        try:
            return count(self._batch, kind)
        except Exception as error:
            self._odd = str(error)
            return 1.0


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
