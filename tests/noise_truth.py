"""A data set, a small GPT, and the true gradient noise scale of both, from the gradients of single samples."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from stabilizer.names import layer_names
from tests.models import VOCABULARY, make_transformer

__all__ = ["LENGTH", "NUM_SAMPLES", "data_set", "make_model", "sample_loss", "true_noise"]

NUM_SAMPLES, LENGTH = 64, 6


def make_model() -> nn.Module:
    """The model, before any strategy."""
    return make_transformer(num_layers=1, dim=8)


@functools.cache
def data_set() -> Tensor:
    """Tokens, shape (samples, length + 1); half of them are of one kind, so that there is something to learn."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH + 1), generator=generator)
    tokens[::2] = (tokens[::2, :1] + torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens


def sample_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Loss of every sample, shape (samples,): the mean over its tokens."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


@functools.cache
def true_noise() -> dict[str, Any]:
    """|G|^2, the trace and their ratio, of all parameters and by layer, in float64."""
    model = make_model().to(torch.float64)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (tokens[None, :-1],))
        return F.cross_entropy(logits[0], tokens[1:])

    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, data_set())
    squares, traces = {}, {}
    for name, layer in zip(gradients, layer_names(list(gradients)), strict=True):
        mean = gradients[name].mean(0)
        squares[layer] = squares.get(layer, 0.0) + float(mean.square().sum())
        traces[layer] = traces.get(layer, 0.0) + float((gradients[name] - mean).square().sum()) / NUM_SAMPLES
    total = {"grad_sq": sum(squares.values()), "trace": sum(traces.values())}
    by_layer = {layer: traces[layer] / squares[layer] for layer in squares}
    return {**total, "noise_scale": total["trace"] / total["grad_sq"], "layers": by_layer}
