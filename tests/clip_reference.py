"""Oracle of clipping: each layer by itself, then all together, written like the definition, in float64, in one process.

It knows nothing of plans, shards or devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stabilizer.names import layer_names
from tests import reference
from tests.models import Batch, make_transformer, reference_gradients
from tests.reference_run import LEARNING_RATE

__all__ = ["Clipped", "clip", "clipped_run", "worst_error"]


class Clipped(NamedTuple):
    """One step: what the optimizer gets, and the numbers on the way there."""

    gradients: dict[str, Tensor | None]
    norms: dict[str, float]
    coefficients: dict[str, float]
    norms_after: dict[str, float]
    total: float
    total_between: float
    total_coefficient: float
    total_after: float


def clip(
    gradients: Mapping[str, Tensor | None],
    layer_of: Callable[[str], str],
    *,
    layer_limits: Mapping[str, float],
    total_limit: float = math.inf,
) -> Clipped:
    """Bring each layer's norm down to its limit, then the norm of all that is left down to the limit of the total.

    Args:
        gradients: Parameter name -> whole gradient, or None where there is none.
        layer_of: Layer of a parameter name.
        layer_limits: Layer -> limit; none for layers that are not here.
        total_limit: Of the total.

    Returns:
        float64.

    Example:
        >>> gradients = {"a.x": torch.tensor([6.0]), "b.x": torch.tensor([8.0])}
        >>> found = clip(gradients, lambda name: name[0], layer_limits={"a": 3.0, "b": 4.0}, total_limit=1.0)
        >>> found.coefficients, found.total, found.total_between, found.total_after
        ({'a': 0.5, 'b': 0.5}, 10.0, 5.0, 1.0)
        >>> found.gradients["b.x"]
        tensor([0.8000], dtype=torch.float64)
    """
    wide = {name: None if g is None else g.detach().to(torch.float64) for name, g in gradients.items()}
    norms = reference.layer_norms(wide, layer_of)
    coefficients = {layer: _coefficient(norm, layer_limits.get(layer, math.inf)) for layer, norm in norms.items()}
    between = _scaled(wide, lambda name: coefficients[layer_of(name)])
    total_between = reference.total_norm(between)
    total_coefficient = _coefficient(total_between, total_limit)
    after = _scaled(between, lambda name: total_coefficient)
    return Clipped(
        gradients=after,
        norms=norms,
        coefficients=coefficients,
        norms_after=reference.layer_norms(after, layer_of),
        total=reference.total_norm(wide),
        total_between=total_between,
        total_coefficient=total_coefficient,
        total_after=reference.total_norm(after),
    )


def clipped_run(
    steps: Sequence[Sequence[Batch]],
    *,
    layer_limits: Callable[[str], float],
    total_limits: Sequence[float],
    prefix: str = "",
    learning_rate: float = LEARNING_RATE,
) -> list[Clipped]:
    """Plain SGD on the transformer with clipped gradients.

    Args:
        steps: For every step all micro-batches of all ranks, which weigh the same.
        layer_limits: Limit of a layer.
        total_limits: Of the total, by step.
        prefix: What a host puts before the names of parameters.
        learning_rate: Of SGD.

    Returns:
        Every step; names of gradients have no prefix, those of layers have it.
    """
    model: nn.Module = make_transformer().double()
    run = []
    for batches, total_limit in zip(steps, total_limits, strict=True):
        gradients = reference_gradients(model, batches)
        layers = dict(zip(gradients, layer_names([f"{prefix}{name}" for name in gradients]), strict=True))
        limits = {layer: layer_limits(layer.removeprefix(prefix)) for layer in layers.values()}
        run.append(clip(gradients, layers.__getitem__, layer_limits=limits, total_limit=total_limit))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if (gradient := run[-1].gradients.get(name)) is not None:
                    parameter -= learning_rate * gradient
    return run


def worst_error(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> float:
    """The largest distance of a gradient from its reference, relative to the reference's norm.

    Args:
        found: Parameter name -> whole gradient.
        expected: Likewise.
    """
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, reference_gradient in expected.items():
        gradient = found[name]
        if reference_gradient is None or gradient is None:
            assert gradient is None or not gradient.any(), name
            assert reference_gradient is None or not reference_gradient.any(), name
            continue
        assert gradient.isfinite().all(), name
        size = float(reference_gradient.norm())
        distance = float((gradient.to(torch.float64) - reference_gradient).norm())
        worst = max(worst, distance / size if size else distance)
    return worst


def _coefficient(norm: float, limit: float) -> float:
    return limit / norm if norm > limit and math.isfinite(norm) else 1.0


def _scaled(gradients: Mapping[str, Tensor | None], factor: Callable[[str], float]) -> dict[str, Tensor | None]:
    return {name: None if g is None else g * factor(name) for name, g in gradients.items()}
