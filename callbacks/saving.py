"""Checkpoints at alarms, through the host: named, and kept apart from the regular ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stabilizer.callbacks.hosting import stand_before

__all__ = ["save_with_accelerator", "save_with_trainer"]

_FOLDER = "alarms"


def save_with_trainer(trainer: Any, name: str) -> str:
    """Save a Lightning checkpoint in `alarms` below the logger's folder; a collective.

    Args:
        trainer: Of either package.
        name: Of the file, without its ending.

    Returns:
        The path.
    """
    folder = trainer.log_dir or trainer.default_root_dir  # the first is broadcast, the same on every rank
    path = str(Path(folder) / _FOLDER / f"{name}.ckpt")
    failures: list[Exception] = []

    def write(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except Exception as error:
            # The rank that writes may be the only one to fail, and the others wait for it in a barrier behind this.
            failures.append(error)

    undo = stand_before(trainer.strategy, "save_checkpoint", write)
    try:
        trainer.save_checkpoint(path)
    finally:
        undo()
    if failures:
        raise failures[0]
    return path


def save_with_accelerator(accelerator: Any, name: str) -> str:
    """Save the state of an accelerator in `alarms` below its project's folder; a collective.

    Args:
        accelerator: Of Accelerate.
        name: Of the folder.

    Returns:
        The path.
    """
    configuration = accelerator.project_configuration
    path = str(Path(configuration.logging_dir or configuration.project_dir or ".") / _FOLDER / name)
    # Its own naming would put this among the regular ones, delete one of them, and count it.
    automatic, iteration = configuration.automatic_checkpoint_naming, configuration.iteration
    configuration.automatic_checkpoint_naming = False
    try:
        accelerator.save_state(path)
    finally:
        configuration.automatic_checkpoint_naming, configuration.iteration = automatic, iteration
    return path
