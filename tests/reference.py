"""Oracles: what the package computes, written like the definition, in float64, for whole gradients in one process.

They know nothing of the package, of shards or of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["layer_max_abs", "layer_nonfinite", "layer_norms", "total_norm", "window_statistics"]

Gradients = Mapping[str, "Tensor | None"]
LayerOf = Callable[[str], str]


def layer_norms(named_gradients: Gradients, layer_of: LayerOf, norm_type: float = 2) -> dict[str, float]:
    """The p-norm of all elements of each layer: (sum |g|^p)^(1/p), or max |g| for infinity.

    Args:
        named_gradients: Parameter name -> whole gradient, or None where there is none.
        layer_of: Layer of a parameter name.
        norm_type: p, or infinity.

    Returns:
        Layer -> norm; 0 for a layer without any gradient.

    Example:
        >>> layer_norms({"a.x": torch.tensor([3.0]), "a.y": torch.tensor([4.0]), "b.x": None}, lambda name: name[0])
        {'a': 5.0, 'b': 0.0}
    """
    return {layer: _norm(values, norm_type) for layer, values in _by_layer(named_gradients, layer_of).items()}


def total_norm(named_gradients: Gradients, norm_type: float = 2) -> float:
    """The p-norm of all elements of all gradients.

    Args:
        named_gradients: Parameter name -> whole gradient, or None where there is none.
        norm_type: p, or infinity.

    Example:
        >>> total_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[-4.0]])})
        5.0
    """
    return _norm(_by_layer(named_gradients, lambda _: "all").get("all", np.zeros(0)), norm_type)


def layer_max_abs(named_gradients: Gradients, layer_of: LayerOf) -> dict[str, float]:
    """The largest |g| of each layer; NaN where an element is NaN.

    Args:
        named_gradients: Parameter name -> whole gradient, or None where there is none.
        layer_of: Layer of a parameter name.

    Example:
        >>> layer_max_abs({"a.x": torch.tensor([3.0, -4.0]), "a.y": None}, lambda name: name[0])
        {'a': 4.0}
    """
    return {layer: _norm(values, np.inf) for layer, values in _by_layer(named_gradients, layer_of).items()}


def layer_nonfinite(named_gradients: Gradients, layer_of: LayerOf) -> dict[str, int]:
    """How many elements of each layer are NaN or infinite.

    Args:
        named_gradients: Parameter name -> whole gradient, or None where there is none.
        layer_of: Layer of a parameter name.

    Example:
        >>> layer_nonfinite({"a.x": torch.tensor([1.0, float("nan"), float("-inf")])}, lambda name: name[0])
        {'a': 2}
    """
    return {layer: int((~np.isfinite(v)).sum()) for layer, v in _by_layer(named_gradients, layer_of).items()}


def _by_layer(named_gradients: Gradients, layer_of: LayerOf) -> dict[str, npt.NDArray[np.float64]]:
    elements: dict[str, list[npt.NDArray[np.float64]]] = {}
    for name, gradient in named_gradients.items():
        elements.setdefault(layer_of(name), []).append(_elements(gradient))
    return {layer: np.concatenate(parts) for layer, parts in elements.items()}


def _elements(gradient: Tensor | None) -> npt.NDArray[np.float64]:
    if gradient is None:
        return np.zeros(0)
    if hasattr(gradient, "full_tensor"):
        raise TypeError("The oracle wants whole gradients: call `.full_tensor()` on all ranks first.")
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense.cpu().to(torch.float64).flatten().numpy()


def _norm(values: npt.NDArray[np.float64], norm_type: float) -> float:
    if values.size == 0:
        return 0.0
    magnitudes = np.abs(values)
    if np.isinf(norm_type):
        return float(magnitudes.max())
    return float((magnitudes**norm_type).sum() ** (1 / norm_type))


def window_statistics(values: npt.ArrayLike, steps: npt.ArrayLike, window: int) -> dict[str, float]:
    """Mean, sample standard deviation, slope and its standard error of the last finite values of a run.

    Args:
        values: All values so far, oldest first.
        steps: The step of each.
        window: How many of the finite ones count.

    Returns:
        "mean", "std" (n - 1), "slope" (least squares, per step) and "slope_error"; NaN where there are too few.

    Example:
        >>> found = window_statistics([9.0, 1.0, np.nan, 2.0, 6.0], [0, 1, 2, 3, 4], 3)
        >>> {name: round(value, 3) for name, value in found.items()}
        {'mean': 3.0, 'std': 2.646, 'slope': 1.5, 'slope_error': 0.866}
    """
    y, x = np.asarray(values, np.float64), np.asarray(steps, np.float64)
    y, x = y[np.isfinite(y)][-window:], x[np.isfinite(y)][-window:]
    n = len(y)
    result = {
        "mean": float(np.mean(y)) if n else np.nan,
        "std": float(np.std(y, ddof=1)) if n > 1 else np.nan,
        "slope": np.nan,
        "slope_error": np.nan,
    }
    if n > 1 and x.min() < x.max():
        x_squares = np.sum((x - x.mean()) ** 2)
        slope = np.sum((x - x.mean()) * (y - y.mean())) / x_squares
        residuals = y - y.mean() - slope * (x - x.mean())
        result["slope"] = float(slope)
        if n > 2:
            result["slope_error"] = float(np.sqrt(np.sum(residuals**2) / (n - 2) / x_squares))
    return result
