"""What the short examples share: their two options, and one line in place of a traceback where a package is missing."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from stabilizer.examples.demo import tensorboard_command
from stabilizer.examples.report import say

__all__ = ["Options", "needs", "read_options", "show"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line said.

    Attributes:
        steps: Number of optimizer steps.
        logdir: Folder for TensorBoard.
    """

    steps: int
    logdir: Path


def read_options(
    arguments: Sequence[str] | None, *, name: str, text: str | None, steps: int, least: int = 1
) -> Options:
    """Read `--steps` and `--logdir`.

    Args:
        arguments: Of the command line; `None` means this process's own.
        name: Of the example.
        text: Its docstring.
        steps: How many unless said.
        least: The fewest that make sense.

    Raises:
        SystemExit: If an argument is none.

    Example:
        >>> read_options(["--steps", "7"], name="lightning_script", text="Trains.", steps=60).steps
        7
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m stabilizer.examples.{name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder = Path(f"stabilizer-{name.replace('_', '-')}")
    parser.add_argument("--steps", type=int, default=steps, help=f"optimizer steps (default: {steps})")
    parser.add_argument("--logdir", type=Path, default=folder, help=f"folder for TensorBoard (default: {folder})")
    found = parser.parse_args(arguments)
    if found.steps < least:
        parser.error(f"--steps={found.steps}: expected at least {least}")
    return Options(found.steps, found.logdir)


def show(where: str, options: Options) -> None:
    """Print where there is something to look at.

    Args:
        where: Which page of TensorBoard, and what on it.
        options: Of the run.
    """
    say(f"\n{where}:\n{tensorboard_command(options.logdir)}")


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Imports that need an extra stand in this block.

    Args:
        extra: Name of the extra.

    Raises:
        SystemExit: If a package of it is missing; says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or extra).partition(".")[0]
        raise SystemExit(f"{package} is missing: pip install 'torch-stabilizer[{extra}]'") from None
