"""`gradient_norms`: all norms of a model in a single call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from stabilizer.errors import warn
from stabilizer.measurement import describe_difference
from stabilizer.names import Granularity
from stabilizer.parameters import ParameterIndex
from stabilizer.store import GradientStore
from stabilizer.view import NormType, parse_norm_type

__all__ = ["GradientNorms", "gradient_norms"]


class GradientNorms(NamedTuple):
    """What `gradient_norms` returns: names (layers), norms (layers,), the total () and non-finite flags (layers,)."""

    layer_names: tuple[str, ...]
    norms: Tensor
    total_norm: Tensor
    nonfinite: Tensor


def gradient_norms(
    model: nn.Module | Iterable[Tensor] | Tensor,
    *,
    granularity: Granularity = "block",
    norm_type: NormType | float = 2,
    groups: Mapping[str, Any] | None = None,
) -> GradientNorms:
    """Norms of all gradients of a model right now, over all ranks; for loops that want a single call.

    It sets everything up anew at each call, and warns if ranks that should hold equal gradients do not. A loop that
    measures every step keeps a `GradientStore`.

    Args:
        model: The model, or its parameters (a list, a generator, one tensor).
        granularity: What a layer is; see `stabilizer.names.layer_names`.
        norm_type: 2 or "inf".
        groups: See `ParameterIndex`.

    Returns:
        Plain tensors, the same on every rank.

    Raises:
        ValueError: If there are no parameters that require a gradient, or an argument is out of range.

    Example:
        >>> import torch
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradient_norms([weight]).total_norm
        tensor(5.)
    """
    kind = parse_norm_type(norm_type)
    index = ParameterIndex(model, groups=groups)
    if all(gradient is None for gradient in index.gradients()):
        warn(f"no gradients found on any of {len(index)} parameters: call this after backward() and before zero_grad()")
    store = GradientStore(index, granularities=(granularity,), norm_types=(kind,), ring=1)
    view = store.view(granularity, kind)
    measurement = store.measure(step=0, compare=True)
    if measurement.difference is not None and (message := describe_difference(measurement.difference.item())):
        warn(message)
    return GradientNorms(view.layer_names, view.norms, view.total_norm, view.nonfinite)
