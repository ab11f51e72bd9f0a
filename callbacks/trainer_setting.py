"""What a trainer of transformers knows of a run, for `preflight`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from stabilizer.callbacks.accelerate_setting import accelerate_setting
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.preflight import Setting

__all__ = ["trainer_setting"]


def trainer_setting(trainer: Any, callbacks: Sequence[StabilizerCallback], *, clipping: str) -> Setting:
    """Put together what is known of a trainer's run. Loads no data and starts no collective.

    Args:
        trainer: About to train.
        callbacks: All of ours.
        clipping: What has become of the trainer's own clip.
    """
    found = accelerate_setting(
        trainer.accelerator,
        trainer.model_wrapped,
        [trainer.optimizer],
        callbacks,
        num_steps=trainer.state.max_steps or None,
        # Moved by the trainer once an optimizer step, whatever Accelerate does with those that it has prepared.
        schedulers=[] if trainer.lr_scheduler is None else [trainer.lr_scheduler],
    )
    return dataclasses.replace(found, host=type(trainer).__name__, clipping=clipping)
