"""Who makes the first value that is not finite, in models of which that is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stabilizer.numerics.producers import ProducerWatch
from stabilizer.numerics.tracing import Producer

DIM = 4


class Step(nn.Module):
    """A linear map, and a function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(DIM, DIM), function

    def forward(self, x: Tensor) -> Tensor:
        """Map x to the same shape."""
        return self.function(self.linear(x))


class Attention(nn.Module):
    """Three maps of one input, of which one may be bad, and a mask of minus infinity."""

    mask: Tensor

    def __init__(self, bad: str | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in ("query", "key", "value")})
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.bad = bad

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Causal attention."""
        made = {name: part(x) for name, part in self.parts.items()}
        if self.bad is not None:
            made[self.bad] = bad_gradient(made[self.bad])
        scores = made["query"] @ made["key"].transpose(-1, -2) + self.mask
        output: Tensor = scores.softmax(-1) @ made["value"] + x
        return output


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.nan


def bad_gradient(x: Tensor) -> Tensor:
    """The same, with a gradient of NaN."""
    output: Tensor = _BadGradient.apply(x)
    return output


class BadGradient(nn.Module):
    """The same as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return bad_gradient(x)


def watched(
    model: nn.Module, *inputs: Any, loss_of: Callable[[Any], Tensor] = lambda output: output.square().mean()
) -> Producer | None:
    """The producer in one pass of a model."""
    with ProducerWatch(model) as watch:
        loss = loss_of(model(*inputs))
        loss.backward()
        gradients = [(name, parameter.grad) for name, parameter in model.named_parameters()]
        return watch.found(gradients, float(loss.detach()))


def told(found: Producer | None) -> tuple[str, str, str, str]:
    assert found is not None
    return found.kind, found.module, found.path, found.value


X = torch.linspace(-1, 1, 2 * 3 * DIM).view(2, 3, DIM)


def test_nothing_where_all_is_finite() -> None:
    torch.manual_seed(0)
    assert watched(nn.Sequential(Step(), Attention(), Step()), X) is None


def test_the_first_output_that_is_not_finite_is_the_producer_s() -> None:
    model = nn.Sequential(Step(), Step(), Step(lambda x: x / 0), Step(), Step())
    assert told(watched(model, X)) == ("output", "2", "output", "Inf")


def test_a_function_between_two_parts_is_the_parent_s() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Step(), Step()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.second((self.first(x) - 2).log())
            return output

    found = watched(nn.Sequential(Step(), Parent(), Step()), X)
    assert told(found) == ("code", "1", "input[0]", "NaN")
    assert found is not None
    assert found.part == "1.second"
    assert str(found) == "1 makes NaN in its own code, before its part 1.second: input[0]"


def test_a_parameter_that_is_not_finite_is_named_where_it_is_used() -> None:
    model = nn.Sequential(Step(), Step(), Step())
    with torch.no_grad():
        model[1].linear.bias[2] = math.nan
    assert told(watched(model, X)) == ("parameter", "1.linear", "bias", "NaN")


def test_a_row_of_an_embedding_that_nobody_reads_is_no_producer() -> None:
    model = nn.Sequential(nn.Embedding(5, DIM), Step(lambda x: x / 0))
    with torch.no_grad():
        model[0].weight[4] = math.nan
    assert told(watched(model, torch.tensor([[0, 1, 2]])))[:2] == ("output", "1")
    assert told(watched(model, torch.tensor([[0, 4, 2]]))) == ("parameter", "0", "weight", "NaN")


def test_what_is_in_the_batch() -> None:
    x = X.clone()
    x[0, 1, 2] = math.inf
    assert told(watched(nn.Sequential(Step(), Step()), x)) == ("input", "", "input[0]", "Inf")


def test_a_loss_outside_of_all_modules() -> None:
    found = watched(nn.Sequential(Step(), Step()), X, loss_of=lambda output: (output - 5).log().mean())
    assert told(found) == ("loss", "", "", "NaN")


