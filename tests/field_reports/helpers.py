"""What the field reports share: short fits with TensorBoard, and the same training in one process in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from stabilizer.callbacks import GradNormCallback
from stabilizer.errors import StabilizerWarning
from stabilizer.names import clean_name, layer_names
from tests import reference
from tests.clip_reference import clip
from tests.lightning_models import PACKAGES, expected_batches, make_module, make_trainer
from tests.models import make_mlp, make_transformer, reference_gradients
from tests.sharding import full

__all__ = [
    "LEARNING_RATE",
    "TOLERANCE",
    "Checkpointed",
    "Reference",
    "covers",
    "fit",
    "norm_logger",
    "our_warnings",
    "reference_run",
    "remembered",
    "total_norm_of",
    "train",
    "whole_weights",
]

TOLERANCE = 1e-5
LEARNING_RATE = 0.05


def covers(strategy: str, host: str = "lightning") -> pytest.MarkDecorator:
    """The mark of a test that trains under a strategy.

    Args:
        strategy: As README's table calls it.
        host: As README's table calls it.
    """
    return pytest.mark.covers(feature="gradient norms", strategy=strategy, host=host)


class Checkpointed(nn.Module):
    """A block that runs again in the backward pass.

    Args:
        block: Any.
        use_reentrant: Of `torch.utils.checkpoint.checkpoint`.
    """

    def __init__(self, block: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = block
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """The block's result."""
        return checkpoint(self._checkpoint_wrapped_module, x, use_reentrant=self.use_reentrant)


def norm_logger(**options: Any) -> GradNormCallback:
    """A GradNormCallback that logs every layer at every step and draws nothing.

    Args:
        **options: Of GradNormCallback.
    """
    return GradNormCallback(**{"layer_every_n_steps": 1, "heatmap_every_n_steps": None, **options})


