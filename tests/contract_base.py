"""What hosts of the contract have in common: the model, what a loop observes, and how a training is asked for."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stabilizer import tags
from stabilizer.callbacks import StabilizerCallback
from tests.loggers import Points, points_of
from tests.models import make_transformer

__all__ = ["EPOCH", "Host", "OutOfDataError", "Wrapped", "observed_in", "weights_of"]

#: Steps of an epoch: Lightning starts an epoch's data over when it resumes in the middle of one.
EPOCH = 3


def observed_in(batch: Any) -> dict[str, Any]:
    """What a loop tells of a micro-batch: log-probs that are a little apart, made of its tokens.

    Args:
        batch: Inputs and targets, each of shape (B, T).
    """
    tokens = batch[0]
    train = -(1.0 + tokens % 5) / 2
    return {
        "logp_train": train,
        "logp_rollout": train + 0.02 * (tokens % 3 - 1),
        "mask": tokens % 4 > 0,
        "entropy": 0.1 * (1.0 + tokens % 7),
        "kl_ref": 0.01 * (tokens % 6),
        "rewards": tokens[:, 0] % 2.0,
        "num_generations": len(tokens),
        "heldout_reward": 0.25,
        "completion_length": (tokens % 4 > 0).sum(-1),
    }


class OutOfDataError(Exception):
    """What a loop breaks off with when it is told to."""


class Host(abc.ABC):
    """A short training with AdamW.

    Args:
        rank: This rank.
        num_ranks: Number of ranks: the world size of the launcher's call.
        num_micro_batches: Micro-batches accumulated in a step.

    Attributes:
        rows: Values and step, as they were logged in the last training.
    """

    def __init__(self, *, rank: int = 0, num_ranks: int = 1, num_micro_batches: int = 1) -> None:
        self.rank, self.num_ranks, self.num_micro_batches = rank, num_ranks, num_micro_batches
        self.rows: list[tuple[dict[str, float], int]] = []

    @property
    def points(self) -> Points:
        """What was logged in the last training, but for what a clock says."""
        return {key: value for key, value in points_of(self.rows).items() if not key[0].endswith(tags.GRADLOC_SECONDS)}

    @abc.abstractmethod
    def train(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        num_steps: int = 3,
        save: Path | None = None,
        load: Path | None = None,
        breaks_at: int | None = None,
    ) -> dict[str, Tensor]:
        """Train a new model.

        Args:
            callbacks: Ours.
            num_steps: Optimizer steps in all, with those before a checkpoint.
            save: Where to leave a checkpoint at the end.
            load: A checkpoint to go on from, saved after a whole number of epochs.
            breaks_at: The batch at which OutOfDataError is raised.

        Returns:
            Weights.
        """

    @abc.abstractmethod
    def end_again(self, callbacks: Sequence[StabilizerCallback]) -> None:
        """End the last training once more, in every way."""


class Wrapped(nn.Module):
    """The transformer under the name that it has in the Lightning module, so that layers are called the same."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_transformer()

    def forward(self, tokens: Tensor) -> Tensor:
        """The transformer's result."""
        logits: Tensor = self.model(tokens)
        return logits


def weights_of(module: Any) -> dict[str, Tensor]:
    """A copy of the weights, by name.

    Args:
        module: With the transformer in it.
    """
    return {name: parameter.detach().clone() for name, parameter in module.model.named_parameters()}