def test_masks_of_minus_infinity_are_no_fault() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Step(), Attention())
    assert watched(model, X) is None
    model[1].function = lambda x: x * math.nan
    assert told(watched(model, X))[:2] == ("output", "1")


def test_masked_scores_between_modules_are_no_fault() -> None:
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.ones(3, DIM, dtype=torch.bool).triu(1), -math.inf)

    torch.manual_seed(0)
    model = nn.Sequential(Step(), Mask(), nn.Softmax(-1), Step(), Step())
    assert watched(model, X) is None
    model[3].function = lambda x: x / 0
    assert told(watched(model, X))[:2] == ("output", "3")


def test_minus_infinity_counts_where_nothing_else_is_found() -> None:
    found = watched(
        nn.Sequential(Step(), Step(lambda x: x.abs().mul(0).log())), X, loss_of=lambda output: output.mean()
    )
    assert told(found) == ("output", "1", "output", "-Inf")


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_the_first_bad_gradient_is_its_producer_s(use_reentrant: bool | None) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            if use_reentrant is None:
                return self.inner(x)  # type: ignore[no-any-return]
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = nn.Sequential(Step(), Checkpointed(nn.Sequential(Step(), BadGradient(), Step())), Step())
    assert told(watched(model, X.clone().requires_grad_())) == ("gradient", "1.inner.1", "input[0]", "NaN")


@pytest.mark.parametrize("bad", ["query", "key", "value"])
def test_of_several_that_share_an_input_none_is_taken_for_another(bad: str) -> None:
    """The bad gradient is made in the attention's own code, above one of its maps."""
    torch.manual_seed(0)
    found = watched(nn.Sequential(Step(), Attention(bad), Step()), X)
    assert told(found) == ("gradient_code", "1", "output", "NaN")
    assert found is not None
    assert found.part == f"1.parts.{bad}"


def test_one_of_three_maps_of_one_input_is_the_producer() -> None:
    torch.manual_seed(0)
    attention = Attention()
    attention.parts["key"] = nn.Sequential(nn.Linear(DIM, DIM), BadGradient())
    found = watched(nn.Sequential(Step(), attention, Step()), X)
    assert told(found) == ("gradient", "1.parts.key.1", "input[0]", "NaN")


def test_a_gradient_that_is_bad_in_the_residual_branch_alone() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(DIM), Step()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = bad_gradient(x) + self.inner(self.norm(x))
            return output

    torch.manual_seed(0)
    found = watched(nn.Sequential(Step(), Residual(), Step()), X)
    assert told(found) == ("gradient", "1", "input[0]", "NaN"), "the norm takes the same input, and is innocent"


def test_the_loss_s_own_gradient() -> None:
    """The root of 0 has a gradient of infinity."""
    found = watched(nn.Sequential(Step(), nn.Linear(DIM, 1)), X, loss_of=lambda output: (output * 0).sqrt().mean())
    assert told(found)[:2] == ("loss_gradient", "1")


def test_the_gradient_of_one_parameter_alone() -> None:
    model = nn.Sequential(Step(), Step(), Step())
    model[1].linear.weight.register_hook(lambda gradient: gradient * math.nan)
    assert told(watched(model, X)) == ("parameter_gradient", "1.linear", "weight", "NaN")


def test_values_and_gradients_are_those_of_a_pass_without_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Step(), Attention(), nn.ReLU(inplace=True), nn.Dropout(0.5), Step(F.gelu))

    def passed(watch: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        if watch:
            watched(model, X)
        else:
            model(X).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    for plain, seen in zip(passed(False), passed(True), strict=True):
        assert torch.allclose(plain, seen, rtol=1e-6, atol=1e-9)


@dataclasses.dataclass
class Output:
    """As transformers return it, as far as fields go."""

    loss: Tensor
    hidden: tuple[Tensor, ...]


def test_ways_into_dataclasses_and_named_tuples() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Output:
            hidden = self.linear(x)
            return Output(hidden.square().mean(), (hidden, hidden * math.nan))

    found = watched(Nested(), X, loss_of=lambda output: output.loss)
    assert told(found) == ("output", "", "output.hidden[1]", "NaN")
