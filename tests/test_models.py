"""The helpers of `tests.models` and `tests.sharding`: every strategy gives the gradients of one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests import sharding
from tests.launcher import run_distributed
from tests.models import Batch, loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients, token_batch


def _make(kind: str, **options: Any) -> nn.Module:
    return make_mlp() if kind == "mlp" else make_transformer(**options)


def _batch(kind: str, rank: int) -> Batch:
    return mlp_batch(rank) if kind == "mlp" else token_batch(rank)


def _spread(model: nn.Module, strategy: str, world_size: int) -> tuple[nn.Module, int]:
    """The model as it trains, and how many ranks share a batch."""
    if strategy == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=hasattr(model, "unused")), 1
    if strategy == "fsdp1":
        return sharding.shard_fsdp1(model), 1
    if strategy == "fsdp2":
        return sharding.shard_fsdp2(model), 1
    if strategy == "hsdp":
        return sharding.shard_fsdp2(model, mesh=sharding.hsdp_mesh()), 1
    if strategy == "tp":
        return sharding.tensor_parallel(model, mesh=sharding.mesh_1d(name="tensor")), world_size
    if strategy == "sp":
        return sharding.sequence_parallel(model, mesh=sharding.mesh_1d(name="tensor")), world_size
    mesh = sharding.mesh_2d(2, 2)
    parallel = sharding.sequence_parallel if strategy == "fsdp2_sp" else sharding.tensor_parallel
    return sharding.shard_fsdp2(parallel(model, mesh=mesh["tensor"]), mesh=mesh["data"]), 2


def _gradients(
    rank: int, world_size: int, strategy: str, kind: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor | None], dict[str, str]]:
    model, sharing = _spread(_make(kind, **options), strategy, world_size)
    loss_of(model, _batch(kind, rank // sharing)).backward()
    gradients: dict[str, Tensor | None] = {}
    placements: dict[str, str] = {}
    if strategy == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    gradients[_clean(name)] = None if parameter.grad is None else parameter.grad.clone()
        return gradients, placements
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            gradients[_clean(name)] = None if gradient is None else sharding.full(gradient)
            placements[_clean(name)] = repr(gradient.placements) if isinstance(gradient, DTensor) else "plain"
    return gradients, placements


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def _check(strategy: str, kind: str, world_size: int, **options: Any) -> dict[str, str]:
    answers = run_distributed(_gradients, strategy, kind, options, world_size=world_size)
    sharing = {"tp": world_size, "sp": world_size, "fsdp2_tp": 2, "fsdp2_sp": 2}.get(strategy, 1)
    batches = [_batch(kind, rank) for rank in range(world_size // sharing)]
    expected = reference_gradients(_make(kind, **options), batches)
    for gradients, _ in answers:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            want = expected[name]
            got = torch.zeros(()) if gradient is None else gradient.double()
            torch.testing.assert_close(
                got, torch.zeros_like(got) if want is None else want, rtol=1e-4, atol=1e-6, check_dtype=False, msg=name
            )
    placements: dict[str, str] = answers[0][1]
    return placements


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("tp", 2), ("hsdp", 4), ("fsdp2_tp", 4)],
)
def test_strategy_equals_one_process(strategy: str, world_size: int, kind: str) -> None:
    placements = _check(strategy, kind, world_size)
    assert not any("Partial" in placement for placement in placements.values())


def test_sequence_parallel_leaves_norm_gradients_partial() -> None:
    placements = _check("sp", "transformer", 2)
    partial = {name for name, placement in placements.items() if "Partial" in placement}
    assert partial == {name for name in placements if "norm" in name}


def test_sequence_parallel_under_fsdp2() -> None:
    _check("fsdp2_sp", "transformer", 4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("option", ["tied", "unused", "adapters"])
def test_options_under_data_parallel(strategy: str, option: str) -> None:
    _check(strategy, "transformer", 2, **{option: True})


def test_sparse_embedding_equals_dense() -> None:
    sparse = make_transformer(sparse=True)
    loss_of(sparse, token_batch()).backward()
    gradient = sparse.embed_tokens.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    expected = reference_gradients(make_transformer(), [token_batch()])["embed_tokens.weight"]
    assert expected is not None
    torch.testing.assert_close(gradient.to_dense().double(), expected, rtol=1e-4, atol=1e-6)
    assert reference_gradients(sparse, [token_batch()])["embed_tokens.weight"] is not None


def test_models_and_data_are_deterministic_and_ranks_differ() -> None:
    first, second = make_transformer(seed=1), make_transformer(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(make_transformer(seed=2).lm_head.weight, first.lm_head.weight)
    batches = [token_batch(rank, step=step, micro_batch=m)[0] for rank in (0, 1) for step in (0, 1) for m in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(batches) for b in batches[:i])
    assert torch.equal(token_batch(1, step=3)[0], token_batch(1, step=3)[0])
