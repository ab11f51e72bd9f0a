"""What a host puts back to a checkpoint while it runs, and what goes on as it is."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.run_host import RunHost
from stabilizer.errors import warn

__all__ = ["load_in_place", "refusal", "unloadable"]


def refusal(host: RunHost) -> str:
    """Why a run cannot go back to a checkpoint by itself; empty if it can.

    Args:
        host: Of the run.
    """
    if host.kind == "lightning":
        return ""
    if host.kind == "accelerate":
        num = len(host.optimizers)
        if num == 1:
            return ""
        return f"a loop with {num} optimizers has no place between their steps where all of it could be put back"
    what = "transformers' trainer" if host.kind == "transformers" else "a plain loop"
    return f"{what} cannot be put back to a checkpoint within the process"


def unloadable(host: RunHost, path: Path) -> str:
    """Why a checkpoint cannot be loaded without executing code that is in it; empty if it can, or if loading will tell.

    Args:
        host: Of the run.
        path: Of the checkpoint.
    """
    if host.kind != "lightning" or not path.is_file():
        return ""
    try:
        # Structure alone: no number is read.
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = found[1] if found else "an object of its own"
        return (
            f"{path} holds {what}, which is not loaded without executing code: have save_hyperparameters and callbacks "
            "save plain types only, or say torch.serialization.add_safe_globals([...]) before training"
        )
    return ""


def load_in_place(host: RunHost, path: Path, *, owner: StabilizerCallback) -> None:
    """Put parameters, optimizers, schedulers, scaler and the states of callbacks back; on every rank.

    Args:
        host: Of the run.
        path: Of the checkpoint.
        owner: The callback whose state stays.
    """
    if host.kind == "lightning":
        _load_lightning(host, owner.driver, path, owner=owner)
    else:
        _load_accelerate(host, path)


def _load_lightning(host: RunHost, driver: Any, path: Path, *, owner: StabilizerCallback) -> None:
    trainer = host.engine
    connector = trainer._checkpoint_connector
    resumed_from = connector._ckpt_path
    try:
        # Sharded strategies put parameters and optimizers back here, the others below.
        takes = "weights_only" in inspect.signature(connector.resume_start).parameters
        connector.resume_start(str(path), **({"weights_only": True} if takes else {}))
        connector.restore_model()
        loaded = connector._loaded_checkpoint
        for callback in trainer.callbacks:
            # Whoever has changed what was saved (averages of weights) changes it back.
            callback.on_load_checkpoint(trainer, trainer.lightning_module, loaded)
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
        states = loaded.get("callbacks", {})
        driver._suites.close(is_end=False)
        driver._suites.tally.discard()
        others = [callback for callback in driver.callbacks if callback is not owner]
        missing = [callback.state_key for callback in others if callback.state_key not in states]
        if missing:
            warn(f"{path} has no state of {', '.join(missing)}, which keep what they have")
        for callback in others:
            if callback.state_key in states:
                callback.load_state_dict(copy.deepcopy(states[callback.state_key]))
    finally:
        connector.resume_end()
        connector._ckpt_path = resumed_from


def _load_accelerate(host: RunHost, path: Path) -> None:
    accelerator = host.engine
    # Without its loaders it leaves them and their samplers where they are; its counter of micro-batches goes on too.
    loaders, counter = accelerator._dataloaders, accelerator.step
    accelerator._dataloaders = []
    try:
        accelerator.load_state(str(path))
    finally:
        accelerator._dataloaders, accelerator.step = loaders, counter
