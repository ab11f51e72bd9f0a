"""Loops with planted faults, for tests of GradLocCallback."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from stabilizer.callbacks import GradLocCallback, attach
from stabilizer.names import clean_name
from tests.models import VOCABULARY, TinyTransformer
from tests.sharding import full

__all__ = ["Fault", "Plan", "Seen", "Unit", "batches", "grad_loc", "loss_of_tokens", "run", "wrap", "written"]

#: Rank, micro-batch, row, position.
Unit = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is planted in one step.

    Attributes:
        step: Which.
        bad: Tokens whose loss term is multiplied.
        factor: By what.
    """

    step: int
    bad: tuple[Unit, ...]
    factor: float = 3000.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run: what is trained on, and what is planted.

    Attributes:
        strategy: "single", "ddp", "fsdp1", "fsdp2" or "hsdp".
        steps: Length of the run.
        faulty: The step with the fault.
        bad: Tokens whose loss term is multiplied by `factor` in that step.
        factor: NaN plants a loss that is not finite.
        micro_batches: In a step.
        rows: In a micro-batch.
        length: Of a row.
        syncs: Whether gradients are reduced after every micro-batch.
        faults: Of several steps, instead of the one.
    """

    strategy: str = "single"
    steps: int = 40
    faulty: int = 36
    bad: tuple[Unit, ...] = ((0, 2, 1, 7),)
    factor: float = 3000.0
    micro_batches: int = 4
    rows: int = 4
    length: int = 16
    syncs: bool = False
    faults: tuple[Fault, ...] = ()

    def fault_of(self, step: int) -> Fault | None:
        """What is planted in a step.

        Args:
            step: Which.
        """
        faults = self.faults or (Fault(self.faulty, self.bad, self.factor),)
        return next((fault for fault in faults if fault.step == step), None)


@dataclasses.dataclass
class Seen:
    """What an optimizer has seen in some steps, whole: name -> tensor, or `None` where there was no gradient.

    Attributes:
        steps: Which.
        parameters: Before the update, by step.
        gradients: What it was given, by step.
        after: Parameters after the update.
    """

    steps: Sequence[int]
    parameters: dict[int, dict[str, Tensor]] = dataclasses.field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor | None]] = dataclasses.field(default_factory=dict)
    after: dict[int, dict[str, Tensor]] = dataclasses.field(default_factory=dict)


def grad_loc(folder: Path | str, **options: Any) -> GradLocCallback:
    """One that is soon warm.

    Args:
        folder: For incidents.
        **options: Of the callback.
    """
    defaults: dict[str, Any] = {
        "warmup_steps": 20,
        "rule": {"name": "robust_log", "warmup_steps": 20},
        "tap": "lm_head",
        "dump_dir": str(folder),
        "strict": True,
    }
    return GradLocCallback(**{**defaults, **options})


def loss_of_tokens(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mean over the tokens of a micro-batch, each weighted.

    Args:
        model: Gives logits.
        batch: Tokens, targets and weights, each (rows, length).
    """
    tokens, targets, weights = batch
    logits = model(tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    # A weight that is not finite is one token's own: a product would be NaN for it alone.
    return (losses * weights).mean()


def batches(plan: Plan, rank: int) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """The micro-batches of every step on a rank.

    Args:
        plan: Of the run.
        rank: Whose.
    """
    shape = (plan.rows, plan.length)
    for step in range(plan.steps):
        rows = []
        for number in range(plan.micro_batches):
            generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * number + rank)
            tokens = torch.randint(VOCABULARY, shape, generator=generator)
            targets = torch.randint(VOCABULARY, shape, generator=generator)
            weights = torch.ones(shape)
            fault = plan.fault_of(step)
            for bad_rank, micro_batch, row, position in () if fault is None else fault.bad:
                if fault is not None and (bad_rank, micro_batch) == (rank, number):
                    weights[row, position] = fault.factor
            rows.append((tokens, targets, weights))
        yield rows


