"""Loops that tell RolloutMismatchCallback of micro-batches of unequal size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks import attach
from stabilizer.callbacks.mismatch_alarms import MismatchRow
from tests.models import loss_of, token_batch
from tests.spread import no_sync, spread
from tests.tiny_loops import Loop

__all__ = ["constant", "healthy", "micro_batch", "row_of", "run_observing", "take_steps"]


def micro_batch(rank: int, number: int, step: int) -> dict[str, Any]:
    """Log-probs and signals; no two micro-batches of a step have the same number of tokens. The rest is NaN.

    Args:
        rank: Of the data.
        number: Within the step.
        step: The optimizer step.
    """
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    size, length = 4, 5 + 3 * rank + 2 * number
    train = -torch.rand(size, length, generator=generator) * 3
    rollout = (train + 0.4 * torch.randn(size, length, generator=generator)).clamp(max=-1e-3)
    mask = torch.rand(size, length, generator=generator) < 0.6
    mask[0, 0] = True
    entropy, kl = torch.rand(2, size, length, generator=generator)
    return {
        "logp_train": train.masked_fill(~mask, torch.nan),
        "logp_rollout": rollout.masked_fill(~mask, torch.inf),
        "mask": mask,
        "entropy": entropy.masked_fill(~mask, torch.nan),
        "kl_ref": kl,
        "clipped": torch.rand(size, length, generator=generator) < 0.2,
        "truncated": torch.rand(size, generator=generator) < 0.3,
        "policy_lag": torch.randint(0, 4, (size,), generator=generator),
        "completion_length": mask.sum(-1),
        "rewards": torch.randint(0, 2, (2 * size,), generator=generator).float(),
        "num_generations": 4,
    }


def healthy(num_tokens: int = 400, *, std: float = 0.02, seed: int = 0) -> dict[str, Tensor]:
    """Log-probs of one policy under two engines, sampled from the second.

    Args:
        num_tokens: In four sequences.
        std: Of the log-ratios.
        seed: Of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = std * torch.randn(4, num_tokens // 4, generator=generator)
    rollout = -3 * torch.rand(4, num_tokens // 4, generator=generator)
    # The mean ratio of what has been sampled is 1.
    return {"logp_train": rollout + noise - std**2 / 2, "logp_rollout": rollout}


def constant(log_ratio: float, num_tokens: int = 400) -> dict[str, Tensor]:
    """Log-probs that are off everywhere alike.

    Args:
        log_ratio: By how much.
        num_tokens: In four sequences.
    """
    rollout = torch.full((4, num_tokens // 4), -1.0, dtype=torch.float64)
    return {"logp_train": rollout + log_ratio, "logp_rollout": rollout}


def row_of(seen: Any) -> MismatchRow:
    """Figures as alarms see them, of statistics that `stabilizer.rollout` gave.

    Args:
        seen: A `MismatchStatistics`.
    """
    return MismatchRow(
        1.0,
        float(seen.num_tokens),
        float(seen.num_sequences),
        float(seen.num_nonfinite),
        0.0,
        float(seen.kl_k3),
        float(seen.effective_sample_size),
        float(seen.max_abs_log_ratio),
        float(seen.share_beyond_factor_2),
        float(seen.mean_log_ratio),
        float(seen.std_log_ratio),
        0.0,
    )


def take_steps(loop: Loop, steps: Sequence[dict[str, Any] | None]) -> None:
    """Take a step for each.

    Args:
        loop: Entered.
        steps: What to observe; `None` for nothing.
    """
    for observed in steps:
        loop.backward(1.0)
        if observed is not None:
            loop.handle.observe(**observed)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def run_observing(
    rank: int,
    world_size: int,
    make: Callable[..., Any],
    strategy: str = "ddp",
    num_micro_batches: int = 2,
    steps: int = 3,
    silent: Sequence[int] = (),
    options: dict[str, Any] | None = None,
) -> Any:
    """Train under a strategy and tell of every micro-batch.

    Args:
        rank: Of this process.
        world_size: Number of processes.
        make: The callback's class.
        strategy: Of `tests.spread`.
        num_micro_batches: Of a step.
        steps: How many.
        silent: Ranks that tell nothing.
        options: Of the callback.

    Returns:
        What was logged on this rank, and the callback's state.
    """
    model, data_rank = spread(strategy, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    callback, rows = make(**(options or {})), []

    def log(values: dict[str, float], step: int) -> None:
        rows.append((values, step))

    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=log) as handle:
        for step in range(steps):
            for number in range(num_micro_batches):
                with contextlib.nullcontext() if number == num_micro_batches - 1 else no_sync(model):
                    loss_of(model, token_batch(data_rank, step=step, micro_batch=number)).backward()
                    if rank not in silent:
                        handle.observe(**micro_batch(data_rank, number, step))
            optimizer.step()
            optimizer.zero_grad()
    return rows, callback.state_dict(), [vars(alarm) for alarm in callback.alarms]
