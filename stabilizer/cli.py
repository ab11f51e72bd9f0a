"""The `stabilizer` command.

Every sub-command is a plain function: its keyword arguments are the options, its docstring is the help. What is heavy
or optional is imported inside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentParser  # type: ignore[attr-defined]

from stabilizer import __version__
from stabilizer.calibration.command import calibrate
from stabilizer.calibration.mistakes import CalibrationError
from stabilizer.checkpoints.command import CheckpointsError, checkpoints
from stabilizer.examples.demo import DemoError, demo, tensorboard_command
from stabilizer.localize.replay_command import ReplayError, replay

__all__ = ["UsageError", "demo", "main", "tensorboard_command"]


class UsageError(Exception):
    """A request that cannot be met; the message is all that the user sees."""


class _Parser(ArgumentParser):
    """Answers a mistake with an exception instead of usage, tip and exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(" ".join(message.split())) from ex


def _demo_parser() -> ArgumentParser:
    from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback

    parser = _Parser(description=_summary(demo))
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these options")
    parser.add_function_arguments(demo, skip={"grad_norm", "loss_mean_var"}, fail_untyped=False)
    _spell_as_typed(parser)
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
    _spell_as_typed(parser)
    return parser


def _spell_as_typed(parser: ArgumentParser) -> None:
    """--fault-step, not --fault_step; arguments of a class keep the names that they have in Python."""
    for option, action in list(parser._option_string_actions.items()):
        if "_" in option and "." not in option and option != "--print_config":
            parser._option_string_actions[option.replace("_", "-")] = action
            action.option_strings = [option.replace("_", "-")]


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
    except (UsageError, DemoError, CalibrationError, ReplayError, CheckpointsError) as error:
        sys.stderr.write(f"stabilizer: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
