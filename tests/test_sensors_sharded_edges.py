"""Local norms of sharded models: what cannot be measured, what comes late, and that training does not notice."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stabilizer.parameters import ParameterIndex
from stabilizer.sensors import Sensors
from tests import reference, sharding
from tests.launcher import run_distributed
from tests.models import initialise_, loss_of, make_mlp, mlp_batch, reference_gradients, token_batch
from tests.spread import spread
from tests.test_sensors_sharded import sync

pytestmark = pytest.mark.norms


def partial_sums(rank: int, world_size: int) -> tuple[str | None, bool, int]:
    """Norms' weights under sequence parallelism: the reason, whether all gradients are there, hooks left."""
    model, data_rank = spread("sp", rank)
    sensors = Sensors(model, ParameterIndex(model))
    sensors.start()
    assert sensors.reason is None
    loss_of(model, token_batch(data_rank)).backward()
    assert sensors.take() is None
    return sensors.reason, all(p.grad is not None for p in model.parameters()), _num_hooks(model)


def test_summands_of_a_gradient_have_no_norm() -> None:
    for reason, is_trained, num_hooks in run_distributed(partial_sums):
        assert reason is not None
        assert "norm.weight' is Partial(sum): each tensor-parallel rank holds a summand" in reason
        assert is_trained
        assert num_hooks == 0


def flat_over_tensor_parallel(rank: int, world_size: int) -> tuple[str | None, int]:
    """FSDP1 x TP: the reason, and hooks after start."""
    model, mesh = make_mlp(), sharding.mesh_2d(2, 2)
    sharding.tensor_parallel(model, mesh=mesh["tensor"])
    options: dict[str, Any] = {"device_mesh": mesh["data"], "device_id": torch.device("cpu")}
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, **options)
    sensors = Sensors(wrapped, ParameterIndex(wrapped))
    sensors.start()
    assert sensors.take() is None
    return sensors.reason, _num_hooks(wrapped)


def test_fsdp1_over_tensor_parallel_is_told() -> None:
    for reason, num_hooks in run_distributed(flat_over_tensor_parallel, world_size=4):
        assert "one plain, flat tensor of tensor-parallel parameters" in str(reason)
        assert num_hooks == 0


def another_torch(rank: int, world_size: int) -> str | None:
    """FSDP2 without the attributes that we read."""
    model, _ = spread("fsdp2", rank)
    index = ParameterIndex(model)
    for unit in (unit for unit in model.modules() if isinstance(unit, FSDPModule)):
        del unit._get_fsdp_state()._fsdp_param_groups  # type: ignore[attr-defined]
    sensors = Sensors(model, index)
    sensors.start()
    return sensors.reason


def test_a_torch_with_other_insides_is_told() -> None:
    assert all("keeps FSDP's gathered" in str(reason) for reason in run_distributed(another_torch))


class Switched(nn.Module):
    """Two blocks, of which a forward pass uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x: Tensor, num_layers: int) -> Tensor:
        """The sum of the first blocks' outputs."""
        return torch.stack([layer(x) for layer in self.layers[:num_layers]]).sum()


def late_units(rank: int, world_size: int) -> tuple[list[bool], list[float], float, int]:
    """Which micro-batches are measured, the first and the last unit's squares at the end, hooks left."""
    model = Switched()
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=sharding.mesh_1d())
    sensors = Sensors(model, ParameterIndex(model))
    sensors.start()
    measured, squares = [], None
    for num_layers in (1, 1, 2, 2, 1):
        model(torch.full((1, 4), float(rank + 1)), num_layers).backward()
        squares = sensors.take()
        measured.append(squares is not None)
    assert squares is not None
    sensors.close()
    sensors.start()
    model(torch.full((1, 4), float(rank + 1)), 2).backward()
    again = sensors.take()
    assert again is not None
    sensors.close()
    return measured, squares.tolist(), again.sum().item(), _num_hooks(model)


def test_an_fsdp2_unit_is_measured_from_its_second_micro_batch() -> None:
    for rank, (measured, squares, again, num_hooks) in enumerate(run_distributed(late_units)):
        one = [4.0 * (rank + 1) ** 2, 1.0]
        assert measured == [False, True, False, True, True]
        assert squares == [*one, 0.0, 0.0]
        assert again == 2 * sum(one), "started again, nothing has to be waited for"
        assert num_hooks == 0


def trained(rank: int, world_size: int, strategy: str, with_sensors: bool) -> list[Tensor]:
    """Parameters after 20 steps of two micro-batches."""
    model, data_rank = spread(strategy, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    sensors = Sensors(model, ParameterIndex(model))
    if with_sensors:
        sensors.start()
    for step in range(20):
        for micro_batch in range(2):
            with sync(model, micro_batch == 1):
                loss_of(model, token_batch(data_rank, step=step, micro_batch=micro_batch)).backward()
            sensors.take()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "_local_tensor", p).detach().view(torch.uint8) for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_training_is_the_same_bit_for_bit(strategy: str) -> None:
    runs = [run_distributed(trained, strategy, with_sensors) for with_sensors in (True, False)]
    for one, other in zip(*runs, strict=True):
        assert len(one) > 20
        assert all(map(torch.equal, one, other))


