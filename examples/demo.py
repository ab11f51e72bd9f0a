"""What `stabilizer demo` does: train the small GPT with all that watches a run, with or without a fault in it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from stabilizer.examples.planting import FaultName, Planted, plant
from stabilizer.examples.recipe import SIZES, SizeName, StrategyName, num_processes

if TYPE_CHECKING:
    from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback

__all__ = ["DemoError", "Engine", "demo", "tensorboard_command"]

Engine: TypeAlias = Literal["lightning", "accelerate"]


class DemoError(Exception):
    """A demo that cannot be made; the message is all that the user sees."""


@dataclasses.dataclass(frozen=True)
class _Run:
    """What is trained, and how."""

    strategy: StrategyName
    size: SizeName
    steps: int
    logdir: Path
    planted: Planted | None


def demo(
    grad_norm: GradNormCallback,
    *,
    loss_mean_var: LossMeanVarCallback,
    engine: Engine = "lightning",
    strategy: StrategyName | None = None,
    size: SizeName = "small",
    fault: FaultName | None = None,
    fault_step: int = 120,
    steps: int = 200,
    logdir: Path = Path("stabilizer-demo"),
) -> None:
    """Train a small GPT on the source of Python's standard library and log its loss and every layer's gradient norm.

    Args:
        grad_norm: The callback that measures gradients.
        loss_mean_var: The callback that follows the loss.
        engine: What trains: Lightning, or a loop with Accelerate.
        strategy: One process, or two processes with DDP or FSDP2; by default FSDP2, where the engine has it (Accelerate
            on GPUs only), else DDP.
        size: Of the model and its batches; a tiny one trains in half a minute.
        fault: What is broken on purpose, for the callbacks to find: one token's loss, a layer's gradient, a NaN or a
            flipped bit in it, or the learning rate. What it was is the last line that is printed.
        fault_step: At which optimizer step; thresholds need 50 steps to warm up, alarms of the loss 100.
        steps: Number of optimizer steps.
        logdir: Folder for TensorBoard.
    """
    if steps < 1:
        raise DemoError(f"--steps={steps}: expected at least 1")
    if fault is not None and not 0 <= fault_step < steps:
        raise DemoError(f"--fault-step={fault_step}: with --steps={steps} expected 0 to {steps - 1}")
    if logdir.exists() and not logdir.is_dir():
        raise DemoError(f"--logdir={logdir} is a file: expected a folder, or a path where one can be made")
    if importlib.util.find_spec(engine) is None:
        name = engine.capitalize()
        raise DemoError(f"the demo trains with {name}, which is missing: pip install 'torch-stabilizer[{engine}]'")
    chosen = _chosen(engine, strategy)
    planted = None if fault is None else _plant(fault, step=fault_step, strategy=chosen, size=size)
    train = _train_with_lightning if engine == "lightning" else _train_with_accelerate
    train(grad_norm, loss_mean_var, _Run(chosen, size, steps, logdir, planted))


def _chosen(engine: Engine, strategy: StrategyName | None) -> StrategyName:
    import torch

    if engine == "lightning":
        return strategy or "fsdp2"
    on_gpu = torch.cuda.is_available()
    if strategy == "fsdp2" and not on_gpu:
        raise DemoError(
            "--strategy=fsdp2: on a CPU Accelerate trains with DDP instead and says nothing; use --strategy=ddp, or "
            "--engine=lightning, which shards on a CPU too"
        )
    if "LOCAL_RANK" in os.environ:
        raise DemoError(
            f"LOCAL_RANK={os.environ['LOCAL_RANK']} is set: the demo starts its processes by itself; run it without a "
            "launcher"
        )
    return strategy or ("fsdp2" if on_gpu else "ddp")


def _plant(name: FaultName, *, step: int, strategy: StrategyName, size: SizeName) -> Planted:
    """On the last process: what goes wrong on the first one, which speaks, would be too easy."""
    context, batch_size = SIZES[size]["context"], SIZES[size]["batch_size"]
    return plant(name, step=step, rank=num_processes(strategy) - 1, context=context, batch_size=batch_size)


def _train_with_lightning(grad_norm: GradNormCallback, loss_mean_var: LossMeanVarCallback, run: _Run) -> None:
    from stabilizer.examples.demo_suite import make_suite
    from stabilizer.examples.lightning_gpt import LightningGPT, make_trainer, silence_hints, train

    silence_hints()
    suite = make_suite(grad_norm, loss_mean_var, num_ranks=num_processes(run.strategy), planted=run.planted)
    trainer = make_trainer(run.strategy, steps=run.steps, logdir=run.logdir, callbacks=suite)
    if trainer.global_rank == 0:
        _announce("Lightning", run, num_processes=trainer.num_devices)
    module = LightningGPT(steps=run.steps, **SIZES[run.size])
    train(trainer, module)
    if trainer.global_rank == 0:
        _finish(grad_norm, loss_mean_var, run, losses=[float(loss) for loss in module.losses])


def _train_with_accelerate(grad_norm: GradNormCallback, loss_mean_var: LossMeanVarCallback, run: _Run) -> None:
    from stabilizer.examples.accelerate_gpt import next_run
    from stabilizer.examples.processes import RankError, run_processes

    _announce("Accelerate", run, num_processes=num_processes(run.strategy))
    folder = next_run(run.logdir / f"accelerate-{run.strategy}")
    try:
        run_processes(
            _accelerate_rank,
            args=(grad_norm, loss_mean_var, run, folder),
            num_processes=num_processes(run.strategy),
            has_ranks=run.strategy != "single",
        )
    except RankError as error:
        # The traceback that matters is the rank's own.
        raise SystemExit(f"stabilizer: error: {error}") from None


def _accelerate_rank(grad_norm: GradNormCallback, loss_mean_var: LossMeanVarCallback, run: _Run, folder: Path) -> None:
    """What each process of an Accelerate run does."""
    from stabilizer.examples.accelerate_gpt import make_accelerator, train
    from stabilizer.examples.demo_suite import make_suite

    accelerator = make_accelerator(run.strategy, run=folder)
    suite = make_suite(grad_norm, loss_mean_var, num_ranks=accelerator.num_processes, planted=run.planted)
    losses = train(accelerator, steps=run.steps, callbacks=suite, **SIZES[run.size])
    is_first = accelerator.is_main_process
    accelerator.end_training()
    if is_first:
        _finish(grad_norm, loss_mean_var, run, losses=losses)


def _announce(engine: str, run: _Run, *, num_processes: int) -> None:
    import torch

    from stabilizer.examples.report import say

    hardware = f"{num_processes} process{'es' if num_processes > 1 else ''} on "
    hardware += "CUDA" if torch.cuda.is_available() else "the CPU"
    what = f"{run.steps} steps, {engine}, {run.strategy}, {hardware}"
    say(f"A {run.size} GPT reads Python's standard library: {what}")
    if run.planted is not None:
        say("Something in it is broken on purpose. The last line says what: see what the callbacks find until then.")


def tensorboard_command(logdir: Path) -> str:
    """The line that shows a folder in TensorBoard.

    Args:
        logdir: The folder.

    Returns:
        A command for this system's shell.

    Example:
        >>> tensorboard_command(Path("my runs"))
        "tensorboard --logdir 'my runs'"
    """
    arguments = ["tensorboard", "--logdir", str(logdir)]
    return subprocess.list2cmdline(arguments) if os.name == "nt" else shlex.join(arguments)


def _finish(
    grad_norm: GradNormCallback, loss_mean_var: LossMeanVarCallback, run: _Run, *, losses: Sequence[float]
) -> None:
    """Print what a run did and how to see it; what was broken comes last."""
    from stabilizer.examples.report import report, say

    report(grad_norm, loss_mean_var, losses=losses)
    say(f"\nEvery layer's curve is in TensorBoard:\n{tensorboard_command(run.logdir)}")
    if run.planted is not None:
        say(f"\nBroken on purpose: {run.planted.text}")
