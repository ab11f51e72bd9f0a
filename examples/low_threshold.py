"""What a threshold that is too low does to Adam: `python -m stabilizer.examples.low_threshold` prints a table.

A clip that acts on healthy steps takes the largest gradients out of Adam's second moment, by whose root every step is
divided: all steps become larger than the learning rate says. Here gradients have random directions and norms whose
logarithm has a standard deviation of 0.5, as layers of language models have at most, and nothing else happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from stabilizer import tags
from stabilizer.callbacks import LayerClipCallback, attach

__all__ = ["Bias", "gradients", "main", "measure_bias", "second_moments"]

#: Thresholds in units of the median norm.
KS = (1.4, 4.8, 10.0)
_FIRST = 100


@dataclasses.dataclass(frozen=True)
class Bias:
    """What a threshold has changed.

    Attributes:
        k: The threshold over the median norm.
        share_clipped: Of all steps.
        second_moment: Adam's second moment, over that of the run without a clip.
        step_size: What the learning rate is divided by, of the run without a clip over that with it: how much larger
            the steps are for one and the same first moment.
    """

    k: float
    share_clipped: float
    second_moment: float
    step_size: float


def gradients(*, steps: int, num_layers: int = 40, dim: int = 16, log_std: float = 0.5, seed: int = 0) -> Tensor:
    """Gradients of a run that stands still.

    Args:
        steps: Number of steps.
        num_layers: How many layers there are, all alike.
        dim: Elements of one layer's gradient.
        log_std: Standard deviation of the logarithm of the norms.
        seed: Of all of it.

    Returns:
        Shape (steps, layers, dim), float32; the median norm of a layer is 1 but for chance.

    Example:
        >>> norms = gradients(steps=500).norm(dim=-1)
        >>> norms.shape, round(norms.median().item(), 1)
        (torch.Size([500, 40]), 1.0)
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(steps, num_layers, dim, generator=generator)
    norms = (log_std * torch.randn(steps, num_layers, 1, generator=generator)).exp()
    rows *= norms / rows.norm(dim=-1, keepdim=True)
    return rows


def second_moments(rows: Tensor, *, threshold: float | None = None) -> tuple[Tensor, float]:
    """Train on given gradients with AdamW, with or without a fixed threshold.

    Args:
        rows: Gradients of every step, shape (steps, layers, dim); at most 1,000 steps.
        threshold: In units of the norm; `None` means no clip.

    Returns:
        Adam's second moment after every step, shape (steps, layers, dim), and the share of gradients that were clipped.
    """
    layers = [nn.Linear(rows.shape[2], 1, bias=False) for _ in range(rows.shape[1])]
    weights: list[Tensor] = [layer.weight for layer in layers]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95), fused=True)
    handle, shares, moments = None, [0.0], []
    if threshold is not None:
        callback = LayerClipCallback(rule={"name": "fixed", "threshold": threshold}, every_n_steps=1)

        def log(values: dict[str, float], step: int) -> None:
            shares.append(values.get(tags.CLIP_LAYER_RATE, shares[-1]))

        handle = attach(None, model=nn.ModuleList(layers), optimizer=optimizer, callbacks=[callback], log=log)
    with handle or contextlib.nullcontext():
        for row in rows:
            for weight, gradient in zip(weights, row, strict=True):
                weight.grad = gradient.clone().unsqueeze(0)
            optimizer.step()
            moments.append(torch.cat([optimizer.state[weight]["exp_avg_sq"] for weight in weights]))
    return torch.stack(moments), shares[-1]


def measure_bias(k: float, rows: Tensor, *, unclipped: Tensor) -> Bias:
    """Compare a run with a threshold with one without.

    Args:
        k: The threshold over the median norm.
        rows: Gradients of every step, shape (steps, layers, dim), with a median norm of 1.
        unclipped: Second moments of the run without a threshold, from `second_moments`.

    Returns:
        Means over all steps but the first 100, in which Adam's second moment fills.
    """
    clipped, share = second_moments(rows, threshold=k)
    moment = float(clipped[_FIRST:].mean() / unclipped[_FIRST:].mean())
    return Bias(k, share, moment, float((unclipped[_FIRST:] / clipped[_FIRST:]).sqrt().mean()))


def main(ks: Sequence[float] = KS, *, steps: int = 500) -> list[Bias]:
    """Measure and print.

    Args:
        ks: Thresholds over the median norm.
        steps: Steps of every run, at most 1,000.

    Returns:
        What is in the table.
    """
    rows = gradients(steps=steps)
    unclipped, _ = second_moments(rows)
    found = [measure_bias(k, rows, unclipped=unclipped) for k in ks]
    table = Table(title="A fixed threshold at k times the median gradient norm, and Adam")
    for column in ("k", "clipped", "second moment", "step size"):
        table.add_column(column, justify="right")
    for bias in found:
        table.add_row(
            f"{bias.k:g}", f"{bias.share_clipped:.2%}", f"x {bias.second_moment:.3f}", f"x {bias.step_size:.3f}"
        )
    Console().print(table)
    return found


if __name__ == "__main__":
    main()
