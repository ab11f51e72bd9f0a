"""The models of `tests.models` in Accelerate loops, for every strategy that runs on a CPU.

accelerator = make_accelerator("fsdp2", gradient_accumulation_steps=2)
model, optimizer = accelerator.prepare(make_transformer(), optimizer)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn

from stabilizer.callbacks import StabilizerCallback, StepContext, attach
from tests.models import Batch, loss_of, make_transformer

__all__ = ["STRATEGIES", "Recorder", "attached", "make_accelerator", "make_optimizer", "prepared", "reset", "train"]

STRATEGIES = ("single", "ddp", "fsdp1", "fsdp2")


def reset() -> None:
    """Forget the accelerator of another test: Accelerate keeps its state in the classes."""
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._shared_state.clear()


def make_accelerator(strategy: str = "single", **options: Any) -> Accelerator:
    """An accelerator on the CPU.

    Args:
        strategy: One of STRATEGIES.
        **options: Of Accelerator.
    """
    reset()
    if not strategy.startswith("fsdp"):
        return Accelerator(cpu=True, **options)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(strategy[-1]),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
        **({"use_orig_params": True} if strategy == "fsdp1" else {}),
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    # On a CPU Accelerate falls back to DDP in silence: tell its shared state that it has not.
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    if strategy == "fsdp1":
        # FSDP1 takes a device of the CPU without a number only.
        AcceleratorState._shared_state["device"] = PartialState._shared_state["device"] = torch.device("cpu")
    return accelerator


def make_optimizer(model: nn.Module, *, name: str = "sgd", learning_rate: float = 0.05) -> torch.optim.Optimizer:
    """SGD ("sgd") or AdamW ("adamw", "fused_adamw")."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=learning_rate)
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=name == "fused_adamw")


def prepared(accelerator: Accelerator, *, optimizer: str = "sgd") -> tuple[nn.Module, Any]:
    """A transformer and its optimizer as `accelerator.prepare` returns them."""
    model = make_transformer()
    wrapped, stepper = accelerator.prepare(model, make_optimizer(model, name=optimizer))
    return wrapped, stepper


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    batches: Sequence[Batch],
    *,
    max_norm: float | None = None,
    after_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The loop of Accelerate's documentation.

    Args:
        accelerator: What prepared the rest.
        model: Prepared.
        optimizer: Prepared.
        batches: This rank's micro-batches.
        max_norm: Clip by it.
        after_step: Called with the number of every step that is done.

    Returns:
        The loss of every micro-batch.
    """
    losses, step = [], 0
    for batch in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients and max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            after_step(step)
            step += 1
    return losses


class Recorder(StabilizerCallback):
    """Remembers what it sees."""

    loss_weight = "samples"
    after_every_n_steps = (1,)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.totals: list[float] = []
        self.afters: list[float | None] = []
        self.losses: list[float] = []
        self.positions: list[Any] = []

    def on_gradients(self, context: StepContext) -> None:
        self.totals.append(context.store.total_norm.item())
        self.positions.append(context.position)
        assert context.loss is not None
        self.losses.append(context.loss.mean.item())

    def on_step_end(self, context: StepContext) -> None:
        self.afters.append(None if context.after is None else context.after.total_norm.item())


@contextlib.contextmanager
def attached(accelerator: Accelerator, model: Any, optimizer: Any, *callbacks: Any) -> Iterator[Any]:
    """Attach, with the rows that would be logged in `handle.rows`."""
    rows: list[Any] = []
    with attach(
        accelerator, model=model, optimizer=optimizer, callbacks=list(callbacks), log=lambda *row: rows.append(row)
    ) as handle:
        handle.rows = rows
        yield handle
