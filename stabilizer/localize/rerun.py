"""A saved micro-batch run once more, in a model that a user's function makes."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.localize.replay_command import ReplayError
from stabilizer.progress import Progress

__all__ = ["run_again"]


def run_again(target: str, batch: Any) -> float:
    """Make a model, and take the gradient norm of a batch in it.

    Args:
        target: "module:function", see `replay`.
        batch: Of `load_batch`.

    Returns:
        L2 norm of the gradient of all parameters.

    Raises:
        ReplayError: If there is no such function, or it returns something else, or the batch cannot be run.
    """
    with Progress(f"running the micro-batch in {target}", total=2, unit="passes") as progress:
        model, loss_of = _made(target)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        model.zero_grad()
        progress.advance(0)  # the model is there
        try:
            loss = loss_of(_moved(batch, device))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ReplayError(f"{target}: the loss is {_kind(loss)}; expected a tensor with one number")
            progress.advance()
            loss.backward()
        except ReplayError:
            raise
        except Exception as error:
            raise ReplayError(f"{target}: the micro-batch cannot be run: {type(error).__name__}: {error}") from error
        progress.advance()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def _made(target: str) -> tuple[nn.Module, Callable[[Any], Any]]:
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise ReplayError(f"--model={target}: expected module:function, such as train:make_model")
    try:
        with _working_folder_first():
            function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ReplayError(f"--model={target}: {error}") from error
    made = function()
    if isinstance(made, nn.Module):
        return made, lambda batch: _loss(_called(made, batch))
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        return made
    raise ReplayError(f"{target} returns {_kind(made)}; expected a model, or a model and a function of the batch")


@contextlib.contextmanager
def _working_folder_first() -> Iterator[None]:
    """A script's neighbours can be imported, as with `python -m`."""
    path = os.getcwd()
    sys.path.insert(0, path)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(path)


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _loss(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", output)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    return tuple(_moved(value, device) for value in batch)


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
