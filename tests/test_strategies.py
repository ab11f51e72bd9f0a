"""Norms by layer and in total, under every strategy, against a float64 reference in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer import GradientStore, ParameterIndex
from stabilizer.names import layer_names
from tests import reference
from tests.launcher import run_distributed
from tests.models import make_transformer, reference_gradients, token_batch
from tests.spread import CASES, backward, spread, whole_gradients

pytestmark = pytest.mark.norms

TOLERANCE = 1e-5


def measure(
    rank: int, world_size: int, strategy: str, options: dict[str, Any], num_micro_batches: int = 1, steps: int = 2
) -> dict[str, Any]:
    """A few steps of a store under a strategy; what the last one measured."""
    model, data_rank = spread(strategy, rank, **options)
    store = None
    for step in range(steps):
        model.zero_grad()
        backward(model, strategy, data_rank, num_micro_batches=num_micro_batches, step=step)
        if store is None:
            store = GradientStore(
                ParameterIndex(model),
                granularities=("block", "module", "parameter"),
                norm_types=(2, "inf"),
                max_abs_every_n_steps=2,
            )
        before = _bits(model)
        store.measure(step=step)
        assert all(map(torch.equal, before, _bits(model))), "measuring changed a gradient"
    assert store is not None
    result: dict[str, Any] = {}
    for granularity in ("block", "module", "parameter"):
        for norm_type in (2, "inf"):
            view = store.view(granularity, norm_type)
            assert not view.nonfinite.any()
            result[f"{granularity} {norm_type}"] = (view.layer_names, view.norms.tolist(), view.total_norm.item())
    if not strategy.startswith("fsdp1"):
        result["gradients"] = whole_gradients(model)
    return result


def _bits(model: nn.Module) -> list[Tensor]:
    local = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None]
    local = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in local]
    return [tensor.detach().clone().view(torch.uint8) for tensor in local]


def _oracle(gradients: dict[str, Tensor | None], granularity: Any, norm_type: float) -> tuple[dict[str, float], float]:
    names = list(gradients)
    layers = dict(zip(names, layer_names(names, granularity), strict=True))
    return (
        reference.layer_norms(gradients, layers.__getitem__, norm_type),
        reference.total_norm(gradients, norm_type),
    )


def _compare(results: list[dict[str, Any]], gradients: dict[str, Tensor | None], tolerance: float) -> None:
    for result in results:
        for granularity in ("block", "module", "parameter"):
            for norm_type in (2, "inf"):
                names, norms, total = result[f"{granularity} {norm_type}"]
                expected, expected_total = _oracle(gradients, granularity, float(norm_type))
                assert dict(zip(names, norms, strict=True)) == pytest.approx(expected, rel=tolerance, abs=1e-12)
                assert list(names) == list(expected), "layers are not in the model's order"
                assert total == pytest.approx(expected_total, rel=tolerance)
                assert type(total) is float
                assert (names, norms, total) == results[0][f"{granularity} {norm_type}"], "ranks disagree"


def _batches(case: Any, num_micro_batches: int = 1, step: int = 1) -> list[Any]:
    pairs = [(rank, micro) for rank in range(case.num_data_ranks) for micro in range(num_micro_batches)]
    return [token_batch(rank, step=step, micro_batch=micro) for rank, micro in pairs]


def _strategies(*names: str) -> list[Any]:
    columns = {"sp": "tp_sp", "fsdp1_no_shard": "fsdp1", "fsdp1_hybrid": "fsdp1", "ddp_tp": "tp"}
    return [
        pytest.param(
            name,
            marks=pytest.mark.covers(feature="gradient norms", strategy=columns.get(name, name), host="plain"),
        )
        for name in names
    ]


@pytest.mark.parametrize("strategy", _strategies(*CASES))
def test_norms_equal_a_single_process_reference(strategy: str) -> None:
    case = CASES[strategy]
    results = run_distributed(measure, strategy, {}, world_size=case.world_size)
    _compare(results, reference_gradients(make_transformer(), _batches(case)), TOLERANCE)


@pytest.mark.parametrize("num_micro_batches", [2, 4])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1", "fsdp2", "hsdp"])
def test_accumulation(strategy: str, num_micro_batches: int) -> None:
    case = CASES[strategy]
    results = run_distributed(measure, strategy, {}, num_micro_batches, world_size=case.world_size)
    _compare(results, reference_gradients(make_transformer(), _batches(case, num_micro_batches)), TOLERANCE)


MODELS = {"tied": {"tied": True}, "unused": {"unused": True}, "adapters": {"adapters": True}}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1", "fsdp2"])
def test_tied_unused_and_frozen_parameters(strategy: str, options: dict[str, Any]) -> None:
    if strategy == "fsdp1" and "adapters" in options:
        options = {**options}  # original parameters of one flat parameter may differ in requires_grad
    case = CASES[strategy]
    results = run_distributed(measure, strategy, options, world_size=case.world_size)
    _compare(results, reference_gradients(make_transformer(**options), _batches(case)), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "sp"])
def test_reduced_precision_is_accumulated_in_float32(strategy: str, dtype: torch.dtype) -> None:
    case = CASES[strategy]
    results = run_distributed(measure, strategy, {"dtype": dtype}, world_size=case.world_size)
    gradients = results[0]["gradients"]
    assert {g.dtype for g in gradients.values()} == {dtype}
    # The whole Partial gradient has one rounding to half precision more than its summands, which are what we add up.
    _compare(results, gradients, 5e-3 if strategy == "sp" else TOLERANCE)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_sparse_embedding_gradients(strategy: str) -> None:
    case = CASES[strategy]
    results = run_distributed(measure, strategy, {"sparse": True}, world_size=case.world_size)
    assert results[0]["gradients"]["embed_tokens.weight"].is_sparse
    _compare(results, reference_gradients(make_transformer(sparse=True), _batches(case)), TOLERANCE)


def plain_beside_sharded(rank: int, world_size: int) -> tuple[float, float]:
    """A sharded model and a plain parameter whose gradient every rank holds."""
    model, data_rank = spread("fsdp2", rank)
    backward(model, "fsdp2", data_rank)
    plain = nn.Parameter(torch.zeros(7))
    plain.grad = torch.arange(7.0)
    both = nn.Module()
    both.model, both.router = model, plain
    store = GradientStore(ParameterIndex(both))
    store.measure(step=0)
    view = store.view()
    return view.norms[view.layer_names.index("router")].item(), view.total_norm.item()


def test_dtensor_and_plain_parameters_together() -> None:
    gradients = reference_gradients(make_transformer(), _batches(CASES["fsdp2"], step=0))
    gradients["router"] = torch.arange(7.0)
    expected = (reference.total_norm({"router": gradients["router"]}), reference.total_norm(gradients))
    for result in run_distributed(plain_beside_sharded):
        assert result == pytest.approx(expected, rel=TOLERANCE)


def mixed_meshes(rank: int, world_size: int) -> float:
    """Parameters on a mesh of one axis and on one of two axes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    flat = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (1, 2))
    parameters = []
    for mesh, placements in ((flat, [Shard(0)]), (square, [Replicate(), Shard(0)]), (square, [Shard(0), Replicate()])):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, placements))
        parameter.grad = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, placements)
        parameters.append(parameter)
    store = GradientStore(ParameterIndex(parameters))
    store.measure(step=0)
    return store.view().total_norm.item()


def test_meshes_may_differ() -> None:
    assert run_distributed(mixed_meshes) == pytest.approx([math.sqrt(3 * 55)] * 2, rel=TOLERANCE)


def missing_elements(rank: int, world_size: int) -> list[float]:
    """Layers of which one rank owns nothing, and a gradient that one rank does not have."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 1, bias=False), nn.Linear(1, 3, bias=False))
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    for module in (*model, model):
        fully_shard(module, mesh=__import__("tests.sharding").sharding.mesh_1d())
    model(torch.ones(1, 8)).sum().backward()
    if rank == 1:
        assert model[0].weight.grad.to_local().numel() == 0
        model[0].weight.grad = None
    values = []
    for norm_type in (2, "inf"):
        store = GradientStore(ParameterIndex(model), norm_types=(norm_type,))
        store.measure(step=0)
        values += store.view("block", norm_type).norms.tolist()
    return values


def test_a_rank_without_elements_contributes_nothing() -> None:
    expected = [3 * math.sqrt(8), 8 * math.sqrt(3), 3.0, 8.0]
    for result in run_distributed(missing_elements):
        assert result == pytest.approx(expected, rel=TOLERANCE)
