"""Layouts beyond "the same on every rank": parameters that some ranks lack, sub-meshes, gathered units, failures."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from stabilizer import GradientStore, ParameterIndex, gradient_norms
from stabilizer.errors import StabilizerWarning
from stabilizer.norms import count_nonfinite, largest, norms, square_sums
from tests.counting import count_collectives
from tests.launcher import WorkerError, run_distributed
from tests.models import make_mlp
from tests.sharding import mesh_1d, mesh_2d, tensor_parallel

pytestmark = pytest.mark.norms
CPU = torch.device("cpu")


def _with_gradient(values: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def _experts(rank: int, *, ranks: list[int], groups: Any) -> ParameterIndex:
    """A dense gradient of norm 12 everywhere, and an expert's of 3 + position on some ranks."""
    model = nn.Module()
    model.dense = _with_gradient([12.0])
    if rank in ranks:
        model.register_parameter("expert", _with_gradient([3.0 + ranks.index(rank)]))
    return ParameterIndex(model, groups=groups)


def lacking_rank(rank: int, world_size: int, tell_all: bool) -> list[float]:
    """Rank 2 holds no expert; a comparison, an exact step and a quiet one."""
    group = dist.new_group([0, 1])
    groups = {"expert": group} if tell_all or rank < 2 else None
    store = GradientStore(_experts(rank, ranks=[0, 1], groups=groups), max_abs_every_n_steps=2)
    totals = []
    for step in range(4):
        measured = store.measure(step, compare=step > 1)
        totals.append(store.view().total_norm.item())
        assert measured.difference is None or measured.difference.item() == 0
    return totals


@pytest.mark.parametrize("tell_all", [True, False])
def test_a_rank_without_any_expert_enters_the_same_collectives(tell_all: bool) -> None:
    assert run_distributed(lacking_rank, tell_all, world_size=3) == [pytest.approx([13.0] * 4)] * 3


def replicated_experts(rank: int, world_size: int, kind: str) -> float:
    """Two groups of experts that hold the same."""
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    groups = {"expert": first if rank < 2 else second}
    names = "expert" if kind == "one name" else f"expert_{rank % 2}"
    model = nn.Module()
    model.dense = _with_gradient([12.0])
    model.register_parameter(names, _with_gradient([3.0 + rank % 2]))
    store = GradientStore(ParameterIndex(model, groups=groups))
    store.measure(0)
    return store.view().total_norm.item()


@pytest.mark.parametrize("kind", ["one name", "own names"])
def test_replicas_of_experts_count_once(kind: str) -> None:
    assert run_distributed(replicated_experts, kind, world_size=4) == pytest.approx([13.0] * 4)


def outside(rank: int, world_size: int) -> str:
    """Rank 2 holds an expert but is in no group."""
    groups = {"expert": dist.new_group([0, 1])}
    with pytest.raises(ValueError, match="groups: 'expert'") as error:
        GradientStore(_experts(rank, ranks=[0, 1, 2], groups=groups))
    return str(error.value)


def test_a_holder_outside_its_group_is_an_error_on_all_ranks() -> None:
    messages = run_distributed(outside, world_size=3)
    assert len(set(messages)) == 1
    assert "rank 2 holds 'expert' but is no member of the group that it was given" in messages[0]


def sub_mesh(rank: int, world_size: int, kind: str) -> float:
    """A DTensor on ranks 0 and 1 of three; 3 and 4 are its gradient's elements, or the parts of its first element."""
    mesh = DeviceMesh("cpu", [0, 1])
    placement = Shard(0) if kind == "shard" else Replicate()
    local = torch.zeros(0 if rank == 2 else 1 if kind == "shard" else 2)
    shape: dict[str, Any] = {"shape": torch.Size([2]), "stride": (1,)}
    parameter = nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False, **shape))
    values = [torch.tensor([3.0]), torch.tensor([4.0])][rank % 2] if kind == "shard" else torch.tensor([3.0, 4.0])
    gradient: Any = [placement]
    if kind == "partial":
        gradient, values = [Partial()], values * [0.25, 0.75][rank % 2]
    if kind == "complex":
        parameter = nn.Parameter(
            DTensor.from_local(local.to(torch.complex64), mesh, [placement], run_check=False, **shape)
        )
        gradient, values = [Partial()], torch.tensor([1 + 1j, 0j] if rank == 0 else [2 + 3j, 0j])
    if rank < 2:
        parameter.grad = DTensor.from_local(values, mesh, gradient, run_check=False, **shape)
    return gradient_norms([parameter]).total_norm.item()


