"""Train the small GPT on the standard library's source in an Accelerate loop: one process, DDP or FSDP2, CPU or GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, tqdm  # type: ignore[import-untyped]
from torch.distributed.fsdp import MixedPrecisionPolicy

from stabilizer.callbacks import StabilizerCallback, attach
from stabilizer.examples.gpt import GPT
from stabilizer.examples.recipe import StrategyName, make_loader, make_optimizer, make_schedule, next_byte_loss

__all__ = ["make_accelerator", "make_sharding", "next_run", "train"]


def make_accelerator(strategy: StrategyName, *, run: Path) -> Accelerator:
    """Make an accelerator for this machine: the GPUs if there are any, else the CPU.

    Args:
        strategy: What the processes do together; how many there are stands in their environment. FSDP2 needs GPUs:
            on a CPU Accelerate takes DDP instead.
        run: Folder of this run for TensorBoard.

    Returns:
        An accelerator with its tracker.
    """
    on_gpu = torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=not on_gpu,
        mixed_precision="bf16" if on_gpu else "no",
        fsdp_plugin=make_sharding() if strategy == "fsdp2" else None,
        # Else Accelerate would move the schedule once a step for every process.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        log_with="tensorboard",
        project_dir=run.parent,
    )
    accelerator.init_trackers(run.name)
    return accelerator


def make_sharding() -> FullyShardedDataParallelPlugin:
    """FSDP2: every block is a unit, and so is what is left."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
        # Autocast computes in bfloat16; left to itself the plugin would add up gradients in it too.
        mixed_precision_policy=MixedPrecisionPolicy(),
    )


def train(
    accelerator: Accelerator,
    *,
    steps: int,
    callbacks: Sequence[StabilizerCallback],
    num_layers: int = 6,
    dim: int = 192,
    context: int = 128,
    batch_size: int = 8,
    learning_rate: float = 1e-3,
    warmup_steps: int = 20,
    seed: int = 1,
) -> list[float]:
    """Train, with the callbacks attached.

    Args:
        accelerator: From `make_accelerator`.
        steps: Number of optimizer steps.
        callbacks: What to train with.
        num_layers: Number of blocks.
        dim: Width of the residual stream.
        context: Length of a training sequence, in tokens.
        batch_size: Sequences in one step of one process.
        learning_rate: Largest learning rate.
        warmup_steps: Steps of linear warm-up.
        seed: Seed of the weights (the same on every rank) and of the data (a stream of its own for every rank).

    Returns:
        The loss of every step on this rank's own tokens, in nats per byte.
    """
    torch.manual_seed(seed)
    model = GPT(context=context, num_layers=num_layers, dim=dim)
    optimizer = make_optimizer(model.parameters(), learning_rate=learning_rate)
    schedule = make_schedule(optimizer, steps=steps, warmup_steps=warmup_steps)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    # Not prepared: every rank reads a stream of its own already.
    batches = iter(make_loader(context=context, batch_size=batch_size, seed=seed, rank=accelerator.process_index))
    losses = []
    # The loss is not in what the model returns: loss_fn says where it is, and record_batch what it is computed from.
    with attach(
        accelerator,
        model=model,
        optimizer=optimizer,
        callbacks=callbacks,
        loss_fn=next_byte_loss,
        num_steps=steps,
    ) as handle:
        for step in (bar := tqdm(range(steps), desc="Training")):
            batch = next(batches).to(accelerator.device)
            handle.record_batch(batch)
            loss = next_byte_loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            accelerator.log({"train/loss": losses[-1]}, step=step)
            bar.set_postfix({"train/loss": f"{losses[-1]:.3f}"})
    return losses


def next_run(folder: Path) -> Path:
    """The first `version_<n>` that a folder does not have yet.

    Args:
        folder: Of all runs.

    Example:
        >>> next_run(Path("no such folder")).name
        'version_0'
    """
    number = 0
    while (run := folder / f"version_{number}").exists():
        number += 1
    return run
