"""What part of a step's loss a trainer propagates with each micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.batches import IGNORED_LABEL
from stabilizer.reduction import world_size
from stabilizer.tally import LossTally, Weight

__all__ = ["Shares"]


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """Of one micro-batch.

    Attributes:
        num_items: Tokens of the whole step, over ranks where the trainer says so; `None` if its losses are not divided
            by them.
        own: Tokens of this micro-batch among them, shape ().
        num_ranks: What the trainer multiplies a loss by, that ranks be added up and not averaged.
        num_tokens: Tokens of a batch without labels: of completions.
        is_counted: Whether the trainer has counted the tokens of the step at all.
    """

    num_items: Tensor | int | None = None
    own: Tensor | None = None
    num_ranks: int = 1
    num_tokens: Tensor | None = None
    is_counted: bool = False

    @classmethod
    def of(cls, trainer: Any, inputs: Any, num_items: Any, *, compute: Callable[..., Any]) -> Shares:
        """Look at a batch before the loss is computed, which may take the labels out of it.

        Args:
            trainer: The trainer.
            inputs: Its batch.
            num_items: What the trainer has counted in the batches of the step.
            compute: Its `compute_loss`.
        """
        is_counted = num_items is not None
        # Nobody knows what a loss of the user's own makes of that number.
        is_theirs = str(getattr(compute, "__module__", "")).partition(".")[0] in ("transformers", "trl")
        if not is_theirs or trainer.compute_loss_func is not None:
            num_items = None
        if not isinstance(inputs, Mapping):
            return cls(is_counted=is_counted)
        mask = inputs.get("completion_mask")
        num_tokens = mask.sum() if isinstance(mask, Tensor) else None
        labels = inputs.get("labels")
        if isinstance(inputs.get("shift_labels"), Tensor):
            labels = inputs["shift_labels"]
        elif isinstance(labels, Tensor) and getattr(trainer, "_loss_shifts_labels", True) and labels.dim() > 1:
            labels = labels[..., 1:]
        own = (labels != IGNORED_LABEL).sum() if isinstance(labels, Tensor) else None
        num_ranks = 1
        if trainer.args.average_tokens_across_devices and world_size() > 1:
            copies = trainer.get_tp_size() if hasattr(trainer, "get_tp_size") else 1
            num_ranks = trainer.accelerator.num_processes // copies
        return cls(num_items, own, num_ranks, num_tokens, is_counted)

    def is_scaled(self, trainer: Any) -> bool:
        """Whether the trainer takes a loss for a part of the step's as it is, and does not divide it.

        Args:
            trainer: The trainer.
        """
        told = getattr(trainer, "loss_is_scaled_for_ga", None)
        if told is not None:
            return bool(told)
        return bool((trainer.model_accepts_loss_kwargs and self.is_counted) or trainer.compute_loss_func is not None)

    def add(self, loss: Tensor, tally: LossTally, *, num_parts: int) -> None:
        """Add the mean of the micro-batch to a tally.

        Args:
            loss: As it was propagated, a part of the step's.
            tally: Takes it.
            num_parts: Micro-batches of the step.
        """
        if self.num_items is None or self.own is None or not tally.weights:
            # All parts count alike, and their mean is the loss that is minimised.
            weights: dict[Weight, Tensor | float] = {"auto": 1.0}
            if self.num_tokens is not None:
                weights["tokens"] = self.num_tokens
            tally.add(loss, scale=1.0 / num_parts, weights=weights, starts=True)
            return
        # A sum over this micro-batch's tokens, divided by the number of those in the whole step. A micro-batch without
        # any has no mean, and no weight.
        share = self.num_ranks * self.own / self.num_items
        scale = torch.where(self.own > 0, share, torch.ones_like(share))
        own: dict[Weight, Tensor | float] = {"auto": self.own, "tokens": self.own}
        tally.add(loss, scale=scale, weights=own, propagated=loss, starts=True)
