"""The plan of a step: what proposals make together, and what is then done to gradients, once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer import GradientStore, ParameterIndex
from stabilizer.applying import apply_plan_, clip_values_
from stabilizer.plan import LayerPlan, StepPlan

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Elsewhere(Tensor):
    """A tensor on a CPU that says that it is on another device: what is done there does not look at values."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Not this one."""
        return torch.device("meta")


def plan_of(*norms: float, where: str = "cpu") -> StepPlan:
    """A plan for units of these norms."""
    squares = torch.tensor(norms, dtype=torch.float64).square()
    return StepPlan(squares if where == "cpu" else squares.as_subclass(Elsewhere))


def gradients_of(*norms: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Two elements each."""
    return [torch.tensor([0.6 * norm, -0.8 * norm], dtype=dtype) for norm in norms]


def norms_of(gradients: Sequence[Tensor]) -> list[float]:
    """In float64."""
    return [float(gradient.to(torch.float64).norm()) for gradient in gradients]


def apply_(plan: StepPlan, gradients: Sequence[Any], units: Sequence[int], **options: Any) -> None:
    """All that a plan says."""
    apply_plan_(plan, gradients, units)
    clip_values_(plan, gradients, units, **options)


on_both_ways = pytest.mark.parametrize("where", ["cpu", "elsewhere"])


@on_both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_coefficients_multiply_and_each_gradient_is_written_once(where: str, dtype: torch.dtype) -> None:
    plan, gradients = plan_of(4.0, 2.0, 1.0, where=where), gradients_of(4.0, 2.0, 1.0, dtype=dtype)
    plan.multiply(torch.tensor([0.5, 1.0, 1.0]))
    plan.multiply(torch.tensor([0.5, 0.25, 1.0]))
    versions = [gradient._version for gradient in gradients]
    bits = gradients[2].view(torch.uint8).clone()
    apply_(plan, gradients, [0, 1, 2])
    assert norms_of(gradients) == pytest.approx([1.0, 0.5, 1.0], rel=DTYPES[dtype])
    assert torch.equal(gradients[2].view(torch.uint8), bits)
    changes = [gradient._version - version for gradient, version in zip(gradients, versions, strict=True)]
    # Where values cannot be looked at, all are multiplied, some by 1.
    assert changes == ([1, 1, 0] if where == "cpu" else [1, 1, 1])


@on_both_ways
def test_layers_and_total_are_one_change(where: str) -> None:
    plan, gradients = plan_of(3.0, 4.0, where=where), gradients_of(3.0, 4.0)
    plan.multiply(torch.tensor([1.0, 0.75]))
    assert plan.squares_after.sum().sqrt().item() == pytest.approx(math.sqrt(18))
    plan.multiply_total(torch.tensor(0.5))
    assert not plan.is_uniform
    versions = [gradient._version for gradient in gradients]
    apply_(plan, gradients, [0, 1])
    assert norms_of(gradients) == pytest.approx([1.5, 1.5])
    assert [g._version - v for g, v in zip(gradients, versions, strict=True)] == [1, 1]
    assert plan.squares_after.sqrt().tolist() == pytest.approx([1.5, 1.5])


@on_both_ways
def test_a_total_alone(where: str) -> None:
    plan, gradients = plan_of(3.0, 4.0, where=where), gradients_of(3.0, 4.0)
    plan.multiply_total(torch.tensor(0.5))
    plan.multiply_total(torch.tensor(0.5))
    assert plan.is_uniform
    apply_(plan, [gradients[0], None, gradients[1]], [0, 1, 1])
    assert norms_of(gradients) == pytest.approx([0.75, 1.0])


@pytest.mark.parametrize("value", [math.nan, -1.0, -math.inf, 0.0, 1.0, 1.5, math.inf])
def test_a_coefficient_outside_of_0_to_1_counts_as_1(value: float) -> None:
    plan = plan_of(3.0, 4.0)
    plan.multiply(torch.tensor([value, 0.5]))
    plan.multiply_total(torch.tensor(value))
    assert plan.coefficients.tolist() == [1.0, 0.5]


@on_both_ways
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_unit_that_is_not_finite_is_left_alone_and_alone_in_it(where: str, bad: float) -> None:
    plan, gradients = plan_of(bad, 4.0, where=where), [torch.tensor([bad, 1.0]), *gradients_of(4.0)]
    plan.multiply(torch.tensor([0.5, 0.5]))
    plan.multiply_total(torch.tensor(0.5))  # of a total that is nothing
    apply_(plan, gradients, [0, 1])
    assert torch.equal(gradients[0], torch.tensor([bad, 1.0])) or math.isnan(bad)
    assert gradients[0][1] == 1.0
    assert norms_of(gradients[1:]) == pytest.approx([2.0])


@on_both_ways
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_zeroing_is_no_product(where: str, bad: float) -> None:
    plan, gradients = plan_of(bad, 4.0, where=where), [torch.tensor([bad, 1.0]), *gradients_of(4.0)]
    plan.zero(torch.tensor([True, False]))
    plan.zero(torch.tensor([False, False]))
    # What is left has a norm again, and can be clipped.
    assert plan.squares_after.tolist() == [0.0, 16.0]
    plan.multiply_total(torch.tensor(0.5))
    apply_(plan, gradients, [0, 1])
    assert gradients[0].tolist() == [0.0, 0.0]
    assert norms_of(gradients[1:]) == pytest.approx([2.0])


@on_both_ways
def test_the_smallest_limit_of_an_element_counts_and_comes_last(where: str) -> None:
    plan, gradients = plan_of(10.0, 10.0, where=where), gradients_of(10.0, 10.0)
    plan.limit(torch.tensor([2.0, math.inf]))
    plan.limit(torch.tensor([5.0, math.inf]))
    plan.multiply(torch.tensor([0.5, 1.0]))
    versions = gradients[1]._version
    apply_(plan, gradients, [0, 1])
    assert gradients[0].tolist() == [2.0, -2.0]
    assert gradients[1].tolist() == [6.0, -8.0]
    assert where != "cpu" or gradients[1]._version == versions


@on_both_ways
def test_limits_are_in_units_without_the_loss_scale(where: str) -> None:
    plan, gradients = plan_of(10.0, where=where), gradients_of(10.0 * 1024)
    plan.limit(torch.tensor([2.0]))
    apply_(plan, gradients, [0], grad_scale=torch.tensor(1024.0))
    assert gradients[0].tolist() == [2048.0, -2048.0]


@on_both_ways
def test_sparse_and_complex_gradients(where: str) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.tensor([[1.0], [2.0], [6.0]]), (4, 1))
    complex_ = torch.tensor([3.0 - 4.0j])
    plan = plan_of(8.0, 5.0, where=where)
    plan.multiply(torch.tensor([0.5, 0.2]))
    apply_(plan, [sparse, complex_], [0, 1])
    assert sparse.to_dense().flatten().tolist() == [0.5, 0.0, 4.0, 0.0]
    assert torch.allclose(complex_, torch.tensor([0.6 - 0.8j]))
    limits = plan_of(8.0, 5.0, where=where)
    limits.limit(torch.tensor([math.inf, 0.7]))
    apply_(limits, [None, complex_], [0, 1])
    assert torch.allclose(complex_, torch.tensor([0.6 - 0.7j]))


def test_empty_shards_and_no_gradients() -> None:
    plan = plan_of(4.0, 0.0)
    plan.multiply(torch.tensor([0.5, 0.5]))
    apply_(plan, [torch.empty(0), None], [0, 1])
    apply_(plan, [], [])


def test_skips_and_stops_add_up() -> None:
    plan = plan_of(1.0)
    assert plan.skip is None
    plan.request_skip(torch.tensor(False))
    plan.request_skip(torch.tensor(True))
    plan.request_skip(torch.tensor(False))
    assert bool(plan.skip)


def _layers() -> tuple[nn.Module, GradientStore, LayerPlan, StepPlan]:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b")})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    store = GradientStore(ParameterIndex(model), granularities=("block", "parameter"))
    plan = StepPlan(store.measure(step=0).squares)
    return model, store, LayerPlan(plan, store.view()), plan


def test_callbacks_of_different_granularity_share_a_plan() -> None:
    model, store, blocks, plan = _layers()
    parameters = LayerPlan(plan, store.view("parameter"))
    assert store.view("parameter").layer_names == ("a.weight", "a.bias", "b.weight", "b.bias")
    blocks.clip_layers(torch.tensor([0.5, 1.0]))
    parameters.clip_layers(torch.tensor([1.0, 0.5, 1.0, 1.0]))
    blocks.clip_total(torch.tensor(0.5))
    coefficients = [0.25, 0.125, 0.5, 0.5]
    squares = [c**2 * size for c, size in zip(coefficients, (4, 2, 4, 2), strict=True)]
    assert blocks.norms().tolist() == pytest.approx([math.sqrt(sum(squares[:2])), math.sqrt(sum(squares[2:]))])
    assert parameters.norms().tolist() == pytest.approx([math.sqrt(square) for square in squares])
    assert blocks.total_norm().item() == parameters.total_norm().item() == pytest.approx(math.sqrt(sum(squares)))
    store.apply_(plan)
    found: list[Any] = [parameter.grad.flatten()[0].item() for parameter in model.parameters()]  # type: ignore[union-attr]
    assert found == coefficients
