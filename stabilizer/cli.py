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
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser  # type: ignore[attr-defined]

from stabilizer import __version__

if TYPE_CHECKING:
    from rich.table import Table

    from stabilizer.callbacks import GradNormCallback
    from stabilizer.callbacks.grad_norm import NormHistory

__all__ = ["UsageError", "demo", "main", "tensorboard_command"]


class UsageError(Exception):
    """A request that cannot be met; the message is all that the user sees."""


def demo(
    grad_norm: GradNormCallback,
    *,
    strategy: Literal["single", "ddp", "fsdp2"] = "fsdp2",
    steps: int = 200,
    logdir: Path = Path("stabilizer-demo"),
) -> None:
    """Train a small GPT on the source of Python's standard library and log every layer's gradient norm.

    Args:
        grad_norm: The callback to train with.
        strategy: One process, or two processes with DDP or FSDP2.
        steps: Number of optimizer steps.
        logdir: Folder for TensorBoard.
    """
    if steps < 1:
        raise UsageError(f"--steps={steps}: expected at least 1")
    if logdir.exists() and not logdir.is_dir():
        raise UsageError(f"--logdir={logdir} is a file: expected a folder, or a path where one can be made")
    if importlib.util.find_spec("lightning") is None:
        raise UsageError("the demo trains with Lightning, which is missing: pip install 'torch-stabilizer[lightning]'")
    from stabilizer.examples.lightning_gpt import LightningGPT, make_trainer, silence_hints, train

    silence_hints()
    trainer = make_trainer(strategy, steps=steps, logdir=logdir, callbacks=[grad_norm])
    if trainer.global_rank == 0:
        hardware = f"{trainer.num_devices} process{'es' if trainer.num_devices > 1 else ''} on "
        hardware += "CUDA" if trainer.strategy.root_device.type == "cuda" else "the CPU"
        _say(f"A small GPT reads Python's standard library: {steps} steps, {strategy}, {hardware}")
    module = LightningGPT(steps=steps)
    train(trainer, module)
    if trainer.global_rank == 0:
        _report(grad_norm, losses=[float(loss) for loss in module.losses])
        _say(f"\nEvery layer's curve is in TensorBoard:\n{tensorboard_command(logdir)}")


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


def _say(text: str) -> None:
    """Print lines that nothing wraps or colours, so that they can be copied."""
    from rich.console import Console

    Console().print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _report(grad_norm: GradNormCallback, *, losses: Sequence[float]) -> None:
    """Print what a run did.

    Args:
        grad_norm: The callback, after the run.
        losses: Loss of every step, in nats per byte.
    """
    from rich.console import Console

    try:
        Console().print(_norm_table(grad_norm.norm_history()))
    except ValueError as error:
        # Switched off by STABILIZER_DISABLE: the training itself is still worth a report.
        _say(f"no gradient norms: {error}")
    last = losses[-10:]
    _say(f"loss {losses[0]:.2f} -> {sum(last) / len(last):.2f} nats per byte (mean of the last {len(last)} steps)")


def _norm_table(history: NormHistory) -> Table:
    from rich.table import Table

    table = Table(title=f"Gradient norms of {len(history.steps)} steps")
    table.add_column("layer", overflow="fold")
    for column in ("now", "median", "largest", "at step"):
        table.add_column(column, justify="right")
    largest, rows = history.norms.max(dim=0)
    columns = zip(
        history.layer_names, history.norms[-1], history.norms.median(dim=0).values, largest, rows, strict=True
    )
    for name, now, median, high, row in columns:
        table.add_row(name, f"{now:.4f}", f"{median:.4f}", f"{high:.4f}", str(history.steps[int(row)]))
    return table


class _Parser(ArgumentParser):
    """Answers a mistake with an exception instead of usage, tip and exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(" ".join(message.split())) from ex


def _demo_parser() -> ArgumentParser:
    from stabilizer.callbacks import GradNormCallback

    parser = _Parser(description=_summary(demo))
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these options")
    parser.add_function_arguments(demo, skip={"grad_norm"}, fail_untyped=False)
    parser.add_class_arguments(GradNormCallback, "grad_norm")
    # A short run wants more points than a long one.
    parser.set_defaults({"grad_norm.layer_every_n_steps": 2})
    return parser


_COMMANDS: dict[str, tuple[Callable[..., None], Callable[[], ArgumentParser]]] = {"demo": (demo, _demo_parser)}


def _summary(function: Callable[..., None]) -> str:
    return (function.__doc__ or "").partition("\n")[0]


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
    except UsageError as error:
        sys.stderr.write(f"stabilizer: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