@pytest.mark.parametrize("kind", ["shard", "replicate", "partial", "complex"])
def test_a_mesh_may_be_smaller_than_the_world(kind: str) -> None:
    assert run_distributed(sub_mesh, kind, world_size=3) == pytest.approx([5.0] * 3)


def set_up_collectives(rank: int, world_size: int) -> int:
    """Collectives of making a store of equal plain parameters."""
    index = ParameterIndex([_with_gradient([1.0])])
    GradientStore(index)  # makes the process group
    with count_collectives() as calls:
        GradientStore(index)
    return len(calls)


def test_the_usual_set_up_costs_one_collective() -> None:
    assert run_distributed(set_up_collectives) == [1, 1]


def failing(rank: int, world_size: int, where: str) -> list[Any]:
    """One local part raises on rank 1, beside a Partial gradient and a plain one."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Partial("avg")])
    store = GradientStore(ParameterIndex([parameter, _with_gradient([12.0])]))

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    totals = []
    for step in range(2):
        if step == 1 and rank == 1:
            if where == "local":
                store.index.local = broken  # type: ignore[method-assign]
            elif where == "summand":
                store._measurer._partial._summand = broken  # type: ignore[method-assign]
            else:
                store._measurer._compared_norms = broken  # type: ignore[method-assign]
        store.measure(step, compare=True)
        totals.append(store.view().total_norm.item())
    return [totals, str(store.failure)]


@pytest.mark.parametrize("where", ["local", "summand", "compared"])
def test_a_rank_that_fails_still_takes_part(where: str) -> None:
    results = run_distributed(failing, where)
    for rank, (totals, failure) in enumerate(results):
        assert totals[0] == pytest.approx(13.0)
        assert where == "compared" or math.isnan(totals[1])
        assert failure == ("out of memory" if rank == 1 else "None")


def unsupported(rank: int, world_size: int, late: bool) -> tuple[list[float], list[str]]:
    """A gradient that is Partial("max"), from the first step or later, beside an average that becomes a sum."""
    mesh = init_device_mesh("cpu", (2,))
    parameters = [nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()])) for _ in range(2)]
    totals: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            kinds = ["max" if step or not late else "sum", "avg" if step < 3 else "sum"]
            for parameter, kind in zip(parameters, kinds, strict=True):
                parameter.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Partial(kind)])
            if step == 0:
                store = GradientStore(ParameterIndex(parameters))
            if step == 2:
                store.replan()
            store.measure(step)
            totals.append(store.view().total_norm.item())
        assert not store.needs_replan
    return totals, [str(w.message) for w in caught if issubclass(w.category, StabilizerWarning)]


@pytest.mark.parametrize("late", [False, True])
def test_a_partial_maximum_is_left_out_and_said_once(late: bool) -> None:
    for rank, (totals, messages) in enumerate(run_distributed(unsupported, late)):
        assert totals[1:] == pytest.approx([5.0, 5.0, 10.0])
        said = [message for message in messages if "Partial('max')" in message]
        assert len(said) == (rank == 0)
        assert all("['0']" in message for message in said)


def test_plain_leaf_tensors_are_measured() -> None:
    first, second = (torch.zeros(1, requires_grad=True) for _ in range(2))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert ParameterIndex([first, second, first]).names == ("0", "1")
    assert gradient_norms([first, second]).total_norm == 5


def test_pairs_of_names_and_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"element 0 is a tuple, no tensor"):
        ParameterIndex(nn.Linear(2, 1).named_parameters())  # type: ignore[arg-type]


def unsharded(rank: int, world_size: int, kind: str) -> tuple[list[float], tuple[str, ...], bool]:
    """The norm of FSDP2 units that are gathered at the moment, and two training steps after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    alone.load_state_dict(model.state_dict())
    # A root keeps its own parameters gathered after a forward pass.
    for module in (*model, model) if kind == "after backward" else (model,):
        fully_shard(module, mesh=mesh_1d())
    if kind == "after backward":
        model.set_reshard_after_backward(False)  # type: ignore[operator]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    totals: list[float] = []
    for _ in range(2):
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            m(torch.ones(3, 4)).square().sum().backward()
            if m is model:
                if kind != "after backward":
                    with torch.no_grad():
                        model(torch.ones(3, 4))
                if kind == "stuck":
                    model.reshard = list  # type: ignore[assignment]
                index = ParameterIndex(model, parameters=optimizer.param_groups[0]["params"])
                store = GradientStore(index)
                store.measure(0)
                totals.append(store.view().total_norm.item())
            else:
                totals.append(norms([p.grad for p in m.parameters()], device=CPU).norm().item())
            optimizer.step()
    return totals, index.names, all(isinstance(p, DTensor) for p in index.parameters)


