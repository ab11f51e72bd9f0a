"""Gradients that become Partial after the first step, and parameters that live on some ranks only."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from stabilizer import GradientStore, ParameterIndex, gradient_norms
from stabilizer.callbacks import GradNormCallback
from stabilizer.callbacks.suite import Suite
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed

pytestmark = pytest.mark.norms


def _parameter(mesh: Any, values: list[float]) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.tensor(values), mesh, [Replicate()]))


def sums(rank: int, world_size: int, kind: str) -> float:
    """Locals (1, 3) and (2, 1) of one gradient."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = _parameter(mesh, [0.0, 0.0])
    local = torch.tensor([[1.0, 3.0], [2.0, 1.0]][rank])
    parameter.grad = DTensor.from_local(local, mesh, [Partial(kind)])
    before = local.clone()
    total = gradient_norms([parameter]).total_norm.item()
    assert torch.equal(local, before)
    return total


@pytest.mark.parametrize(("kind", "expected"), [("sum", 5.0), ("avg", 2.5)])
def test_the_norm_of_a_partial_gradient_is_that_of_the_sum(kind: str, expected: float) -> None:
    assert run_distributed(sums, kind) == [expected, expected]


def misspelt(rank: int, world_size: int) -> str:
    """An expression that nothing matches."""
    index = ParameterIndex(nn.Linear(2, 1), groups={"exprets": dist.group.WORLD})
    with pytest.raises(ValueError, match="groups: 'exprets' is found in no parameter's name") as error:
        GradientStore(index)
    return str(error.value)


def test_a_group_that_matches_nothing_is_an_error() -> None:
    first, second = run_distributed(misspelt)
    assert first == second


class NoSink:
    """Logs nothing."""

    is_logging = False


def late(rank: int, world_size: int) -> tuple[list[float], list[str]]:
    """A gradient that is whole at first and Partial from step 3 on; rank 1 has none at step 6."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = _parameter(mesh, [0.0, 0.0])
    model = nn.ParameterList([parameter])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    suite = Suite([GradNormCallback()], model=model, optimizer=optimizer, sink=NoSink())  # type: ignore[arg-type]
    totals = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(18):
            if step < 3:
                parameter.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Replicate()])
            else:
                parameter.grad = DTensor.from_local(torch.tensor([[1.0, 3.0], [2.0, 1.0]][rank]), mesh, [Partial()])
            if step == 12 and rank == 1:
                parameter.grad = None
            suite.run()
            total = suite.callbacks[0].norm_history().totals[-1]  # type: ignore[attr-defined]
            totals.append(total.item())
            suite.finish()
    return totals, [str(w.message) for w in caught if issubclass(w.category, StabilizerWarning)]


def test_all_ranks_plan_again_when_a_gradient_becomes_partial() -> None:
    for rank, (totals, messages) in enumerate(run_distributed(late)):
        assert totals[:3] == [5, 5, 5]
        # The wish travels at step 4 and is read at step 8; until then the gradient is left out, and that is said.
        assert totals[3:8] == [0] * 5
        assert totals[8:12] + totals[13:] == [5.0] * 9
        assert totals[12] == pytest.approx(math.sqrt(10))
        assert len(messages) == (rank == 0)
        assert all("have become Partial sums after the first step" in message for message in messages)


def experts(rank: int, world_size: int, announce: bool, same_names: bool) -> tuple[float, tuple[str, ...], list[float]]:
    """A shared layer and one expert a rank, whose gradient is ten times larger on rank 1."""
    model = nn.Module()
    model.dense = nn.Parameter(torch.zeros(2))
    model.dense.grad = torch.tensor([3.0, 4.0])
    expert = nn.Parameter(torch.zeros(1))
    expert.grad = torch.tensor([10.0**rank])
    model.register_parameter("expert" if same_names else f"expert_{rank}", expert)
    index = ParameterIndex(model, groups={"expert": dist.group.WORLD} if announce else None)
    store = GradientStore(index)
    store.measure(step=0)
    view = store.view()
    return view.total_norm.item(), view.layer_names, view.norms.tolist()


@pytest.mark.parametrize("same_names", [True, False])
def test_experts_on_some_ranks_are_counted_once(same_names: bool) -> None:
    for total, names, norms in run_distributed(experts, True, same_names):
        assert total == pytest.approx(math.sqrt(25 + 1 + 100))
        expected = {"dense": 5, "expert": math.sqrt(101)} if same_names else {"dense": 5, "expert_0": 1, "expert_1": 10}
        assert dict(zip(names, norms, strict=True)) == pytest.approx(expected)


def refused(rank: int, world_size: int) -> str:
    """The error that each rank gets."""
    with pytest.raises(ValueError, match="groups=") as error:
        experts(rank, world_size, announce=False, same_names=False)
    return str(error.value)


def test_experts_that_nobody_announced_are_an_error_on_all_ranks() -> None:
    first, second = run_distributed(refused)
    assert first == second
    assert "parameter 'expert_0' is not the same on all 2 ranks (held by ranks [0]" in first
