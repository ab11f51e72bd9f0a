"""Runs with TensorBoard of all that a callback may show there."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    CheckpointGuardCallback,
    DrillCallback,
    EarlyWarningCallback,
    GradLocCallback,
    GradNoiseScaleCallback,
    GradNormCallback,
    LayerClipCallback,
    LayerHealthCallback,
    LossMeanVarCallback,
    NumericsCallback,
    RolloutMismatchCallback,
    StabilizerCallback,
    UpdateClipCallback,
    attach,
)
from stabilizer.examples.bad_token import Bytes, Plant, micro_batches, weighted_loss
from stabilizer.examples.gpt import GPT

__all__ = ["LAYER_STEP", "PLANT", "all_callbacks", "full_run"]

#: Late enough for all thresholds to be warm.
PLANT = Plant(step=34)
LAYER_STEP = 28


def all_callbacks() -> list[StabilizerCallback]:
    """One of every kind, as quick to judge as it may be, with a fault beside the one that is in the data."""
    rule = {"name": "robust_log", "warmup_steps": 10}
    return [
        GradNormCallback(layer_every_n_steps=2, max_abs_every_n_steps=10, heatmap_every_n_steps=20),
        LossMeanVarCallback(windows=(10, 30), every_n_steps=2, warmup_steps=20, on_alarm=["log"]),
        LayerClipCallback(rule=rule, every_n_steps=2),
        AdaptiveClipThreshold(rule=rule, on_spike="skip_step"),
        GradLocCallback(rule=rule, warmup_steps=20, cooldown_steps=5, position_map="always", tokenizer=Bytes()),
        GradNoiseScaleCallback(min_samples=10, log_every_n_steps=2, per_layer=True),
        EarlyWarningCallback(every_n_steps=2),
        LayerHealthCallback(every_n_steps=10, window=20, warmup_steps=10),
        NumericsCallback(every_n_steps=5),
        RolloutMismatchCallback(),
        CheckpointGuardCallback(every_n_steps=5),
        UpdateClipCallback(every_n_steps=5),
        DrillCallback(faults=[{"kind": "layer_spike", "step": LAYER_STEP, "layer": "blocks.1", "factor": 300.0}]),
    ]


def full_run(folder: Path, callbacks: list[StabilizerCallback] | None = None, *, num_steps: int = 40) -> None:
    """Train a small GPT in a plain loop, four micro-batches a step.

    Args:
        folder: For TensorBoard.
        callbacks: Default `all_callbacks`.
        num_steps: Number of optimizer steps.
    """
    torch.manual_seed(0)
    model = GPT(context=64, num_layers=3, dim=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = micro_batches(PLANT)
    found = all_callbacks() if callbacks is None else callbacks
    with (
        SummaryWriter(str(folder)) as writer,
        attach(None, model=model, optimizer=optimizer, callbacks=found, loss_fn=weighted_loss, log=writer) as handle,
    ):
        for step in range(num_steps):
            for batch in next(batches):
                handle.record_batch(batch)
                loss = weighted_loss(model, batch)
                loss.backward()
                handle.record_loss(loss * 4)
            told = torch.zeros(2, 8)
            handle.observe(logp_train=told, logp_rollout=told + 0.01 * step, entropy=torch.ones(2, 8))
            optimizer.step()
            optimizer.zero_grad()
