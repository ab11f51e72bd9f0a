"""What the field reports on transformers' Trainer share: a run with our callbacks, and what its optimizer was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from stabilizer.callbacks import StabilizerCallback, StabilizerTrainerCallback
from tests import reference
from tests.field_reports.helpers import our_warnings
from tests.sharding import full
from tests.trainer_runs import make_trainer

__all__ = ["Level", "Run", "Seen", "levels"]


class Seen(TrainerCallback):
    """Notes what the optimizer is given, on every rank; stands behind ours.

    Attributes:
        gradients: By step, name -> whole gradient.
        versions: By step, how often each gradient was written to.
    """

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.versions: list[dict[str, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer exists now."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]

        def note(*_: Any) -> None:
            named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            self.versions.append({name: gradient._version for name, gradient in named.items()})
            self.gradients.append({name: full(gradient).detach().clone() for name, gradient in named.items()})

        getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(note)

    def totals(self) -> list[float]:
        """The norm of everything, by step."""
        return [reference.total_norm({name: g.double() for name, g in step.items()}) for step in self.gradients]


class Run:
    """A run of a trainer with our callbacks.

    Args:
        folder: Of its output.
        *callbacks: Ours.
        strategy: Of `make_trainer`.
        resume: What to resume from.
        before: Takes the trainer before it trains.
        **options: Of `make_trainer`.

    Attributes:
        trainer: It has trained.
        values: (tag, step of the trainer) -> what was logged.
        seen: What the optimizer was given.
        messages: Our warnings.
    """

    def __init__(
        self,
        folder: Path | str,
        *callbacks: StabilizerCallback,
        strategy: str = "single",
        resume: Any = None,
        before: Callable[[Trainer], None] | None = None,
        **options: Any,
    ) -> None:
        self.values: dict[tuple[str, int], float] = {}
        self.seen = Seen()
        ours = StabilizerTrainerCallback(callbacks, log=self._log)
        self.trainer = make_trainer(strategy, folder, callbacks=[ours, self.seen], **options)
        if before is not None:
            before(self.trainer)
        with our_warnings() as self.messages:
            self.trainer.train(resume_from_checkpoint=resume)

    def _log(self, values: dict[str, float], step: int) -> None:
        self.values.update({(tag, step): value for tag, value in values.items()})

    def series(self, tag: str) -> dict[int, float]:
        """Step -> value."""
        return {step: value for (name, step), value in self.values.items() if name == tag}

    def shown(self, name: str) -> list[float]:
        """What the trainer itself has logged."""
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]

    def weights(self) -> list[Tensor]:
        """All of them, whole."""
        return [full(parameter).detach().clone() for parameter in self.trainer.model.parameters()]


class Level(nn.Module):
    """Its loss is what the sample says, as long as its weight is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, level: Tensor) -> dict[str, Tensor]:
        """The mean of the samples."""
        return {"loss": self.weight * level.mean()}


def levels(values: Sequence[float]) -> dict[str, Any]:
    """Options of a run whose losses these are: one sample a micro-batch.

    Args:
        values: In the order of ranks within micro-batches within steps.
    """
    rows: Any = [{"level": torch.tensor(value)} for value in values]
    return {"model": Level(), "dataset": rows, "per_device_train_batch_size": 1, "learning_rate": 0.0}
