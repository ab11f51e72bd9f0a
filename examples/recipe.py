"""What both trainings of the small GPT share: loss, optimizer, schedule, data, and in how many processes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from stabilizer.examples.stdlib_text import RandomWindows, load_stdlib_text

__all__ = [
    "SIZES",
    "SizeName",
    "StrategyName",
    "make_loader",
    "make_optimizer",
    "make_schedule",
    "next_byte_loss",
    "num_processes",
]

StrategyName: TypeAlias = Literal["single", "ddp", "fsdp2"]
SizeName: TypeAlias = Literal["small", "tiny"]

#: Name -> sizes of the model, length of a sequence, and sequences in one step of one process.
SIZES: dict[SizeName, dict[str, int]] = {
    "small": {"num_layers": 6, "dim": 192, "context": 128, "batch_size": 8},
    "tiny": {"num_layers": 4, "dim": 48, "context": 64, "batch_size": 8},
}


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Predict each byte of a batch from the ones before it.

    Args:
        model: From token numbers (batch, context) to logits (batch, context, vocabulary).
        batch: Token numbers, (batch, context + 1).

    Returns:
        The mean cross-entropy, in nats per byte, shape ().

    Example:
        >>> round(next_byte_loss(nn.Embedding(256, 256), torch.zeros(2, 9, dtype=torch.long)).item()) > 0
        True
    """
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def make_optimizer(parameters: Iterable[nn.Parameter], *, learning_rate: float = 1e-3) -> torch.optim.AdamW:
    """AdamW as language models use it.

    Args:
        parameters: What it moves.
        learning_rate: Largest learning rate.
    """
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def make_schedule(
    optimizer: torch.optim.Optimizer, *, steps: int, warmup_steps: int = 20
) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear warm-up, then a cosine to a tenth.

    Args:
        optimizer: Whose learning rate it sets, once an optimizer step.
        steps: Length of the run, in optimizer steps.
        warmup_steps: Length of the warm-up.

    Example:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> make_schedule(optimizer, steps=100, warmup_steps=4).get_last_lr()
        [0.25]
    """

    def factor(step: int) -> float:
        warmup = min(1.0, (step + 1) / warmup_steps)
        return warmup * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_loader(*, context: int, batch_size: int, seed: int, rank: int) -> DataLoader[Tensor]:
    """Random windows of the standard library's source, other ones on every rank, without end.

    Args:
        context: Length of a training sequence, in tokens; a window has one token more.
        batch_size: Sequences in one step of one process.
        seed: Seed of the data.
        rank: Number of the process.
    """
    windows = RandomWindows(load_stdlib_text(), window=context + 1, seed=seed, rank=rank)
    return DataLoader(windows, batch_size=batch_size)


def num_processes(strategy: StrategyName) -> int:
    """How many processes train on this machine: one for each of up to two GPUs, or two on the CPU.

    Args:
        strategy: "single" means one.
    """
    if strategy == "single":
        return 1
    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2
