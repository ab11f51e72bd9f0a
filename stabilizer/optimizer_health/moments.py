"""What the second moment of Adam says of the steps to come.

Adam's step is lr * m / (sqrt(v) + eps), with m and v running means of g and g^2 (both divided by 1 - beta^t): Kingma
and Ba, "Adam: A Method for Stochastic Optimization" (arXiv:1412.6980); AdamW (arXiv:1711.05101) moves by the same.
While gradients are what they were, g^2 / v is about 1. After a silence v has decayed to nothing, and the next gradient
g alone makes both moments: m = (1 - beta1) g and v = (1 - beta2) g^2, whatever its size. So that step is
(1 - beta1) / sqrt(1 - beta2) learning rates (`first_step`), 3.2 at betas of 0.9 and 0.999. If nothing follows, m decays
by beta1 and sqrt(v) by sqrt(beta2) a step: the parameter moves on, by
(1 - beta1) / sqrt(1 - beta2) / (1 - beta1 / sqrt(beta2)) learning rates in all (`whole_way`), 31.8 at the same betas,
of which nine tenths come within 22 steps. No gradients at all can make a step larger than
(1 - beta1) / sqrt(1 - beta2) / sqrt(1 - beta1^2 / beta2) learning rates (`largest_step`; Cauchy-Schwarz on the two
sums), 7.3 there.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from stabilizer.norms import norms
from stabilizer.reduction import accumulation_dtype

__all__ = ["Moments", "first_step", "largest_step", "moment_sums", "moments_of", "steps_until_back", "whole_way"]


def first_step(beta1: float, beta2: float) -> float:
    """Step of Adam at the first gradient after a long silence.

    Args:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.

    Returns:
        In learning rates.

    Example:
        >>> round(first_step(0.9, 0.999), 2), round(first_step(0.9, 0.95), 2)
        (3.16, 0.45)
    """
    return (1 - beta1) / math.sqrt(1 - beta2)


def whole_way(beta1: float, beta2: float) -> float:
    """How far one gradient after a long silence moves a parameter in all, if no other follows.

    Args:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.

    Returns:
        In learning rates; infinite where the second moment decays as fast as the first.

    Example:
        >>> round(whole_way(0.9, 0.999), 1), round(whole_way(0.9, 0.95), 1)
        (31.8, 5.8)
    """
    left = 1 - beta1 / math.sqrt(beta2) if beta2 > 0 else 0.0
    return first_step(beta1, beta2) / left if left > 0 else math.inf


def largest_step(beta1: float, beta2: float) -> float:
    """The largest step of Adam that any gradients can make.

    Args:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.

    Returns:
        In learning rates; infinite where beta1^2 is not below beta2.

    Example:
        >>> round(largest_step(0.9, 0.999), 2), round(largest_step(0.9, 0.95), 2)
        (7.27, 1.16)
    """
    left = 1 - beta1**2 / beta2 if beta2 > 0 else 0.0
    return first_step(beta1, beta2) / math.sqrt(left) if left > 0 else math.inf


def steps_until_back(ratio: float, beta2: float, *, within: float = 2.0) -> int:
    """How many steps a second moment that a spike has raised needs until it is nearly what it was.

    What is above the usual value decays by beta2 a step: 1 + (ratio - 1) beta2^n <= within.

    Args:
        ratio: The second moment now, in units of its usual value.
        beta2: Its decay.
        within: What counts as nearly, in the same unit, above 1.

    Returns:
        Steps.

    Example:
        >>> steps_until_back(1000.0, 0.999), steps_until_back(1000.0, 0.95), steps_until_back(1.5, 0.999)
        (6904, 135, 0)
    """
    if ratio <= within:
        return 0
    return math.ceil(math.log((within - 1) / (ratio - 1)) / math.log(beta2) - 1e-9)


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """What an optimizer like Adam keeps of one parameter.

    Attributes:
        second: Running mean of g^2, as the optimizer has it (a DTensor where the parameter is one).
        correction: 1 - beta2^t, which it is divided by.
        beta1: Decay of the first moment.
        beta2: Decay of the second.
        eps: Added to the root.
    """

    second: Tensor
    correction: float | Tensor
    beta1: float
    beta2: float
    eps: float


def moments_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, Moments]:
    """The second moments that an optimizer has; waits for nothing.

    Args:
        optimizer: Of torch.

    Returns:
        By parameter; those of Adam, AdamW, NAdam and RAdam, and of whatever names its state alike.
    """
    found = {}
    for group in optimizer.param_groups:
        betas, eps = group.get("betas"), group.get("eps")
        # A decay on a device is a number that the host does not know.
        if not isinstance(betas, tuple | list) or len(betas) != 2 or any(isinstance(one, Tensor) for one in betas):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) or {}
            second, step = state.get("exp_avg_sq"), state.get("step")
            if second is None or step is None:
                continue
            beta1, beta2 = map(float, betas)
            found[parameter] = Moments(second, _correction(beta2, step), beta1, beta2, float(eps or 0.0))
    return found


def _correction(beta2: float, step: float | Tensor) -> float | Tensor:
    if isinstance(step, Tensor) and step.device.type != "cpu":
        powers: Tensor = beta2 ** step.detach().to(accumulation_dtype(step.device))
        return (1 - powers).to(torch.float32)
    return 1.0 - float(beta2 ** float(step))


@torch.no_grad()
def moment_sums(gradient: Tensor, second: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """What a gradient is against its second moment, which has it in already.

    Args:
        gradient: That the optimizer has stepped with; this rank's elements.
        second: This rank's elements of `moments.second`.
        moments: The rest.

    Returns:
        L2 norms of g / max(sqrt(v), eps), sqrt(v) and g, shape (3,), float32; and v, shape of the gradient, float32.
        The square of the first over the number of elements is the square of RMS_t of Wortsman et al.
        (arXiv:2304.13013), section 3.4.

    Example:
        >>> moments = Moments(torch.tensor([0.001, 0.004]), 0.001, 0.9, 0.999, 1e-8)
        >>> found, _ = moment_sums(torch.tensor([3.0, 2.0]), moments.second, moments)
        >>> [round(value, 4) for value in found.square().tolist()]
        [10.0, 5.0, 13.0]
    """
    unbiased = second.to(torch.float32) / _positive(moments.correction)
    root = unbiased.sqrt()
    wide = gradient.to(torch.float32)
    found = norms([wide / root.clamp(min=max(moments.eps, 1e-30)), root, wide], device=wide.device)
    return found, unbiased


def _positive(correction: float | Tensor) -> float | Tensor:
    """Not 0: the optimizer may have been kept from its first step."""
    return correction.clamp(min=1e-30) if isinstance(correction, Tensor) else max(correction, 1e-30)
