"""One model under every strategy, trained by hand for a step: what the tests of the core share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stabilizer.names import clean_name
from tests import sharding
from tests.models import loss_of, make_transformer, token_batch

__all__ = ["CASES", "Case", "backward", "no_sync", "spread", "sum_by_hand", "whole_gradients"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy on so many ranks, and over how many of them the data is split."""

    strategy: str
    world_size: int
    num_data_ranks: int


CASES = {
    case.strategy: case
    for case in (
        Case("single", 1, 1),
        Case("ddp", 2, 2),
        Case("fsdp1", 2, 2),
        Case("fsdp1_no_shard", 2, 2),
        Case("fsdp1_hybrid", 4, 4),
        Case("fsdp2", 2, 2),
        Case("hsdp", 4, 4),
        Case("tp", 2, 1),
        Case("sp", 2, 1),
        Case("fsdp2_tp", 4, 2),
        Case("ddp_tp", 4, 2),
    )
}


def spread(strategy: str, rank: int, **options: Any) -> tuple[nn.Module, int]:
    """An initialised transformer under a strategy.

    Args:
        strategy: A key of CASES.
        rank: This rank.
        **options: Of `make_transformer`.

    Returns:
        The model as it trains and this rank's number among the data-parallel ranks.
    """
    model = make_transformer(**options)
    if strategy == "single":
        return model, 0
    if strategy == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=bool(options.get("unused"))), rank
    if strategy.startswith("fsdp1"):
        return sharding.shard_fsdp1(model, **_fsdp1_options(strategy)), rank
    if strategy == "fsdp2":
        return sharding.shard_fsdp2(model), rank
    if strategy == "hsdp":
        return sharding.shard_fsdp2(model, mesh=sharding.hsdp_mesh()), rank
    if strategy in ("tp", "sp"):
        parallel: Any = sharding.tensor_parallel if strategy == "tp" else sharding.sequence_parallel
        return parallel(model, mesh=sharding.mesh_1d(name="tensor")), 0
    mesh = sharding.mesh_2d(2, 2)
    if strategy == "fsdp2_tp":
        sharding.tensor_parallel(model, mesh=mesh["tensor"])
        return sharding.shard_fsdp2(model, mesh=mesh["data"]), mesh["data"].get_local_rank()
    if strategy == "ddp_tp":
        # Replicas of a tensor-parallel model whose gradients are averaged by hand: a mesh smaller than the world.
        sharding.tensor_parallel(model, mesh=mesh["tensor"])
        return model, mesh["data"].get_local_rank()
    raise ValueError(f"strategy={strategy!r} is none of {sorted(CASES)}")


def backward(model: nn.Module, strategy: str, data_rank: int, *, num_micro_batches: int = 1, step: int = 0) -> None:
    """Gradients of the loss averaged over micro-batches, synchronized with the last of them.

    Args:
        model: As `spread` gave it.
        strategy: A key of CASES.
        data_rank: As `spread` gave it.
        num_micro_batches: How many are accumulated.
        step: Of the data.
    """
    for micro_batch in range(num_micro_batches):
        is_last = micro_batch == num_micro_batches - 1
        with contextlib.nullcontext() if is_last else no_sync(model):
            loss = loss_of(model, token_batch(data_rank, step=step, micro_batch=micro_batch))
            (loss / num_micro_batches).backward()
    if strategy == "ddp_tp":
        sum_by_hand(model)


def sum_by_hand(model: nn.Module) -> None:
    """Average the gradients of "ddp_tp" over its replicas; a collective.

    Args:
        model: As `spread` gave it.
    """
    group = sharding.mesh_2d(2, 2)["data"].get_group()
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        local = getattr(parameter.grad, "_local_tensor", parameter.grad)
        torch.distributed.all_reduce(local, group=group)
        local.div_(2)


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients as they are, gathered: name -> whole gradient; a collective.

    Args:
        model: As `spread` gave it, not under FSDP1.
    """
    names = {clean_name(name.removeprefix("module.")): p for name, p in model.named_parameters() if p.requires_grad}
    return {name: None if p.grad is None else sharding.full(p.grad).clone() for name, p in names.items()}


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    elif hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        yield


def _fsdp1_options(strategy: str) -> dict[str, Any]:
    from torch.distributed.fsdp import ShardingStrategy

    if strategy == "fsdp1_no_shard":
        return {"sharding_strategy": ShardingStrategy.NO_SHARD}
    if strategy == "fsdp1_hybrid":
        return {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": sharding.hsdp_mesh()}
    return {}
