"""The `stabilizer` command.

Every sub-command is a plain function: its keyword arguments are the options, its docstring is the help. What is heavy
or optional is imported inside it.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentParser  # type: ignore[attr-defined]

from stabilizer import __version__
from stabilizer.calibration.command import calibrate
from stabilizer.calibration.mistakes import CalibrationError
from stabilizer.checkpoints.command import CheckpointsError, checkpoints
from stabilizer.localize.replay_command import ReplayError, replay

if TYPE_CHECKING:
    from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback

__all__ = ["UsageError", "demo", "main", "tensorboard_command"]

# As in `examples.recipe`, which imports torch; the parser reads them here.
StrategyName: TypeAlias = Literal["single", "ddp", "fsdp2"]
Engine: TypeAlias = Literal["lightning", "accelerate"]


class UsageError(Exception):
    """A request that cannot be met; the message is all that the user sees."""


def demo(
    grad_norm: GradNormCallback,
    *,
    loss_mean_var: LossMeanVarCallback,
    engine: Engine = "lightning",
    strategy: StrategyName | None = None,
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
        steps: Number of optimizer steps.
        logdir: Folder for TensorBoard.
    """
    if steps < 1:
        raise UsageError(f"--steps={steps}: expected at least 1")
    if logdir.exists() and not logdir.is_dir():
        raise UsageError(f"--logdir={logdir} is a file: expected a folder, or a path where one can be made")
    if importlib.util.find_spec(engine) is None:
        name = engine.capitalize()
        raise UsageError(f"the demo trains with {name}, which is missing: pip install 'torch-stabilizer[{engine}]'")
    run = _train_with_lightning if engine == "lightning" else _train_with_accelerate
    run(grad_norm, loss_mean_var, strategy=strategy, steps=steps, logdir=logdir)


def _train_with_lightning(
    grad_norm: GradNormCallback,
    loss_mean_var: LossMeanVarCallback,
    *,
    strategy: StrategyName | None,
    steps: int,
    logdir: Path,
) -> None:
    from stabilizer.examples.lightning_gpt import LightningGPT, make_trainer, silence_hints, train

    strategy = strategy or "fsdp2"
    silence_hints()
    trainer = make_trainer(strategy, steps=steps, logdir=logdir, callbacks=[grad_norm, loss_mean_var])
    if trainer.global_rank == 0:
        _announce("Lightning", strategy=strategy, steps=steps, num_processes=trainer.num_devices)
    module = LightningGPT(steps=steps)
    train(trainer, module)
    if trainer.global_rank == 0:
        _finish(grad_norm, loss_mean_var, losses=[float(loss) for loss in module.losses], logdir=logdir)


def _train_with_accelerate(
    grad_norm: GradNormCallback,
    loss_mean_var: LossMeanVarCallback,
    *,
    strategy: StrategyName | None,
    steps: int,
    logdir: Path,
) -> None:
    import torch

    from stabilizer.examples.accelerate_gpt import next_run
    from stabilizer.examples.processes import RankError, run_processes
    from stabilizer.examples.recipe import num_processes

    on_gpu = torch.cuda.is_available()
    if strategy == "fsdp2" and not on_gpu:
        raise UsageError(
            "--strategy=fsdp2: on a CPU Accelerate trains with DDP instead and says nothing; use --strategy=ddp, or "
            "--engine=lightning, which shards on a CPU too"
        )
    if "LOCAL_RANK" in os.environ:
        raise UsageError(
            f"LOCAL_RANK={os.environ['LOCAL_RANK']} is set: the demo starts its processes by itself; run it without a "
            "launcher"
        )
    strategy = strategy or ("fsdp2" if on_gpu else "ddp")
    _announce("Accelerate", strategy=strategy, steps=steps, num_processes=num_processes(strategy))
    run = next_run(logdir / f"accelerate-{strategy}")
    try:
        run_processes(
            _accelerate_rank,
            args=(grad_norm, loss_mean_var, strategy, steps, logdir, run),
            num_processes=num_processes(strategy),
            has_ranks=strategy != "single",
        )
    except RankError as error:
        # The traceback that matters is the rank's own.
        raise SystemExit(f"stabilizer: error: {error}") from None


def _accelerate_rank(
    grad_norm: GradNormCallback,
    loss_mean_var: LossMeanVarCallback,
    strategy: StrategyName,
    steps: int,
    logdir: Path,
    run: Path,
) -> None:
    """What each process of an Accelerate run does."""
    from stabilizer.examples.accelerate_gpt import make_accelerator, train

    accelerator = make_accelerator(strategy, run=run)
    losses = train(accelerator, steps=steps, callbacks=[grad_norm, loss_mean_var])
    is_first = accelerator.is_main_process
    accelerator.end_training()
    if is_first:
        _finish(grad_norm, loss_mean_var, losses=losses, logdir=logdir)


