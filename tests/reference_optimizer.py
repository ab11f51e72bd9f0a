"""Oracles of what optimizers do: written like the papers, in float64, for whole parameters in one process.

They know nothing of the package, of shards or of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["AdamW", "adam_steps", "clipped", "rms_of_ratio", "update_rms", "worst_sequence"]

Array = npt.NDArray[np.float64]
Named = Mapping[str, "Tensor | Array"]


def _array(values: Tensor | Array) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().double().numpy()
    return np.asarray(values, np.float64)


def update_rms(
    before: Named, after: Named, layer_of: Callable[[str], str], *, rates: Mapping[str, float] | None = None
) -> dict[str, float]:
    """RMS of every layer's update: sqrt(mean over its elements of ((p' - p) / unit)^2).

    Args:
        before: Parameter name -> whole parameter before the step.
        after: The same after it.
        layer_of: Layer of a parameter name.
        rates: Parameter name -> learning rate, the unit; without it the unit is max(RMS of the layer's parameters
            before, 1e-3), as in Adafactor, algorithm 5.

    Example:
        >>> update_rms({"a.x": np.zeros(2)}, {"a.x": np.array([3.0, -3.0])}, lambda name: name[0], rates={"a.x": 1.5})
        {'a': 2.0}
    """
    moved: dict[str, list[Array]] = {}
    held: dict[str, list[Array]] = {}
    for name in before:
        delta = _array(after[name]) - _array(before[name])
        if rates is not None:
            delta = delta / rates[name] if rates[name] else np.zeros_like(delta)
        moved.setdefault(layer_of(name), []).append(delta.ravel())
        held.setdefault(layer_of(name), []).append(_array(before[name]).ravel())
    found = {}
    for layer, parts in moved.items():
        rms = math.sqrt(float(np.mean(np.concatenate(parts) ** 2)))
        unit = max(math.sqrt(float(np.mean(np.concatenate(held[layer]) ** 2))), 1e-3) if rates is None else 1.0
        found[layer] = rms / unit
    return found


def clipped(
    before: Named,
    after: Named,
    layer_of: Callable[[str], str],
    *,
    max_rms: float,
    rates: Mapping[str, float] | None = None,
) -> dict[str, Array]:
    """Update clipping, U / max(1, RMS(U) / d): Adafactor (arXiv:1804.04235), section 6, by layer.

    Args:
        before: Parameter name -> whole parameter before the step.
        after: The same after it, unclipped.
        layer_of: Layer of a parameter name.
        max_rms: d.
        rates: As of `update_rms`.

    Returns:
        Parameter name -> parameter after the clipped step.
    """
    rms = update_rms(before, after, layer_of, rates=rates)
    found = {}
    for name in before:
        old, new = _array(before[name]), _array(after[name])
        found[name] = old + (new - old) / max(1.0, rms[layer_of(name)] / max_rms)
    return found


class AdamW:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101), algorithm 2.

    Args:
        parameters: Name -> value at the start; copied.
        rate: Learning rate.
        betas: Decays of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Multiplied by the learning rate and the parameter.
    """

    def __init__(
        self,
        parameters: Named,
        *,
        rate: float,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self.parameters = {name: _array(value).copy() for name, value in parameters.items()}
        self.first = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self.second = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self.rate, self.betas, self.eps, self.weight_decay = rate, tuple(betas), eps, weight_decay
        self.num_steps = 0

    def step(self, gradients: Named) -> None:
        """One step.

        Args:
            gradients: Name -> gradient.
        """
        self.num_steps += 1
        beta1, beta2 = self.betas
        for name, gradient in gradients.items():
            g, p = _array(gradient), self.parameters[name]
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * g
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * g**2
            first = self.first[name] / (1 - beta1**self.num_steps)
            second = self.second[name] / (1 - beta2**self.num_steps)
            step = first / (np.sqrt(second) + self.eps)
            self.parameters[name] = p - self.rate * (step + self.weight_decay * p)


def rms_of_ratio(gradients: Named, seconds: Named, layer_of: Callable[[str], str], *, eps: float) -> dict[str, float]:
    """RMS_t = sqrt(mean(g^2 / max(v, eps^2))) of every layer: Wortsman et al. (arXiv:2304.13013), section 3.4.

    Args:
        gradients: Parameter name -> gradient of the step.
        seconds: Parameter name -> second moment after it, divided by 1 - beta2^t.
        layer_of: Layer of a parameter name.
        eps: Of the optimizer.

    Example:
        >>> rms_of_ratio({"a.x": np.array([2.0, 0.0])}, {"a.x": np.array([1.0, 0.0])}, lambda name: name[0], eps=1e-8)
        {'a': 1.4142135623730951}
    """
    found: dict[str, list[Array]] = {}
    for name, gradient in gradients.items():
        ratio = _array(gradient) ** 2 / np.maximum(_array(seconds[name]), eps**2)
        found.setdefault(layer_of(name), []).append(ratio.ravel())
    return {layer: math.sqrt(float(np.mean(np.concatenate(parts)))) for layer, parts in found.items()}


def worst_sequence(beta1: float, beta2: float, num: int) -> Array:
    """Gradients that make Adam's last step largest: in proportion to (beta1 / beta2)^k, k steps before the last.

    The step is (1 - beta1) sum beta1^k g_k / sqrt((1 - beta2) sum beta2^k g_k^2); by Cauchy-Schwarz it is largest where
    sqrt(beta2^k) g_k is in proportion to beta1^k / sqrt(beta2^k).

    Args:
        beta1: Decay of the first moment.
        beta2: Decay of the second.
        num: Length.

    Returns:
        The first gradient first.
    """
    ages = np.arange(num)[::-1]
    return np.asarray((beta1 / beta2) ** ages, np.float64)


def adam_steps(gradients: Sequence[float] | Array, *, beta1: float, beta2: float, first_step: int) -> Array:
    """Adam's steps in learning rates, for one element, without eps.

    Args:
        gradients: One a step.
        beta1: Decay of the first moment.
        beta2: Decay of the second.
        first_step: Number of steps with a gradient of 0 before them.

    Example:
        >>> adam_steps([5.0], beta1=0.9, beta2=0.999, first_step=0).round(12).tolist()
        [1.0]
    """
    first = second = 0.0
    found = []
    for number, gradient in enumerate(gradients, first_step + 1):
        first = beta1 * first + (1 - beta1) * float(gradient)
        second = beta2 * second + (1 - beta2) * float(gradient) ** 2
        found.append(first / (1 - beta1**number) / math.sqrt(second / (1 - beta2**number)) if second else 0.0)
    return np.array(found)
