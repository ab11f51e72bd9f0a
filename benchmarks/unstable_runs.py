"""Runs of a small GPT that become unstable for a known reason, and healthy ones, with the callbacks that warn."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stabilizer.callbacks import (
    EarlyWarningCallback,
    GradNoiseScaleCallback,
    LayerHealthCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    StepContext,
    attach,
)
from stabilizer.examples.gpt import GPT
from stabilizer.examples.stdlib_text import load_stdlib_text

__all__ = ["KINDS", "Run", "train"]

#: What goes wrong; "healthy" is none.
KINDS = ("healthy", "learning_rate", "corrupted_text", "attention_logits")
LOSS_KINDS = ("jump", "drift", "nonfinite")
CONTEXT, MICRO_BATCHES, ROWS = 64, 4, 4
WARMUP_STEPS, LEARNING_RATE = 50, 1e-3
# Of the bytes of a corrupted row.
CORRUPTION = 0.15
# A step of what goes wrong: the rate, the share of corrupted rows, and q and k.
RATE_GROWTH, SHARE_GROWTH, LOGIT_GROWTH = 1.02, 1 / 400, 1.01


@dataclasses.dataclass
class Run:
    """What a run has shown.

    Attributes:
        kind: One of `KINDS`.
        seed: Of weights and data.
        start: The step at which something begins to go wrong.
        steps: At which the channels were looked at.
        excesses: Channel -> ln(value / usual value) at these steps.
        losses: Of every step.
        alarms: Steps and kinds of all loss alarms.
        findings: Steps and kinds of findings about layers, of warning or alarm.
    """

    kind: str
    seed: int
    start: int
    steps: list[int] = dataclasses.field(default_factory=list)
    excesses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    alarms: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    findings: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    @property
    def alarm_step(self) -> int | None:
        """The first alarm of the loss itself after things have begun to go wrong."""
        return next((step for step, kind in self.alarms if kind in LOSS_KINDS and step >= self.start), None)


class _Notes(StabilizerCallback):
    """Writes down what the early warning has seen."""

    order = 100
    is_gated = False

    def __init__(self, run: Run, warning: EarlyWarningCallback) -> None:
        super().__init__()
        self.run, self.warning = run, warning

    def on_step_end(self, context: StepContext) -> None:
        """Note the excesses where there are new ones."""
        found = self.warning.excesses()
        if context.step % self.warning.every_n_steps == 0 and found:
            self.run.steps.append(context.step)
            for channel, excess in found.items():
                self.run.excesses.setdefault(channel, []).append(excess)


def _rows(text: Tensor, *, generator: torch.Generator, share: float) -> Tensor:
    """Rows of text, some of them overwritten by noise, shape (rows, context + 1)."""
    starts = torch.randint(0, len(text) - CONTEXT - 1, (ROWS,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    noise = torch.randint(0, 256, rows.shape, generator=generator)
    is_bad = torch.rand(ROWS, 1, generator=generator) < share
    is_hit = torch.rand(rows.shape, generator=generator) < CORRUPTION
    return torch.where(is_bad & is_hit, noise, rows)


@torch.no_grad()
def _grow_logits(model: GPT) -> None:
    """As if nothing held queries and keys back: both grow, and attention logits with their product."""
    for block in model.blocks:
        weight: Tensor = block.attention.qkv.weight  # type: ignore[union-attr,assignment]
        weight[: 2 * weight.shape[1]] *= LOGIT_GROWTH


def train(kind: str, *, seed: int, num_steps: int, start: int, after_alarm: int = 60) -> Run:
    """Train, and stop some steps after the alarm.

    Args:
        kind: One of `KINDS`.
        seed: Of weights and data.
        num_steps: Longest run.
        start: When something begins to go wrong.
        after_alarm: Steps after the first alarm that follows.
    """
    torch.manual_seed(seed)
    model, text = GPT(context=CONTEXT, num_layers=4, dim=96, num_heads=4), load_stdlib_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    run = Run(kind, seed, start)
    losses = LossMeanVarCallback(windows=(50, 500), every_n_steps=5, warmup_steps=100)
    health, warning = LayerHealthCallback(), EarlyWarningCallback(every_n_steps=5)
    callbacks = [GradNoiseScaleCallback(decay=0.95, min_samples=50), losses, health, warning, _Notes(run, warning)]
    with warnings.catch_warnings(), _attached(model, optimizer, callbacks) as handle:
        warnings.simplefilter("ignore")
        for step in range(num_steps):
            late = max(0, step - start) if kind != "healthy" else 0
            rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
            for group in optimizer.param_groups:
                group["lr"] = rate * (RATE_GROWTH**late if kind == "learning_rate" else 1.0)
            share = min(1.0, late * SHARE_GROWTH) if kind == "corrupted_text" else 0.0
            total = 0.0
            for _ in range(MICRO_BATCHES):
                rows = _rows(text, generator=generator, share=share)
                loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / MICRO_BATCHES
                handle.record_loss(loss.detach() * MICRO_BATCHES)
                loss.backward()
                total += float(loss)
            optimizer.step()
            optimizer.zero_grad()
            if kind == "attention_logits" and late:
                _grow_logits(model)
            run.losses.append(total)
            run.alarms = [(alarm.step, alarm.kind) for alarm in losses.alarms]
            if run.alarm_step is not None and step >= run.alarm_step + after_alarm:
                break
        run.findings = [(one.step, one.kind) for one in health.findings if one.severity != "info"]
    return run


def _attached(model: nn.Module, optimizer: Any, callbacks: list[Any]) -> Any:
    return attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda values, step: None)
