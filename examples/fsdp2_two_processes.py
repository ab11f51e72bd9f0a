"""FSDP2 by hand in two processes and a plain loop: `fully_shard`, then `attach(None, ...)` on every rank.

    python -m stabilizer.examples.fsdp2_two_processes

Each rank holds half of every parameter, and no rank has a whole gradient; the norms are those of the whole layers all
the same, since each rank adds what it owns and one collective a step adds up the ranks. What to look at afterwards is
what `tensorboard --logdir stabilizer-fsdp2-two-processes` shows: grad_norm/layer/<layer> under Scalars, written by rank
0 alone. With GPUs and `torchrun --nproc-per-node 8` the loop is the same; only the mesh says "cuda".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import GradNormCallback, LayerClipCallback, attach, recommended
from stabilizer.examples.gpt import GPT
from stabilizer.examples.processes import RankError, run_processes
from stabilizer.examples.recipe import make_loader, make_optimizer, make_schedule, next_byte_loss
from stabilizer.examples.report import say
from stabilizer.examples.starting import read_options, show

__all__ = ["main", "train"]


def train(steps: int, logdir: str) -> None:
    """What each process does.

    Args:
        steps: Number of optimizer steps.
        logdir: Folder for TensorBoard.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT(context=64, num_layers=4, dim=48)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())  # after sharding
    schedule = make_schedule(optimizer, steps=steps, warmup_steps=5)
    batches = iter(make_loader(context=64, batch_size=8, seed=0, rank=rank))  # other data on every rank

    norms = GradNormCallback(layer_every_n_steps=1)
    callbacks = [*(c for c in recommended() if not isinstance(c, GradNormCallback)), norms, LayerClipCallback()]
    writer = SummaryWriter(logdir) if rank == 0 else None
    # On every rank, with the same callbacks: that is the one rule.
    with attach(
        None,
        model=model,
        optimizer=optimizer,
        callbacks=callbacks,
        loss_fn=next_byte_loss,
        log=writer,
        schedulers=[schedule],
    ) as handle:
        for _ in range(steps):
            batch = next(batches)
            handle.record_batch(batch)
            loss = next_byte_loss(model, batch)
            loss.backward()
            handle.record_loss(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if writer is not None:
        writer.close()
        local = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        whole = sum(parameter.numel() for parameter in model.parameters())
        say(f"\nRank 0 holds {local:,} of {whole:,} parameters.")
        say(f"The last gradient norm of all of them: {norms.norm_history().totals[-1]:.4f}")
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in two processes.

    Args:
        arguments: Of the command line.
    """
    options = read_options(arguments, name="fsdp2_two_processes", text=__doc__, steps=40)
    try:
        run_processes(train, args=(options.steps, str(options.logdir)), num_processes=2)
    except RankError as error:
        raise SystemExit(str(error)) from None
    show("Under Scalars, grad_norm/layer/...", options)


if __name__ == "__main__":
    main()
