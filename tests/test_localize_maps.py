"""Maps over layers and positions: planted growth, planted values that are not finite, and models without any."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stabilizer.localize.growth import grown
from stabilizer.localize.maps import BlockWatch, Origin, blocks_of
from tests.gate_tools import gradients_of, token_losses
from tests.models import TinyTransformer, make_transformer, token_batch

NUM_LAYERS, NUM_SEEDS = 4, 100


class Amplify(torch.autograd.Function):
    """Identity whose backward multiplies the gradient at one row and position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: int, position: int, factor: float) -> Tensor:  # type: ignore[override]
        """As it is."""
        ctx.place, ctx.factor = (row, position), factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """Larger at one place."""
        changed = gradient.clone()
        changed[ctx.place] *= ctx.factor
        return changed, None, None, None


class Faulty(nn.Module):
    """A block with a fault at its beginning, in its middle or at its end."""

    def __init__(self, block: nn.Module, fault: Any, *, where: str) -> None:
        super().__init__()
        self.block, self.fault, self.where = block, fault, where

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, dim) to the same."""
        block: Any = self.block
        x = self.fault(x) if self.where == "beginning" else x
        x = x + block.attention(block.attention_norm(x))
        x = self.fault(x) if self.where == "middle" else x
        x = x + block.feed_forward(block.feed_forward_norm(x))
        return self.fault(x) if self.where == "end" else x  # type: ignore[no-any-return]


def _watched(model: TinyTransformer, *, seed: int = 0, factors: Tensor | None = None, size: int = 3) -> BlockWatch:
    tokens, targets = token_batch(seed=seed, size=size)
    watch = BlockWatch(blocks_of(model))
    with watch:
        losses = token_losses(model(tokens), targets)
    (losses if factors is None else losses * factors).mean().backward()
    return watch


def _plant(model: TinyTransformer, number: int, fault: Any, *, where: str) -> None:
    model.layers[number] = Faulty(model.layers[number], fault, where=where)


def _place(seed: int) -> tuple[int, int]:
    return seed % 3, seed * 7 % 8


@pytest.mark.parametrize("number", [0, 2, NUM_LAYERS - 1], ids=["first", "inner", "last"])
@pytest.mark.parametrize("where", ["beginning", "middle", "end"])
def test_growth_at_one_place_is_named(where: str, number: int) -> None:
    num_right = 0
    for seed in range(NUM_SEEDS):
        model, (row, position) = make_transformer(seed=seed, num_layers=NUM_LAYERS), _place(seed)
        _plant(model, number, lambda x, at=(row, position): Amplify.apply(x, *at, 1e4), where=where)
        found = _watched(model, seed=seed).growth()
        num_right += found is not None and (found.layer, found.row, found.position, found.kind) == (
            f"layers.{number}",
            row,
            position,
            "growth",
        )
    assert num_right >= 0.95 * NUM_SEEDS


def test_nothing_grows_in_a_healthy_model_nor_where_one_token_is_to_blame() -> None:
    num_healthy = num_token = 0
    for seed in range(NUM_SEEDS):
        num_healthy += _watched(make_transformer(seed=seed), seed=seed).growth() is not None
        factors = torch.ones(3, 8)
        factors[_place(seed)] = 1e4
        num_token += _watched(make_transformer(seed=seed), seed=seed, factors=factors).growth() is not None
    assert num_healthy <= 1
    assert num_token <= 1


def test_growth_with_a_single_row() -> None:
    names = []
    for seed in range(20):
        model = make_transformer(seed=seed)
        names.append(_watched(model, seed=seed, size=1).growth())
        _plant(model, 2, lambda x, at=seed * 7 % 8: Amplify.apply(x, 0, at, 1e4), where="end")
        found = _watched(model, seed=seed, size=1).growth()
        assert found is not None
        assert (found.layer, found.row, found.position) == ("layers.2", 0, seed * 7 % 8)
    assert names == [None] * 20


def test_rows_without_a_gradient_do_not_count() -> None:
    above = torch.ones(2, 4, 3)
    above[:, 0], above[:, 1] = 0, torch.nan
    below = above.clone()
    assert grown(below, above) is None
    below[1, 3, 2] = torch.inf
    assert grown(below, above) is None
    below[1, 3, 2] = 1e6
    found = grown(below, above)
    assert found is not None
    assert found[:3] == (1, 3, 2)
    assert found.factor == pytest.approx(1e6 / math.sqrt(3), rel=1e-6)


def test_the_map_is_the_gradient_of_the_hidden_states() -> None:
    model, (tokens, targets) = make_transformer(), token_batch()
    x = model.embed_tokens(tokens)
    states = [x]
    for layer in model.layers:
        x = layer(x)
        states.append(x)
    loss = token_losses(model.lm_head(model.norm(x)), targets).mean()
    expected = [torch.linalg.vector_norm(g.double(), dim=-1) for g in torch.autograd.grad(loss, states)]
    watch = _watched(model)
    assert watch.names == ["input", *(f"layers.{number}" for number in range(NUM_LAYERS))]
    assert watch.gradients is not None
    torch.testing.assert_close(watch.gradients, torch.stack(expected).float(), rtol=1e-6, atol=0)
    watch.clear()
    assert watch.gradients is None
    assert watch.growth() is None


def test_watching_changes_no_bit_and_leaves_nothing_behind() -> None:
    model, (tokens, targets) = make_transformer(), token_batch()
    plain = token_losses(model(tokens), targets).mean()
    expected = gradients_of(plain, model)
    watch = BlockWatch(blocks_of(model))
    with watch:
        loss = token_losses(model(tokens), targets).mean()
    assert torch.equal(loss, plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(loss, model), expected, strict=True))
    assert all(not layer._forward_hooks and not layer._forward_pre_hooks for layer in model.layers)
    # The graph does not keep the watch, nor the watch the graph.
    dead = weakref.ref(watch)
    del watch
    assert dead() is None
    gradients_of(loss, model)


def _bad_at(value: float, row: int, position: int) -> Any:
    def fault(x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[row, position] = True
        return torch.where(mask.unsqueeze(-1), value, x)

    return fault


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("number", range(NUM_LAYERS))
@pytest.mark.parametrize("where", ["middle", "end"])
def test_the_producer_of_what_is_not_finite_is_named_and_no_carrier(where: str, number: int, value: float) -> None:
    model = make_transformer()
    _plant(model, number, _bad_at(value, 1, 5), where=where)
    found = _watched(model).first_nonfinite()
    assert found is not None
    assert (found.layer, found.row, found.position, found.kind) == (f"layers.{number}", 1, 5, "nonfinite")
    # Infinity that goes through a norm inside of the block comes out as NaN.
    assert math.isnan(found.value) if where == "middle" or math.isnan(value) else found.value == math.inf


def test_what_is_not_finite_before_in_and_after_the_blocks() -> None:
    model = make_transformer()
    assert _watched(model).first_nonfinite() is None
    tokens = token_batch()[0]
    factors = torch.ones(3, 8)
    factors[2, 3] = torch.nan
    watch = _watched(model, factors=factors)
    assert watch.first_nonfinite() is None
    found = watch.first_nonfinite_gradient()
    assert found is not None
    # It came from above all blocks, and attention carries it to earlier positions.
    assert (found.layer, found.row, found.position) == ("output of layers.3", 2, 3)

    with torch.no_grad():
        model.layers[2].attention.v.weight[0, 0] = torch.nan  # type: ignore[union-attr]
    found = _watched(model).first_nonfinite()
    assert found is not None
    assert (found.layer, found.row, found.position) == ("layers.2", 0, 0)

    with torch.no_grad():
        model.embed_tokens.weight[tokens[1, 2]] = torch.nan
    found = _watched(model).first_nonfinite()
    first = (tokens == tokens[1, 2]).nonzero()[0].tolist()
    assert found is not None
    assert (found.layer, found.row, found.position) == ("input", *first)


def test_what_is_not_finite_between_two_blocks() -> None:
    model = make_transformer()
    model.layers[2].register_forward_pre_hook(lambda module, args: (_bad_at(torch.nan, 0, 4)(args[0]),))
    found = _watched(model).first_nonfinite()
    assert found is not None
    assert (found.layer, found.row, found.position) == ("input of layers.2", 0, 4)


def test_changes_in_place_between_two_blocks_are_seen() -> None:
    model = make_transformer()
    factors = torch.ones(3, 8, 1)
    factors[0, 4] = torch.nan
    model.layers[2].register_forward_pre_hook(lambda module, args: (args[0].mul_(factors),))
    found = _watched(model).first_nonfinite()
    assert found is not None
    assert (found.layer, found.row, found.position) == ("input of layers.2", 0, 4)


@pytest.mark.parametrize(("where", "position"), [("beginning", 5), ("middle", None)])
def test_a_gradient_that_becomes_bad_in_a_backward_pass(where: str, position: int | None) -> None:
    model = make_transformer()
    # Masked weights of attention are zeros, and 0 * NaN is NaN: through it the whole row is bad.
    _plant(model, 1, lambda x: Amplify.apply(x, 2, 5, torch.nan), where=where)
    watch = _watched(model)
    assert watch.first_nonfinite() is None
    assert watch.growth() is None
    found = watch.first_nonfinite_gradient()
    assert found is not None
    assert (found.layer, found.row, found.position) == ("layers.1", 2, position)
    assert found.kind == "nonfinite gradient"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks(use_reentrant: bool) -> None:
    model = make_transformer()
    plain, (tokens, targets) = _watched(model), token_batch()
    watch = BlockWatch(blocks_of(model))
    with watch:
        x = model.embed_tokens(tokens)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        loss = token_losses(model.lm_head(model.norm(x)), targets).mean()
        for _ in range(2):
            watch.clear()
            loss.backward(retain_graph=True)
            assert watch.names == plain.names
            assert torch.equal(watch.gradients, plain.gradients)  # type: ignore[arg-type]
    assert watch.first_nonfinite() is None


class Packing(nn.Module):
    """A block that takes its hidden state by keyword, behind a mask, and gives a tuple."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, *, mask: Tensor, hidden_states: Tensor) -> tuple[Tensor, None]:
        """Map (rows, ..., dim) to the same."""
        return self.linear(hidden_states), None


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 5, 3)])
def test_packed_hidden_states_and_rows_without_positions(shape: Sequence[int]) -> None:
    layers = nn.ModuleList(Packing(3) for _ in range(2))
    watch = BlockWatch(blocks_of(nn.ModuleDict({"layers": layers})))
    x, mask = torch.randn(shape, requires_grad=True), torch.full((4, 4), -torch.inf)
    with watch:
        y = x + 0
        for number, layer in enumerate(layers):
            y, _ = layer(mask=mask, hidden_states=y if number == 0 else _bad_row(y))
    y.sum().backward()
    assert watch.names == ["input", "layers.0", "layers.1"]
    assert watch.gradients is not None
    assert watch.gradients.shape == (3, 4, 1)
    found = watch.first_nonfinite()
    assert found == Origin("input of layers.1", 2, None, math.inf, "nonfinite")


def _bad_row(y: Tensor) -> Tensor:
    return torch.where((torch.arange(4) == 2).view(4, *[1] * (y.dim() - 1)), torch.inf, y)


def test_blocks_are_those_of_the_layers() -> None:
    model = make_transformer()
    assert blocks_of(model) == [(f"layers.{number}", layer) for number, layer in enumerate(model.layers)]
    assert blocks_of(nn.ModuleDict({"first": nn.Linear(1, 1)})) == []
    assert BlockWatch([]).gradients is None