def wrap(model: nn.Module, strategy: str) -> nn.Module:
    """Put a TinyTransformer under a strategy.

    Args:
        model: The same on every rank.
        strategy: As of `Plan`.
    """
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy == "fsdp1":
        device = torch.device("cpu")
        for number, block in enumerate(model.layers):  # type: ignore[union-attr,arg-type]
            model.layers[number] = FullyShardedDataParallel(block, device_id=device, use_orig_params=True)  # type: ignore[union-attr,index]
        return FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
    if strategy in ("fsdp2", "hsdp"):
        world = dist.get_world_size()
        shape, names = ((2, world // 2), ("replica", "shard")) if strategy == "hsdp" else ((world,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def written(folder: Path | str) -> dict[int, dict[str, Any]]:
    """The incidents of a folder, as any reader of JSON finds them, by step.

    Args:
        folder: As of `grad_loc`.
    """
    found = [json.loads(path.read_text()) for path in Path(folder).rglob("*.json")]
    return {incident["step"]: incident for incident in found}


def run(
    plan: Plan,
    callbacks: Sequence[Any],
    *,
    rank: int = 0,
    make_model: Callable[[], nn.Module] = TinyTransformer,
    make_batches: Callable[[Plan, int], Iterator[list[Any]]] = batches,
    loss_fn: Callable[[nn.Module, Any], Tensor] = loss_of_tokens,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    on_step: Callable[[int, nn.Module], None] | None = None,
    seen: Seen | None = None,
    tells_loss: bool = False,
    log: Callable[[dict[str, float], int], None] = lambda values, step: None,
) -> nn.Module:
    """Train in a plain loop with an accumulation that tells its batches.

    Args:
        plan: Of the run.
        callbacks: Ours; none trains without.
        rank: This process.
        make_model: Makes the same model on every rank.
        make_batches: Gives the micro-batches of every step on a rank.
        loss_fn: See `attach`; it is divided by the number of micro-batches.
        make_optimizer: Makes the optimizer.
        on_step: Called before every optimizer step, with complete gradients.
        seen: Takes what the optimizer is given.
        tells_loss: Whether the loop records its losses.
        log: Takes what is logged.

    Returns:
        The trained model, wrapped.
    """
    torch.manual_seed(0)
    model = wrap(make_model(), plan.strategy)
    optimizer = make_optimizer(model.parameters(), lr=1e-3)

    def divided(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) / plan.micro_batches

    handle = (
        attach(None, model=model, optimizer=optimizer, callbacks=callbacks, loss_fn=divided, log=log)
        if callbacks
        else None
    )
    now = [0]
    if seen is not None:  # after ours
        optimizer.register_step_pre_hook(lambda *_: _note(seen, now[0], model))
    for step, rows in enumerate(make_batches(plan, rank)):
        now[0] = step
        for number, batch in enumerate(rows):
            if handle is not None:
                handle.record_batch(batch)
            is_last = number == len(rows) - 1
            with _set_sync(model, plan.syncs or is_last):
                loss = divided(model, batch)
                if handle is not None and tells_loss:
                    handle.record_loss(loss.detach() * plan.micro_batches)
                loss.backward()
        if on_step is not None:
            on_step(step, model)
        optimizer.step()
        if seen is not None and step in seen.steps:
            seen.after[step] = {name: value for name, (value, _) in _whole(model).items()}
        optimizer.zero_grad()
    if handle is not None:
        handle.close()
    return model


def _set_sync(model: nn.Module, syncs: bool) -> Any:
    """A context for one backward pass."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(syncs)
        return contextlib.nullcontext()
    if syncs or not hasattr(model, "no_sync"):
        return contextlib.nullcontext()
    return model.no_sync()  # type: ignore[operator]


def _note(seen: Seen, step: int, model: nn.Module) -> None:
    if step in seen.steps:
        whole = _whole(model)
        seen.parameters[step] = {name: value for name, (value, _) in whole.items()}
        seen.gradients[step] = {name: gradient for name, (_, gradient) in whole.items()}


def _whole(model: nn.Module) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Parameters and gradients, gathered: collective."""
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    gathered = (
        FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True)
        if is_fsdp1
        else contextlib.nullcontext()
    )
    with gathered, torch.no_grad():
        named: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        return {
            clean_name(name.removeprefix("module.")): (
                full(p).clone(),
                None if p.grad is None else full(p.grad).clone(),
            )
            for name, p in named.items()
        }