def copies(rank: int, world_size: int, strategy: str) -> None:
    """Copies and files of models with hooks: nothing of ours in them, no warning; a gradient is used as it came."""
    model, data_rank = spread(strategy, rank)
    sensors = Sensors(model, ParameterIndex(model))
    sensors.start()
    for _ in range(2):
        loss_of(model, token_batch(data_rank)).backward()
        sensors.take()
    assert _num_hooks(model) > 20
    model.zero_grad()  # torch cannot copy a DTensor's gradient
    for parameter in model.parameters():
        copied = copy.deepcopy(parameter)
        assert not copied._backward_hooks
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    if strategy != "fsdp2":
        assert _num_hooks(copy.deepcopy(model)) == 0
        torch.save(dict(model.named_parameters()), file)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp"])
def test_copies_have_no_hooks(strategy: str) -> None:
    run_distributed(copies, strategy)


def _num_hooks(model: nn.Module) -> int:
    """Ours, wherever autograd's leaves are."""
    tensors = [*model.parameters()]
    for unit in (unit for unit in model.modules() if isinstance(unit, FSDPModule)):
        for group in unit._get_fsdp_state()._fsdp_param_groups:  # type: ignore[attr-defined]
            tensors += [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    tensors += [unit._handle.flat_param for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle]
    return sum(len(tensor._backward_hooks or ()) for tensor in tensors)


class Experts(nn.Module):
    """A layer that every rank has, and one expert a rank, as a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 1)
        mesh = sharding.mesh_1d(name="experts")
        self.experts = nn.Parameter(distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.shared(x).sum() + (self.experts.to_local() * x).sum()  # type: ignore[operator]


def experts(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    """Names and squares of the second micro-batch."""
    model = Experts()
    fully_shard(model.shared, mesh=sharding.mesh_1d())
    index = ParameterIndex(model)
    sensors = Sensors(model, index)
    sensors.start()
    squares = None
    for _ in range(2):
        model(torch.full((1, 4), float(rank + 1))).backward()
        squares = sensors.take()
    assert squares is not None
    return list(index.names), squares.tolist()


def test_ranks_with_experts_of_their_own_share_no_gradient() -> None:
    for rank, (names, squares) in enumerate(run_distributed(experts)):
        expected = {"experts": 4.0 * (rank + 1) ** 2, "shared.weight": 4.0 * (rank + 1) ** 2, "shared.bias": 1.0}
        assert dict(zip(names, squares, strict=True)) == expected


def odd_sizes(rank: int, world_size: int) -> dict[str, float]:
    """Squares under FSDP1 where it pads between parameters."""
    model = FullyShardedDataParallel(_odd(), device_id=torch.device("cpu"), use_orig_params=True)
    index = ParameterIndex(model)
    sensors = Sensors(model, index)
    sensors.start()
    model(torch.full((2, 3), float(rank + 1))).sum().backward()
    squares = sensors.take()
    assert squares is not None
    return dict(zip(index.names, squares.tolist(), strict=True))


def _odd() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3), nn.Linear(3, 5))
    initialise_(model)
    return model


def test_padding_in_a_flat_parameter_is_nobodys() -> None:
    for rank, squares in enumerate(run_distributed(odd_sizes)):
        model = _odd().double()
        model(torch.full((2, 3), float(rank + 1), dtype=torch.float64)).sum().backward()
        expected = reference.layer_norms({key: p.grad for key, p in model.named_parameters()}, lambda key: key)
        assert squares == pytest.approx({key: norm**2 for key, norm in expected.items()}, rel=1e-5)


def replicated_bias(rank: int, world_size: int) -> dict[str, float]:
    """Squares under plain tensor parallelism with a bias that all ranks hold as a DTensor."""
    model = sharding.tensor_parallel(make_mlp(), mesh=sharding.mesh_1d(name="tensor"))
    assert isinstance(model.second.bias, DTensor)
    index = ParameterIndex(model)
    sensors = Sensors(model, index)
    sensors.start()
    loss_of(model, mlp_batch()).backward()
    squares = sensors.take()
    assert squares is not None, sensors.reason
    return dict(zip(index.names, squares.tolist(), strict=True))


def test_what_a_tensor_parallel_group_holds_together_counts_once() -> None:
    results = run_distributed(replicated_bias)
    expected = reference.layer_norms(reference_gradients(make_mlp(), [mlp_batch()]), lambda key: key)
    total = {key: sum(squares[key] for squares in results) for key in expected}
    assert total == pytest.approx({key: norm**2 for key, norm in expected.items()}, rel=1e-5)