def fit(
    module: Any,
    folder: str | Path,
    *,
    strategy: str = "single",
    devices: int = 1,
    package: str = PACKAGES[0],
    ckpt_path: str | Path | None = None,
    version: str = "run",
    **options: Any,
) -> Any:
    """Fit with TensorBoard; the event files are in `folder / version`.

    Args:
        module: A LightningModule.
        folder: Where to write.
        strategy: Of `make_trainer`.
        devices: Of `make_trainer`.
        package: Of `make_trainer`.
        ckpt_path: What to resume.
        version: Name of the run.
        **options: Of Trainer.

    Returns:
        The Trainer.
    """
    logger = importlib.import_module(f"{package}.loggers").TensorBoardLogger(folder, name="", version=version)
    trainer = make_trainer(strategy, devices=devices, package=package, **{"logger": logger, **options})
    trainer.fit(module, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return trainer


def remembered(callback: GradNormCallback, optimizer_index: int = 0) -> dict[str, Any]:
    """What a callback knows of the past, as plain types.

    Args:
        callback: After a fit.
        optimizer_index: Position of the optimizer.
    """
    history = callback.norm_history(optimizer_index)
    layers = dict(zip(history.layer_names, history.norms.T.tolist(), strict=True))
    return {"steps": history.steps, "totals": history.totals.tolist(), "layers": layers}


def train(
    rank: int,
    world_size: int,
    folder: str,
    strategy: str,
    *,
    kind: str = "mlp",
    package: str = PACKAGES[0],
    callback_options: dict[str, Any] | None = None,
    module_options: dict[str, Any] | None = None,
    beside: Sequence[Any] = (),
    **options: Any,
) -> dict[str, Any]:
    """For `run_distributed`: one fit with a norm logger on this rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        folder: Where to write.
        strategy: Of `make_trainer`.
        kind: "mlp" or "transformer".
        package: One of PACKAGES.
        callback_options: Of GradNormCallback.
        module_options: Of `make_module`.
        beside: Callbacks beside the norm logger.
        **options: Of Trainer.

    Returns:
        What the callback remembers, the warnings of the package, and the weights at the end.
    """
    callback, end = norm_logger(**(callback_options or {})), _End(package)
    module = make_module(kind, package=package, **(module_options or {}))
    with our_warnings() as caught:
        fit(
            module,
            folder,
            strategy=strategy,
            devices=world_size,
            package=package,
            **{"callbacks": [callback, *beside, end.callback], **options},
        )
    return {**remembered(callback), "warnings": caught, "weights": end.weights}


class _End:
    """Collects whole weights where every strategy still has its process group."""

    def __init__(self, package: str) -> None:
        base = importlib.import_module(package).Callback
        self.weights: dict[str, Tensor] = {}

        def on_train_end(callback: Any, trainer: Any, pl_module: Any) -> None:
            self.weights = whole_weights(trainer.strategy.model or pl_module)

        self.callback = type("End", (base,), {"on_train_end": on_train_end})()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Clean name -> whole weight, on every rank; a collective.

    Args:
        model: Wrapped in any way.
    """
    summoned: Any = contextlib.nullcontext()
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        summoned = FullyShardedDataParallel.summon_full_params(model)
    with summoned:
        named = [(clean_name(name.removeprefix("module.")), p) for name, p in model.named_parameters()]
        return {name: full(parameter.detach()).clone() for name, parameter in named}


@dataclasses.dataclass
class Reference:
    """A training in one process, in float64.

    Attributes:
        layers: By step, layer -> norm.
        totals: By step.
        weights: Name -> weight at the end.
    """

    layers: list[dict[str, float]]
    totals: list[float]
    weights: dict[str, Tensor]

    def series(self) -> dict[str, list[float]]:
        """Layer -> norms by step."""
        return {layer: [step[layer] for step in self.layers] for layer in self.layers[0]}


def reference_run(
    kind: str = "mlp",
    *,
    num_steps: int = 3,
    num_ranks: int = 1,
    num_micro_batches: int = 1,
    learning_rate: float = LEARNING_RATE,
    granularity: Any = "block",
    norm_type: float = 2,
    total_limit: float = math.inf,
) -> Reference:
    """The norms of plain SGD on the data that a fit of `make_module` sees.

    Args:
        kind: "mlp" or "transformer".
        num_steps: Number of optimizer steps.
        num_ranks: Number of data-parallel ranks.
        num_micro_batches: Micro-batches accumulated in a step.
        learning_rate: Of SGD.
        granularity: What a layer is.
        norm_type: 2 or infinity.
        total_limit: What gradients are clipped to, all together; norms are those of before.
    """
    model: nn.Module = (make_mlp if kind == "mlp" else make_transformer)().double()
    result = Reference([], [], {})
    for step in range(num_steps):
        batches = expected_batches(kind, step, num_ranks=num_ranks, num_micro_batches=num_micro_batches)
        gradients = {f"model.{name}": gradient for name, gradient in reference_gradients(model, batches).items()}
        names = dict(zip(gradients, layer_names(list(gradients), granularity), strict=True))
        result.layers.append(reference.layer_norms(gradients, names.__getitem__, norm_type))
        result.totals.append(reference.total_norm(gradients, norm_type))
        gradients = clip(gradients, names.__getitem__, layer_limits={}, total_limit=total_limit).gradients
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if (gradient := gradients[f"model.{name}"]) is not None:
                    parameter -= learning_rate * gradient
    result.weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return result


def total_norm_of(optimizer: torch.optim.Optimizer) -> float:
    """The norm of all gradients that an optimizer holds now, as torch computes it.

    Args:
        optimizer: Its gradients are plain tensors.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


@contextlib.contextmanager
def our_warnings() -> Iterator[list[str]]:
    """Collect the package's warnings; all others stay what they are.

    Yields:
        The messages, complete when the block has ended.
    """
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        # Recording turns the filters' errors into records only for what is set to "always" here.
        warnings.filterwarnings("always", category=StabilizerWarning)
        yield messages
    for warning in caught:
        if issubclass(warning.category, StabilizerWarning):
            messages.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