def _announce(engine: str, *, strategy: str, steps: int, num_processes: int) -> None:
    import torch

    from stabilizer.examples.report import say

    hardware = f"{num_processes} process{'es' if num_processes > 1 else ''} on "
    hardware += "CUDA" if torch.cuda.is_available() else "the CPU"
    say(f"A small GPT reads Python's standard library: {steps} steps, {engine}, {strategy}, {hardware}")


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
    grad_norm: GradNormCallback, loss_mean_var: LossMeanVarCallback, *, losses: Sequence[float], logdir: Path
) -> None:
    """Print what a run did and how to see it."""
    from stabilizer.examples.report import report, say

    report(grad_norm, loss_mean_var, losses=losses)
    say(f"\nEvery layer's curve is in TensorBoard:\n{tensorboard_command(logdir)}")


class _Parser(ArgumentParser):
    """Answers a mistake with an exception instead of usage, tip and exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(" ".join(message.split())) from ex


def _demo_parser() -> ArgumentParser:
    from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback

    parser = _Parser(description=_summary(demo))
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these options")
    parser.add_function_arguments(demo, skip={"grad_norm", "loss_mean_var"}, fail_untyped=False)
    parser.add_class_arguments(GradNormCallback, "grad_norm")
    parser.add_class_arguments(LossMeanVarCallback, "loss_mean_var")
    # A short run wants more points than a long one.
    parser.set_defaults({"grad_norm.layer_every_n_steps": 2})
    return parser


def _calibrate_parser() -> ArgumentParser:
    parser = _Parser(description=_introduction(calibrate))
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these options")
    parser.add_function_arguments(calibrate, skip={"layers"}, as_positional=True, fail_untyped=False)
    parser.add_argument(
        "--layers", action=ActionYesNo(no_prefix="no-"), default=True, help="Whether layers get their own thresholds."
    )
    for option, action in list(parser._option_string_actions.items()):
        if "_" in option and option != "--print_config":  # as people type it
            parser._option_string_actions[option.replace("_", "-")] = action
            action.option_strings = [option.replace("_", "-")]
    return parser


def _replay_parser() -> ArgumentParser:
    parser = _Parser(description=_introduction(replay))
    parser.add_function_arguments(replay, as_positional=True, fail_untyped=False)
    return parser


def _checkpoints_parser() -> ArgumentParser:
    parser = _Parser(description=_introduction(checkpoints))
    parser.add_function_arguments(checkpoints, skip={"verify"}, as_positional=True, fail_untyped=False)
    parser.add_argument(
        "--verify", action="store_true", help="Verify what has not been verified yet, and write its guard file."
    )
    return parser


_COMMANDS: dict[str, tuple[Callable[..., None], Callable[[], ArgumentParser]]] = {
    "demo": (demo, _demo_parser),
    "calibrate": (calibrate, _calibrate_parser),
    "replay": (replay, _replay_parser),
    "checkpoints": (checkpoints, _checkpoints_parser),
}


def _summary(function: Callable[..., None]) -> str:
    return (function.__doc__ or "").partition("\n")[0]


def _introduction(function: Callable[..., None]) -> str:
    return (function.__doc__ or "").partition("Args:")[0].strip()


def _parse(args: Sequence[str]) -> tuple[Callable[..., None], dict[str, Any]]:
    parser = _Parser(prog="stabilizer", description="Callbacks that keep large-model training stable.")
    parser.add_argument("--version", action="version", version=f"stabilizer {__version__}")
    subcommands = parser.add_subcommands(dest="command")
    # Options that come from callbacks cost the import of every host: only the command that is asked for pays.
    wanted = next((word for word in args if not word.startswith("-")), None)
    for name, (function, make_parser) in _COMMANDS.items():
        subparser = make_parser() if name == wanted else _Parser(description=_summary(function))
        subcommands.add_subcommand(name, subparser, help=_summary(function))
    config = parser.parse_args(list(args))
    function, _ = _COMMANDS[config.command]
    # jsonargparse renamed the method in 4.49; Lightning's own CLI may hold it below that.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    try:
        arguments = instantiate(config)[config.command].as_dict()
    except ValueError as error:
        raise UsageError(str(error)) from error
    arguments.pop("config", None)
    return function, arguments


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: What follows the name of the program; `None` means this process's own arguments.

    Returns:
        The exit status: 0, 2 for a request that cannot be met, or 130 after an interrupt.
    """
    try:
        function, arguments = _parse((sys.argv[1:] if args is None else args) or ["--help"])
        function(**arguments)
    except (UsageError, CalibrationError, ReplayError, CheckpointsError) as error:
        sys.stderr.write(f"stabilizer: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
