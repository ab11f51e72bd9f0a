"""Gradient noise scale: how noisy a step's gradient is for the samples that it was made of.

`noise_estimate` makes two unbiased estimates of one step from norms at two batch sizes, `NoiseScale` keeps their
running means and divides them, with an error, and `Advice` says what the result means for the batch. Only raw gradients
are looked at: the noise scale is that of the loss, whatever the optimizer makes of the gradient.

Example:
    >>> import torch
    >>> from stabilizer import noise
    >>> generator = torch.Generator().manual_seed(0)
    >>> running = noise.NoiseScale(min_samples=50, device="cpu")
    >>> weights = noise.part_weights(torch.full((4,), 8), reduction="mean")
    >>> for _ in range(500):  # |G|^2 = 1, the trace is 64 in 1,000 dimensions: a noise scale of 64
    ...     parts = 1000**-0.5 * (1 + (64 / 8) ** 0.5 * torch.randn(4, 1000, generator=generator)) / 4
    ...     small, big = parts.square().sum(), parts.sum(0).square().sum()
    ...     running.update(noise.noise_estimate(small, big, **weights._asdict()), valid=torch.tensor(True))
    >>> reading = running.compute()
    >>> print(f"{reading.noise_scale:.1f} +- {reading.stderr:.1f}, reliable: {reading.reliable.item()}")
    64...
"""

from stabilizer.noise.advice import Advice, Advised
from stabilizer.noise.estimates import Estimate, PartWeights, noise_estimate, noise_estimate_equal, part_weights
from stabilizer.noise.running import NoiseScale, NoiseScaleReading

__all__ = [
    "Advice",
    "Advised",
    "Estimate",
    "NoiseScale",
    "NoiseScaleReading",
    "PartWeights",
    "noise_estimate",
    "noise_estimate_equal",
    "part_weights",
]
