"""The gate in models that are compiled, or compute parts of themselves again in the backward pass."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stabilizer.gate import Gate, Place
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


class CountingBackend:
    """Counts what is compiled, and runs it as it is."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_calls += 1
            return graph.forward(*args)

        return run


def test_a_compiled_model_is_one_graph_and_is_not_compiled_again_after_a_search() -> None:
    model, batch, backend = GatedModel(make_transformer()), token_batch(), CountingBackend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected = gradients_of(compiled(*batch), model)
    assert (backend.num_graphs, backend.num_calls) == (1, 1)
    gate = Gate()
    with torch.compiler.set_stance("force_eager"), gating(gate):
        loss = compiled(*batch)
    gate.seal()
    assert gate.num_units == batch[0].numel()
    for mask in partition(gate.num_units):
        gate.set_open(mask)
        assert difference(gradients_of(loss, model), reference_gradients_of(model.inner, batch, mask)) < 1e-6  # type: ignore[arg-type]
    assert (backend.num_graphs, backend.num_calls) == (1, 1)
    again = gradients_of(compiled(*batch), model)
    assert (backend.num_graphs, backend.num_calls) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_a_tap_in_a_compiled_model_leaves_its_code_alone() -> None:
    model, batch, backend = make_transformer(), token_batch(), CountingBackend()
    compiled, gate = torch.compile(model, backend=backend), Gate()
    token_losses(compiled(batch[0]), batch[1]).mean().backward()
    with torch.compiler.set_stance("force_eager"), tapped(model.lm_head, gate):
        loss = token_losses(compiled(batch[0]), batch[1]).mean()
    gate.set_open(torch.zeros(gate.num_units, dtype=torch.bool))
    assert norm_of(gradients_of(loss, model)) == 0
    num_graphs = backend.num_graphs
    compiled(batch[0])
    assert backend.num_graphs == num_graphs


# Activation checkpointing.


class Chunked(nn.Module):
    """A head and its loss over chunks of positions, each checkpointed: they are recomputed in reverse."""

    def __init__(self, use_reentrant: bool | None, *, by_hand: bool) -> None:
        super().__init__()
        self.body = make_transformer()
        self.use_reentrant, self.by_hand = use_reentrant, by_hand

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Map tokens to their mean loss."""
        x = self.body.embed_tokens(tokens)
        for layer in self.body.layers:
            x = layer(x)
        total = x.new_zeros(())
        for piece, wanted in zip(x.split(3, dim=1), targets.split(3, dim=1), strict=True):
            if self.use_reentrant is None:
                total = total + self._chunk(piece, wanted)
            else:
                total = total + checkpoint(self._chunk, piece, wanted, use_reentrant=self.use_reentrant)
        return total / targets.numel()

    def _chunk(self, x: Tensor, targets: Tensor) -> Tensor:
        losses = token_losses(self.body.lm_head(self.body.norm(x)), targets)
        return (token_gate(losses) if self.by_hand else losses).sum()


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_chunked_head_inside_checkpointed_regions(use_reentrant: bool | None, by_hand: bool) -> None:
    model, batch, gate = Chunked(use_reentrant, by_hand=by_hand), token_batch(), Gate()
    plain, expected = copy.deepcopy(model.body), gradients_of(model(*batch), model)
    with gating(gate), contextlib.nullcontext() if by_hand else tapped(model.body.lm_head, gate):
        loss = model(*batch)
        gate.seal()
        assert gate.num_units == batch[0].numel()
        assert [gate.locate(unit) for unit in (0, 9, 23)] == [Place(0, 0, 0), Place(1, 0, 0), Place(2, 2, 1)]
        assert difference(gradients_of(loss, model), expected) == 0
        # By chunk, then by row.
        order = torch.cat([piece.flatten() for piece in torch.arange(24).view(3, 8).split(3, dim=1)])
        for mask in partition(24):
            gate.set_open(mask)
            wanted = torch.zeros(24, dtype=torch.bool)
            wanted[order] = mask
            assert difference(gradients_of(loss, model), reference_gradients_of(plain, batch, wanted)) < 1e-6


class Nested(nn.Module):
    """Reentrant regions inside a reentrant region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, 3) to the same."""
        return checkpoint(self._outer, x, use_reentrant=True)

    def _outer(self, x: Tensor) -> Tensor:
        for part in (self._first, self._second):
            x = checkpoint(part, x, use_reentrant=True)
        return x

    def _first(self, x: Tensor) -> Tensor:
        return token_gate(self.first(x), dims=1)

    def _second(self, x: Tensor) -> Tensor:
        return token_gate(self.second(x), dims=1).tanh()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_nested_reentrant_regions() -> None:
    model, x, gate = Nested(), torch.randn(2, 3, requires_grad=True), Gate()
    with gating(gate):
        loss = model(x)[0].sum()
        gate.seal()
        assert gate.num_units == 4
        for _ in range(2):
            gate.set_open(torch.tensor([False, False, True, True]))
            model.zero_grad()
            loss.backward(retain_graph=True)
            # The first is closed, the second open; the other way round there would be no gradient in the second.
            assert not model.first.weight.grad.any()  # type: ignore[union-attr]
            assert model.second.weight.grad.any()  # type: ignore[union-attr]
            assert gate.arrived is not None
            assert (gate.arrived > 0).tolist() == [True, False, True, False]
            gate.clear()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_below_the_gate(use_reentrant: bool) -> None:
    model, batch, gate = make_transformer(), token_batch(), Gate()
    x = model.embed_tokens(batch[0])
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    with tapped(model.lm_head, gate):
        loss = token_losses(model.lm_head(model.norm(x)), batch[1]).mean()
    gate.seal()
    for mask in partition(gate.num_units):
        gate.set_open(mask)
        model.zero_grad()
        loss.backward(retain_graph=True)
        gradients = [parameter.grad for parameter in model.parameters()]
        assert difference(gradients, reference_gradients_of(model, batch, mask)) < 1e-6  # type: ignore[arg-type]


def test_what_is_computed_without_a_graph_has_no_units() -> None:
    model, (tokens, targets), gate = GatedModel(make_transformer()), token_batch(), Gate()
    with gating(gate):
        with torch.no_grad():
            model(tokens, targets)
        assert not gate.is_used
        model(tokens, targets)
    assert gate.num_units == tokens.numel()


def test_a_reentrant_region_is_let_go_with_the_graph() -> None:
    model, batch, gate = Chunked(True, by_hand=True), token_batch(), Gate()
    hidden: list[weakref.ref[Tensor]] = []
    model.body.layers[-1].register_forward_hook(lambda module, args, output: hidden.append(weakref.ref(output)))
    with gating(gate):
        loss = model(*batch)
        gradients_of(loss, model)
    del loss
    gc.collect()
    assert {reference() for reference in hidden} == {None}
    assert gate.num_units == batch[0].numel()
