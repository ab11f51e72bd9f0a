"""One run in which everything happens that TensorBoard's pages show: an incident, an alarm, a skipped step, clips."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    DrillCallback,
    EarlyWarningCallback,
    GradLocCallback,
    GradNoiseScaleCallback,
    GradNormCallback,
    LayerClipCallback,
    LayerHealthCallback,
    LossMeanVarCallback,
    NumericsCallback,
    StabilizerCallback,
    UpdateClipCallback,
)
from stabilizer.errors import StabilizerWarning
from stabilizer.examples.bad_token import Bytes
from tests.lightning_models import make_trainer

__all__ = ["ALARM_STEP", "LAYERS", "SKIPPED_STEP", "STEPS", "TOKEN", "WINDOWS", "make_callbacks", "train"]

STEPS = 120
SKIPPED_STEP, ALARM_STEP = 60, 106
#: Where the bad token is; all on rank 0.
TOKEN = {"step": 90, "micro_batch": 1, "row": 2, "position": 20}
WINDOWS = (20, 50)
_BLOCKS = [f"blocks.{number}" for number in range(4)]
LAYERS = [f"model.{name}" for name in ("token_embedding", "position_embedding", *_BLOCKS, "norm", "head")]


def make_callbacks() -> list[StabilizerCallback]:
    """All that have a page of one model, with what they wait for made short."""
    faults: list[Any] = [
        {"kind": "nan_gradient", "step": SKIPPED_STEP, "layer": "model.blocks.1"},
        {
            "kind": "token_loss",
            "step": TOKEN["step"],
            "micro_batch": TOKEN["micro_batch"],
            "token": [TOKEN["row"], TOKEN["position"]],
            "factor": 3000.0,
        },
        {"kind": "corrupted_batch", "step": ALARM_STEP, "num_steps": 3},
    ]
    return [
        GradNormCallback(layer_every_n_steps=2, max_abs_every_n_steps=10),
        LossMeanVarCallback(windows=WINDOWS, warmup_steps=20),
        AdaptiveClipThreshold(),
        LayerClipCallback(every_n_steps=2),
        UpdateClipCallback(mode="observe"),
        GradLocCallback(tokenizer=Bytes(), warmup_steps=30, cooldown_steps=10, position_map="always"),
        NumericsCallback(every_n_steps=10),
        GradNoiseScaleCallback(min_samples=20),
        LayerHealthCallback(every_n_steps=20, window=40, warmup_steps=20),
        EarlyWarningCallback(),
        DrillCallback(faults=faults),
    ]


def train(folder: Path) -> list[StabilizerCallback]:
    """Train the small GPT with Lightning.

    Args:
        folder: For TensorBoard; the run is "run" in it.

    Returns:
        The callbacks.
    """
    from lightning.pytorch.loggers import TensorBoardLogger

    from stabilizer.examples.gpt import GPT
    from stabilizer.examples.lightning_gpt import LightningGPT

    class TinyGPT(LightningGPT):
        def configure_model(self) -> None:
            if self.model is None:
                torch.manual_seed(self.seed)
                self.model = GPT(context=self.context, num_layers=4, dim=32, num_heads=2)

    callbacks = make_callbacks()
    logger = TensorBoardLogger(folder, name="", version="run")
    options: dict[str, Any] = {"max_steps": STEPS, "accumulate_grad_batches": 2, "max_epochs": 1}
    trainer = make_trainer(callbacks=callbacks, logger=logger, **options)
    with warnings.catch_warnings():
        # The alarms, and what the drill says of itself.
        warnings.simplefilter("ignore", StabilizerWarning)
        trainer.fit(TinyGPT(steps=STEPS, context=32, batch_size=4))
    return callbacks
