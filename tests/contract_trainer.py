"""transformers' Trainer as a host of the contract: the same batches, the same model, the same loss."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from stabilizer.callbacks import StabilizerCallback, StabilizerTrainerCallback
from tests.accelerate_loops import make_optimizer, reset
from tests.contract_base import EPOCH, Host, OutOfDataError, Wrapped, observed_in, weights_of
from tests.lightning_models import expected_batches
from tests.models import loss_of

__all__ = ["OwnTrainer", "TrainerHost"]


class OwnTrainer(Trainer):
    """A trainer with batches and a loss of its own.

    Attributes:
        batches: Of an epoch, on this rank; a list is what a trainer takes for a loader.
        before_loss: Takes the trainer and a batch, before each loss.
    """

    batches: list[dict[str, Tensor]]
    before_loss: Callable[[Any, Any], None]

    def get_train_dataloader(self) -> Any:
        return self.batches

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        batch = (inputs["x"], inputs["y"])
        self.before_loss(self, batch)
        return loss_of(model, batch)


class TrainerHost(Host):
    """transformers' Trainer."""

    _callback: StabilizerTrainerCallback | None = None

    def train(
        self,
        callbacks: Sequence[StabilizerCallback],
        *,
        num_steps: int = 3,
        save: Path | None = None,
        load: Path | None = None,
        breaks_at: int | None = None,
    ) -> dict[str, Tensor]:
        self.rows = rows = []
        observes = any(callback.observations is not None for callback in callbacks)
        self._callback = None
        if callbacks:
            # A trainer counts a step when it is done.
            self._callback = StabilizerTrainerCallback(
                list(callbacks), log=lambda values, step: rows.append((values, step - 1))
            )

        def before_loss(trainer: Any, batch: Any) -> None:
            if trainer.state.global_step == breaks_at:
                raise OutOfDataError
            if observes and self._callback is not None:
                self._callback.observe(**observed_in(batch))

        with tempfile.TemporaryDirectory() as folder:
            trainer = self._make(Path(folder) if save is None else save, num_steps=num_steps, is_saved=save is not None)
            trainer.before_loss = before_loss
            trainer.train(resume_from_checkpoint=None if load is None else str(next(load.glob("checkpoint-*"))))
        return weights_of(trainer.accelerator.unwrap_model(trainer.model))

    def end_again(self, callbacks: Sequence[StabilizerCallback]) -> None:
        assert self._callback is not None
        self._callback.close()
        self._callback.on_train_end(None, None, None)
        self._callback.close(after_exception=True)

    def _make(self, folder: Path, *, num_steps: int, is_saved: bool) -> OwnTrainer:
        reset()
        model = Wrapped()
        optimizer = make_optimizer(model, name="adamw")
        trainer = OwnTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(folder),
                use_cpu=True,
                ddp_backend="gloo" if self.num_ranks > 1 else None,
                max_steps=num_steps,
                gradient_accumulation_steps=self.num_micro_batches,
                max_grad_norm=0.0,
                report_to=[],
                disable_tqdm=True,
                save_strategy="steps" if is_saved else "no",
                save_steps=num_steps,
                logging_strategy="no",
            ),
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
            callbacks=[] if self._callback is None else [self._callback],
        )
        trainer.loss_is_scaled_for_ga = False
        size = {"num_ranks": self.num_ranks, "num_micro_batches": self.num_micro_batches}
        steps = [expected_batches("transformer", step, **size)[self.rank :: self.num_ranks] for step in range(EPOCH)]
        trainer.batches = [{"x": x, "y": y} for step in steps for x, y in step]
        return trainer
