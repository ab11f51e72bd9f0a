"""The gate: exact, isolating, invisible when dormant, and how it numbers its units."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stabilizer.gate import Gate
from stabilizer.gating import gating, token_gate
from stabilizer.localize.taps import tapped
from tests.gate_tools import (
    GatedModel,
    difference,
    gradients_of,
    norm_of,
    partition,
    reference_gradients_of,
    token_losses,
)
from tests.models import make_transformer, token_batch


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_each_part_is_that_of_a_separate_reference_and_the_parts_add_up(dtype: torch.dtype, tolerance: float) -> None:
    model, batch, gate = make_transformer(dtype=dtype), token_batch(), Gate()
    with tapped(model.lm_head, gate):
        loss = token_losses(model(batch[0]), batch[1]).mean()
    gate.seal()
    whole = gradients_of(loss, model)
    parts = []
    for mask in partition(gate.num_units):
        gate.set_open(mask)
        parts.append(gradients_of(loss, model))
        assert difference(parts[-1], reference_gradients_of(model, batch, mask)) < tolerance
    assert difference([sum(pieces) for pieces in zip(*parts, strict=True)], whole) < tolerance  # type: ignore[misc]


def test_a_gate_changes_no_bit_while_it_is_open_and_leaves_nothing_when_closed() -> None:
    model, batch, gate = make_transformer(), token_batch(), Gate()
    plain = token_losses(model(batch[0]), batch[1]).mean()
    expected = gradients_of(plain, model)
    with tapped(model.lm_head, gate):
        loss = token_losses(model(batch[0]), batch[1]).mean()
    assert torch.equal(loss, plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(loss, model), expected, strict=True))
    gate.set_open(torch.zeros(gate.num_units, dtype=torch.bool))
    assert all(not gradient.any() for gradient in gradients_of(loss, model))
    gate.set_open(None)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(loss, model), expected, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_in_one_loss_term_is_isolated(bad: float) -> None:
    model, batch, gate = make_transformer(), token_batch(), Gate()
    factors = torch.ones(batch[1].shape)
    factors[1, 5] = bad
    with tapped(model.lm_head, gate):
        loss = (token_losses(model(batch[0]), batch[1]) * factors).mean()
    assert not torch.isfinite(torch.tensor(norm_of(gradients_of(loss, model))))
    assert gate.arrived is not None
    assert (~torch.isfinite(gate.arrived)).nonzero().flatten().tolist() == [1 * 8 + 5]
    others = torch.isfinite(gate.arrived)
    gate.set_open(others)
    assert difference(gradients_of(loss, model), reference_gradients_of(model, batch, others)) < 1e-6


def test_arrived_is_the_norm_of_the_gradient_of_the_logits() -> None:
    model, batch, gate = make_transformer(), token_batch(), Gate()
    logits = model(batch[0]).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(token_losses(logits, batch[1]).mean(), logits)
    with tapped(model.lm_head, gate):
        loss = token_losses(model(batch[0]), batch[1]).mean()
    assert gate.arrived is None
    expected = torch.linalg.vector_norm(gradient.double(), dim=-1).flatten().float()
    # What is closed does not change what arrives.
    for mask in (None, *partition(gate.num_units)):
        gate.clear()
        assert gate.arrived is None
        gate.set_open(mask)
        gradients_of(loss, model)
        assert gate.arrived is not None
        assert gate.arrived.dtype == torch.float32
        torch.testing.assert_close(gate.arrived, expected, rtol=1e-6, atol=0)


def test_a_segment_that_is_passed_twice_adds_squares() -> None:
    x, gate = torch.ones(3, requires_grad=True), Gate()
    loss = gate.apply(x, dims=1) @ torch.tensor([3.0, 0.0, 1.0])
    for factor in (1.0, 4 / 3):
        torch.autograd.grad(loss * factor, x, retain_graph=True)
    assert gate.arrived is not None
    torch.testing.assert_close(gate.arrived, torch.tensor([5.0, 0.0, 5 / 3]))


# Dormant.


def test_a_dormant_gate_returns_its_argument() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert token_gate(x) is x
    with gating(Gate()):
        assert token_gate(x) is not x
    assert token_gate(x) is x
    with pytest.raises(ValueError, match=r"dims=1: a tensor of shape \(\)"):
        token_gate(torch.ones(()))
    with pytest.raises(ValueError, match="dims=3"):
        token_gate(x, dims=3)


def test_gates_nest_and_an_error_closes_them() -> None:
    x, outer, inner = torch.ones(2, 3, requires_grad=True), Gate(), Gate()
    with gating(outer):
        with contextlib.suppress(KeyError), gating(inner):
            token_gate(x)
            raise KeyError
        token_gate(x, dims=1)
    assert (inner.num_units, outer.num_units) == (6, 2)
    assert token_gate(x) is x


# How a gate is used.


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.div_(0.5), lambda x: x[..., :].mul_(2)])
def test_changes_in_place_do_not_go_round_the_gate(change: Callable[[Tensor], Tensor]) -> None:
    x, gate = torch.randn(3, 4, requires_grad=True), Gate()
    y = gate.apply(x.exp() + 1, dims=1)
    change(y)
    gate.set_open(torch.tensor([True, False, True]))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not gradient[1].any()
    torch.testing.assert_close(gradient[[0, 2]], 2 * x.detach().exp()[[0, 2]])
    torch.testing.assert_close(y, 2 * (x.exp() + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_reduced_precision(dtype: torch.dtype) -> None:
    model, batch, gate = make_transformer(), token_batch(), Gate()
    with torch.autocast("cpu", dtype), tapped(model.lm_head, gate):
        logits = model(batch[0])
        assert logits.dtype == dtype
        loss = token_losses(logits, batch[1]).mean()
    whole = gradients_of(loss, model)
    parts = []
    for mask in partition(gate.num_units):
        gate.clear()
        gate.set_open(mask)
        parts.append(gradients_of(loss, model))
    assert difference([sum(pieces) for pieces in zip(*parts, strict=True)], whole) < 0.02  # type: ignore[misc]
    assert gate.arrived is not None
    assert gate.arrived.dtype == torch.float32
    gate.set_open(torch.zeros(gate.num_units, dtype=torch.bool))
    assert norm_of(gradients_of(loss, model)) == 0


def test_units_over_several_applications() -> None:
    x, gate = torch.ones(2, 3, 4, requires_grad=True), Gate()
    gate.apply(x, dims=2)
    gate.apply(x[0], dims=1)
    gate.apply(x, dims=3)
    assert gate.num_units == 6 + 3 + 24
    places = {0: (0, 0, 0), 5: (0, 1, 2), 6: (1, 0, None), 8: (1, 2, None), 9: (2, 0, 0), 32: (2, 1, 11)}
    assert {unit: tuple(gate.locate(unit)) for unit in places} == places
    for unit in (-1, 33):
        with pytest.raises(IndexError, match="has 33"):
            gate.locate(unit)


def test_token_gate_wins_over_a_tap() -> None:
    model, batch, gate = GatedModel(make_transformer()), token_batch(), Gate()
    with gating(gate), tapped(model.inner.lm_head, gate):  # type: ignore[arg-type]
        loss = model(*batch)
    assert gate.is_by_hand
    assert gate.is_tapped
    assert gate.num_units == batch[0].numel()
    mask = partition(gate.num_units)[0]
    gate.set_open(mask)
    assert difference(gradients_of(loss, model), reference_gradients_of(model.inner, batch, mask)) < 1e-6  # type: ignore[arg-type]
    assert gate.shape(0) == batch[0].shape
    values = gate.all_values(0)
    assert values is not None
    assert torch.equal(values, token_losses(model.inner(batch[0]), batch[1]))


def test_values_are_kept_of_one_number_a_unit_only() -> None:
    x, gate = torch.rand(2, 3, requires_grad=True), Gate()
    y = gate.apply(x + 0, dims=2)
    y.mul_(0)
    values = gate.all_values(0)
    assert values is not None
    assert torch.equal(values, x)
    gate.apply(x, dims=1)
    assert gate.all_values(1) is None


def test_wrong_masks_and_a_second_forward_are_refused() -> None:
    x, gate = torch.ones(3, requires_grad=True), Gate()
    gate.apply(x, dims=1)
    for mask in (torch.ones(2, dtype=torch.bool), torch.ones(3)):
        with pytest.raises(ValueError, match=r"expected bool of shape \(3,\)"):
            gate.set_open(mask)
    gate.seal()
    with pytest.raises(RuntimeError, match="served one forward pass"):
        gate.apply(x, dims=1)


def test_nothing_is_kept_alive() -> None:
    model, batch, gate = make_transformer(), token_batch(), Gate()
    activations: list[weakref.ref[Tensor]] = []
    model.lm_head.register_forward_hook(lambda module, args, output: activations.append(weakref.ref(output)))
    with tapped(model.lm_head, gate):
        loss = token_losses(model(batch[0]), batch[1]).mean()
    gate.set_open(partition(gate.num_units)[0])
    gradients_of(loss, model)
    # The gate keeps no graph, and the graph's end is the gate's.
    del loss
    assert [reference() for reference in activations] == [None]
    dead = weakref.ref(gate)
    del gate
    assert dead() is None
    assert len(model.lm_head._forward_hooks) == 1
