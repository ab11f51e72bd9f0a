"""Field reports, area sharded-norm: how gradients can lie over the ranks, in plain loops."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from stabilizer import GradientStore, ParameterIndex, gradient_norms
from stabilizer.reduction import collective_device
from tests import reference
from tests.counting import count_collectives
from tests.field_reports.helpers import TOLERANCE, covers, norm_logger, our_warnings, remembered
from tests.launcher import run_distributed
from tests.lightning_models import make_trainer
from tests.lightning_variants import Plain
from tests.models import loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients, token_batch
from tests.sharding import mesh_1d, shard_fsdp1, shard_fsdp2

NORM_TYPES = (2, "inf")


def _plain_numbers(model: Any, **options: Any) -> tuple[dict[str, float], float]:
    result = gradient_norms(model, **options)
    assert type(result.norms) is Tensor
    assert type(result.total_norm) is Tensor
    return dict(zip(result.layer_names, result.norms.tolist(), strict=True)), result.total_norm.item()


def _both_ranks(num_data_ranks: int = 2) -> dict[str, Tensor | None]:
    return reference_gradients(make_mlp(), [mlp_batch(rank) for rank in range(num_data_ranks)])


def sharded_and_plain(rank: int, world_size: int) -> list[Any]:
    model = nn.Module()
    model.net, model.router = shard_fsdp2(make_mlp()), nn.Parameter(torch.zeros(7))
    loss_of(model.net, mlp_batch(rank)).backward()
    model.router.grad = torch.arange(7.0)
    return [_plain_numbers(model, norm_type=norm_type) for norm_type in NORM_TYPES]


@covers("fsdp2", "plain")
def test_B003_sharded_and_plain_parameters_count_once_each() -> None:
    gradients = {f"net.{name}": gradient for name, gradient in _both_ranks().items()}
    gradients["router"] = torch.arange(7.0)
    results = run_distributed(sharded_and_plain)
    assert results[0] == results[1]
    for (layers, total), norm_type in zip(results[0], NORM_TYPES, strict=True):
        assert total == pytest.approx(reference.total_norm(gradients, float(norm_type)), rel=TOLERANCE)
        assert layers["router"] == pytest.approx(91**0.5 if norm_type == 2 else 6)


def replicated_shards(rank: int, world_size: int, shape: tuple[int, int]) -> tuple[dict[str, float], float]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = shard_fsdp2(make_mlp(), mesh=mesh)
    loss_of(model, mlp_batch(0)).backward()
    return _plain_numbers(model, granularity="parameter")


@covers("hsdp", "plain")
def test_B018_the_number_of_replicas_does_not_matter() -> None:
    # Every rank has the same data: the gradient is that of one process for every shape of the mesh.
    gradients = _both_ranks(1)
    layers = reference.layer_norms(gradients, lambda name: name)
    for shape in ((2, 1), (1, 2), (2, 2), (4, 1)):
        for result in run_distributed(replicated_shards, shape, world_size=math.prod(shape)):
            assert result[0] == pytest.approx(layers, rel=TOLERANCE), shape
            assert result[1] == pytest.approx(reference.total_norm(gradients), rel=TOLERANCE), shape


def fsdp1_by_name(rank: int, world_size: int) -> dict[str, Any]:
    model = shard_fsdp1(make_mlp())
    store = None
    for step in range(2):
        model.zero_grad()
        loss_of(model, mlp_batch(rank, step=step)).backward()
        if store is None:
            store = GradientStore(ParameterIndex(model), granularities=("parameter",))
        with count_collectives() as calls:
            store.measure(step)
    assert store is not None
    view = store.view("parameter")
    return {
        "norms": dict(zip(view.layer_names, view.norms.tolist(), strict=True)),
        "calls": dict(calls.names),
        "num_bytes": sum(call.num_bytes for call in calls.calls),
    }


@covers("fsdp1", "plain")
def test_B056_norms_by_name_under_fsdp1_with_one_small_collective() -> None:
    gradients = reference_gradients(make_mlp(), [mlp_batch(rank, step=1) for rank in range(2)])
    for result in run_distributed(fsdp1_by_name):
        assert list(result["norms"]) == ["first.weight", "first.bias", "second.weight", "second.bias"]
        expected = reference.layer_norms(gradients, lambda name: name)
        assert result["norms"] == pytest.approx(expected, rel=TOLERANCE)
        assert result["calls"] == {"c10d.allreduce_.default": 1}
        assert 4 * 8 <= result["num_bytes"] <= (4 + 4) * 8, "one float64 a name, and a few for the step"


def collectives_under_fsdp2(rank: int, world_size: int) -> tuple[dict[str, int], int, int]:
    model = shard_fsdp2(make_transformer())
    loss_of(model, token_batch(rank)).backward()
    num_bytes = sum(p.grad.to_local().numel() * 4 for p in model.parameters())
    store = GradientStore(ParameterIndex(model), granularities=("block", "parameter"))
    with count_collectives() as calls:
        store.measure(0)
    return dict(calls.names), sum(call.num_bytes for call in calls.calls), num_bytes


@covers("fsdp2", "plain")
def test_B060_no_gradient_is_gathered() -> None:
    for calls, num_bytes, num_gradient_bytes in run_distributed(collectives_under_fsdp2):
        assert calls == {"c10d.allreduce_.default": 1}
        assert num_bytes < num_gradient_bytes / 50


class Experts(nn.Module):
    """A dense weight that all ranks share and one expert a rank, called the same or not.

    Args:
        rank: This rank.
        is_same_name: Whether all ranks call their expert the same.
    """

    def __init__(self, rank: int, *, is_same_name: bool = True) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(4))
        self.experts = nn.ParameterDict({"local" if is_same_name else f"expert{rank}": nn.Parameter(torch.zeros(3))})

    def forward(self, rank: int) -> Tensor:
        """Its gradients: (1, 2, 3, 4) for the dense weight, 1 or 10 for all of the expert."""
        [expert] = self.experts.values()
        return (self.dense * torch.arange(1.0, 5.0)).sum() + expert.sum() * (10 if rank else 1)


EXPERTS_TOTAL = math.sqrt(30 + 3 * 1 + 3 * 100)


def sharded_experts(rank: int, world_size: int, is_same_name: bool, with_groups: bool) -> Any:
    model = Experts(rank, is_same_name=is_same_name)
    fully_shard(model, mesh=mesh_1d(), ignored_params=set(model.experts.parameters()))
    model(rank).backward()
    groups = {r"^experts\.": dist.group.WORLD} if with_groups else None
    try:
        return _plain_numbers(model, groups=groups)[1]
    except ValueError as error:
        return str(error)


def unannounced_experts(rank: int, world_size: int) -> list[str]:
    model = Experts(rank, is_same_name=True)
    fully_shard(model, mesh=mesh_1d(), ignored_params=set(model.experts.parameters()))
    model(rank).backward()
    with our_warnings() as messages:
        gradient_norms(model)
    return messages


@pytest.mark.parametrize("is_same_name", [True, False])
def test_B064_experts_on_one_rank_each_count_once(is_same_name: bool) -> None:
    assert run_distributed(sharded_experts, is_same_name, True) == [pytest.approx(EXPERTS_TOTAL, rel=TOLERANCE)] * 2


def test_B064_experts_that_nobody_announced_are_an_error() -> None:
    first, second = run_distributed(sharded_experts, False, False)
    assert first == second
    assert "'experts.expert0' is not the same on all 2 ranks" in first
    assert "groups={pattern: process_group}" in first


def test_B064_experts_of_one_name_that_nobody_announced_are_not_averaged_in_silence() -> None:
    first, second = run_distributed(unannounced_experts)
    assert "cross-rank check" in first[0]
    assert "groups=" in first[0]
    assert second == [], "one rank speaks for all"


class ExpertModule(Plain):
    """Experts under DDP, which is told to leave them alone.

    Args:
        with_groups: Whether the package is told where they are.
    """

    def __init__(self, rank: int, *, with_groups: bool) -> None:
        super().__init__(Experts(rank), loss=lambda module, batch, number: module.model(rank))
        self._ddp_params_and_buffers_to_ignore = ["model.experts.local"]
        self.with_groups = with_groups

    def on_fit_start(self) -> None:
        """The process group exists now."""
        if self.with_groups:
            self.stabilizer_groups = {"experts": dist.group.WORLD}


def fit_experts(rank: int, world_size: int, with_groups: bool) -> dict[str, Any]:
    callback = norm_logger()
    module: pl.LightningModule = ExpertModule(rank, with_groups=with_groups)
    with our_warnings() as messages:
        make_trainer("ddp", devices=world_size, callbacks=[callback]).fit(module)
    return {**remembered(callback), "warnings": messages}


def test_B064_experts_in_lightning_are_announced_by_the_module() -> None:
    for result in run_distributed(fit_experts, True):
        assert result["totals"] == pytest.approx([EXPERTS_TOTAL] * 3, rel=TOLERANCE)
        assert result["warnings"] == []
    first, _ = run_distributed(fit_experts, False)
    [message] = first["warnings"]
    assert "gradients differ between ranks" in message
    assert "need groups=" in message


def two_meshes(rank: int, world_size: int) -> list[Any]:
    parameters = []
    for shape, placements in (((2,), [Shard(0)]), ((1, 2), [Replicate(), Shard(0)]), ((1, 2), [Shard(0), Replicate()])):
        mesh = init_device_mesh("cpu", shape)
        parameter = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, placements))
        parameter.grad = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, placements)
        parameters.append(parameter)
    return [_plain_numbers(parameters, norm_type=norm_type) for norm_type in NORM_TYPES]


def test_B067_parameters_may_lie_on_different_meshes() -> None:
    results = run_distributed(two_meshes)
    assert results[0] == results[1]
    (layers, total), (_, largest) = results[0]
    assert list(layers.values()) == pytest.approx([math.sqrt(55)] * 3, rel=TOLERANCE)
    assert total == pytest.approx(math.sqrt(3 * 55), rel=TOLERANCE)
    assert largest == 5


def sharded_and_unsharded_units(rank: int, world_size: int) -> tuple[dict[str, float], float]:
    model, options = make_mlp(), {"device_id": torch.device("cpu"), "use_orig_params": True}
    model.first = FullyShardedDataParallel(model.first, sharding_strategy=ShardingStrategy.FULL_SHARD, **options)
    model.second = FullyShardedDataParallel(model.second, sharding_strategy=ShardingStrategy.NO_SHARD, **options)
    whole = FullyShardedDataParallel(model, **options)
    loss_of(whole, mlp_batch(rank)).backward()
    return _plain_numbers(whole, granularity="parameter")


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning")
@covers("fsdp1", "plain")
def test_B111_unsharded_units_count_once() -> None:
    gradients = _both_ranks()
    for layers, total in run_distributed(sharded_and_unsharded_units):
        assert layers == pytest.approx(reference.layer_norms(gradients, lambda name: name), rel=TOLERANCE)
        assert total == pytest.approx(reference.total_norm(gradients), rel=TOLERANCE)


def test_B121_the_collective_is_where_the_group_has_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    cpu, cuda, nccl_only = (
        torch.device("cpu"),
        torch.device("cuda", 1),
        SimpleNamespace(_device_types=[torch.device("cuda")]),
    )
    assert collective_device(nccl_only, cpu) == torch.device("cuda", 3)
    assert collective_device(nccl_only, cuda) == cuda
    both = SimpleNamespace(_device_types=[cpu, torch.device("cuda")])
    assert collective_device(both, cpu) == cpu
    assert collective_device(SimpleNamespace(_device_types=[cpu]), cuda) == cpu


def partial_gradient(rank: int, world_size: int) -> float:
    mesh = mesh_1d()
    parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    local = torch.tensor([2.0, 1.0] if rank else [1.0, 3.0])
    parameter.grad = DTensor.from_local(local, mesh, [Partial()])
    total = gradient_norms([parameter]).total_norm.item()
    assert torch.equal(parameter.grad.to_local(), local), "the summand was changed"
    return total


def test_B125_a_partial_gradient_is_summed_before_its_norm_is_taken() -> None:
    assert run_distributed(partial_gradient) == [5.0, 5.0]


def largest_of_two_shards(rank: int, world_size: int) -> list[float]:
    mesh = mesh_1d()
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.tensor([1.0, 0.5, -7.5, 2.0]), mesh, [Shard(0)])
    return [gradient_norms([parameter], norm_type=kind).total_norm.item() for kind in (float("inf"), "inf")]


@pytest.mark.parametrize("world_size", [1, 2])
def test_B127_the_infinity_norm_is_the_largest_value_in_both_spellings(world_size: int) -> None:
    assert run_distributed(largest_of_two_shards, world_size=world_size) == [[7.5, 7.5]] * world_size