@pytest.mark.parametrize("kind", ["after eval", "after backward"])
def test_gathered_fsdp2_units_are_measured_by_their_shards(kind: str) -> None:
    for totals, names, are_shards in run_distributed(unsharded, kind):
        assert names == ("0.weight", "0.bias", "1.weight", "1.bias")
        assert are_shards
        assert totals[0::2] == pytest.approx(totals[1::2], rel=1e-5)


def test_fsdp2_units_that_stay_gathered_are_one_clear_error() -> None:
    with pytest.raises(WorkerError, match=r"parameters \['0.weight', .* call reshard\(\) on every FSDPModule"):
        run_distributed(unsharded, "stuck")


def test_complex_gradients_count_with_both_parts() -> None:
    tensors = [torch.tensor([3 + 4j, 0j]), torch.tensor([complex(math.nan, 1)]), torch.tensor([3 + 4j]).conj()]
    assert norms(tensors, device=CPU)[[0, 2]].tolist() == [5, 5]
    assert square_sums(tensors, device=CPU)[[0, 2]].tolist() == [25, 25]
    assert largest(tensors, device=CPU).tolist() == [5, math.inf, 5]
    assert count_nonfinite(tensors, device=CPU).tolist() == [0, 1, 0]


def fsdp1_over_tensor_parallel(rank: int, world_size: int, use_orig_params: bool) -> tuple[float, float]:
    """The norm under FSDP1 x TP and that of the same model alone."""
    model, alone, mesh = make_mlp(), make_mlp(), mesh_2d(2, 2)
    tensor_parallel(model, mesh=mesh["tensor"])
    wrapped = FullyShardedDataParallel(
        model, device_mesh=mesh["data"], use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    for one in (wrapped, alone):
        one(torch.ones(3, 4)).square().sum().backward()
    expected = norms([parameter.grad for parameter in alone.parameters()], device=CPU).norm().item()
    return gradient_norms(wrapped).total_norm.item(), expected


def test_fsdp1_over_tensor_parallel_counts_every_element_once() -> None:
    for total, expected in run_distributed(fsdp1_over_tensor_parallel, True, world_size=4):
        assert total == pytest.approx(expected, rel=1e-5)


def test_fsdp1_over_tensor_parallel_without_original_parameters_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"cuts into \[1, 2\] pieces in one flat.*use_orig_params=True"):
        run_distributed(fsdp1_over_tensor_parallel, False, world_size=4)


def test_only_copies_to_a_device_are_left_unwaited(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    original = torch.Tensor.to

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device):
            seen.append((args[0].type, kwargs.get("non_blocking", False)))
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", spy)
    with FakeTensorMode():
        norms([torch.ones(3, device="meta")], device=CPU)
        norms([torch.ones(3)], device=torch.device("meta"))
    assert seen == [("cpu", False), ("meta", True)]
