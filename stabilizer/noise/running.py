"""The running noise scale: means of numerator and denominator kept apart, with an error and whether to believe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stabilizer.noise.estimates import Estimate
from stabilizer.reduction import accumulation_dtype
from stabilizer.thresholds.arguments import check_number, check_whole

__all__ = ["NoiseScale", "NoiseScaleReading"]

# Of `moments`: sum of the weights, sum of their squares, the two means, three sums of products of deviations, and how
# long the denominator has been clear of zero.
_ROWS = 8


class NoiseScaleReading(NamedTuple):
    """What `NoiseScale.compute` returns, each of its `shape`.

    Attributes:
        noise_scale: tr(Sigma) / |G|^2, in samples (in what the parts were counted in); NaN while the mean of |G|^2 is
            not above zero or that of tr(Sigma) is below.
        grad_sq: Running mean of |G|^2; negative where noise is all that there is.
        trace: Running mean of tr(Sigma).
        stderr: Standard error of `noise_scale`; NaN where that is, and before the second step.
        reliable: Whether the number may be believed, bool.
        num_steps: Steps that have entered, int64.
    """

    noise_scale: Tensor
    grad_sq: Tensor
    trace: Tensor
    stderr: Tensor
    reliable: Tensor
    num_steps: Tensor


class NoiseScale:
    """Simple noise scale of a run, tr(Sigma) / |G|^2, from `Estimate`s of its steps.

    Both are exponential moving averages, corrected for their start (divided by the sum of the weights), and divided at
    the end: a mean of ratios has no meaning where the denominator of a step may be zero. The error is that of a ratio
    of two means (the delta method), from the running variances and covariance, with as many independent steps as the
    weights are worth, (sum w)^2 / sum w^2: at most (1 + decay) / (1 - decay), 199 at 0.99.

    `reliable` means that the denominator has been clear of zero, by `reliable_z` of its own standard errors, for
    1 / (1 - decay) steps in a row and at least `min_samples`; `min_samples` are enough where it was clear by twice as
    much. One glance would not do: where noise hides the gradient (B = 16, a noise scale of 4,096, 137 dimensions) it
    is clear by 2 standard errors at 9 % of all steps, and for 100 in a row at half a per cent. A single step that is so
    large that it makes up both means leaves them 1.4 errors from zero: the reading is then unreliable until that step
    is forgotten.

    What to expect, simulated with normal noise: the true value lies within 2 standard errors in 94.5 to 96 % of runs,
    at the default decay as at 0.999, where |G|^2 is known to 15 % or better. A ratio is biased upwards, by about the
    square of the denominator's relative error, and skewed: with |G|^2 known to 20 % it is 5 % too large on average, and
    2 errors cover 93 %. Where the reading is reliable only now and then, it is so when it happens to be low, by a
    quarter. The relative error of one step is sqrt(4 N / (d B) + 2 N^2 n / (d B^2 (n - 1))), for a noise scale N, n
    equal parts, B samples a step and d dimensions that matter; averages divide it by the root of the number of
    independent steps. All of it is for noise that is independent from step to step; a gradient that drifts is followed
    with a delay of 1 / (1 - decay) steps and makes the error larger, not smaller.

    From: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1; running moments as in
    West, "Updating mean and variance estimates: an improved method" (1979).

    Args:
        shape: Of the estimates: () for one number, (layers,) for one a layer.
        decay: Of the averages, a step.
        min_samples: Steps before the first reading that is called reliable.
        reliable_z: How many of its standard errors the denominator must be above zero.
        device: Where the estimates are.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> running = NoiseScale(min_samples=2, decay=0.5, device="cpu")
        >>> for grad_sq, trace in ((1.0, 90.0), (1.2, 110.0), (float("nan"), 0.0), (0.8, 100.0)):
        ...     estimate = Estimate(torch.tensor(grad_sq), torch.tensor(trace))
        ...     running.update(estimate, valid=torch.tensor(True))
        >>> reading = running.compute()
        >>> print(f"{reading.noise_scale:.1f} +- {reading.stderr:.1f} after {reading.num_steps} steps")
        107.6 +- 14.8 after 3 steps
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...] = (),
        decay: float = 0.99,
        min_samples: int = 100,
        reliable_z: float = 2.0,
        device: torch.device | str,
    ) -> None:
        self.shape = tuple(shape)
        self.decay = check_number("decay", decay, above=0, below=1)
        self.min_samples = check_whole("min_samples", min_samples, low=2)
        # Below 1.5 a single step that outweighs all others would be enough.
        self.reliable_z = check_number("reliable_z", reliable_z, low=1.5)
        # How many steps in a row must be clear of zero, and for how many of them one counts that is very clear.
        self._patience = max(float(min_samples), round(1 / (1 - self.decay)))
        self._haste = self._patience / min_samples
        self.device = torch.device(device)
        dtype = accumulation_dtype(self.device)
        self._moments = torch.zeros(_ROWS, *self.shape, dtype=dtype, device=self.device)
        self._num_steps = torch.zeros(self.shape, dtype=torch.int64, device=self.device)

    def update(self, estimate: Estimate, *, valid: Tensor) -> None:
        """Take the next step. Where it may not enter, the state stays what it is, bit for bit.

        What is not finite never enters: NaN for a step of one part only, or an entry so large that its square is not.

        Args:
            estimate: Of the step, both of this object's shape.
            valid: Whether the step counts, bool, shape () or this object's: no overflow, no skipped step, no spike.

        Raises:
            ValueError: If the estimate has another shape.
        """
        values = torch.stack([value.detach().to(self._moments.dtype) for value in estimate])
        if values.shape[1:] != self.shape:
            raise ValueError(f"the estimate has shape {tuple(values.shape[1:])}: expected {self.shape}")
        moments = _advance(self._moments, values, decay=self.decay)
        is_clear, is_very_clear = _is_clear(moments, self.reliable_z)
        gain = torch.where(is_very_clear, self._haste, 1.0)
        clear_for = (self._moments[-1] + gain) * is_clear
        moments = torch.cat([moments, clear_for.unsqueeze(0)])
        accepted = valid & moments.isfinite().all(0)
        # Never in place: tensors that were handed out (or made in inference mode) stay what they were.
        self._moments = torch.where(accepted, moments, self._moments)
        self._num_steps = self._num_steps + accepted

    def compute(self) -> NoiseScaleReading:
        """The running noise scale; the host does not wait.

        Returns:
            Tensors of this object's shape; only where `reliable` should a decision rest on them.
        """
        grad_sq, trace = self._moments[2:4].masked_fill(self._num_steps == 0, torch.nan).unbind()
        is_ratio = (grad_sq > 0) & (trace >= 0)
        noise_scale = (trace / grad_sq).masked_fill(~is_ratio, torch.nan)
        variance, covariance, trace_variance = _mean_covariance(self._moments)
        squares = trace_variance - 2 * noise_scale * covariance + noise_scale.square() * variance
        return NoiseScaleReading(
            noise_scale,
            grad_sq,
            trace,
            # Rounding may leave less than nothing where the ratio is the same at all steps.
            stderr=squares.clamp(min=0).sqrt() / grad_sq,
            reliable=(self._moments[-1] >= self._patience) & is_ratio,
            num_steps=self._num_steps,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The state, as copies on the CPU."""
        state = {"moments": self._moments, "num_steps": self._num_steps}
        return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; where the tensors are does not change.

        Args:
            state: What `state_dict` of an object of the same shape gave.

        Raises:
            ValueError: If names or shapes differ; nothing is taken over then.
        """
        found = {name: tuple(value.shape) for name, value in state.items()}
        expected = {"moments": (_ROWS, *self.shape), "num_steps": self.shape}
        if found != expected:
            raise ValueError(f"noise scale: the saved state has {found}, expected {expected}")
        moments, num_steps = state["moments"], state["num_steps"]
        self._moments = moments.to(self.device, self._moments.dtype, copy=True)
        self._num_steps = num_steps.to(self.device, torch.int64, copy=True)


def _advance(moments: Tensor, values: Tensor, *, decay: float) -> Tensor:
    """Weights, means and sums of products with one more pair of values, whose weight is 1: all rows but the last."""
    weight, weight_squares = moments[0] * decay + 1, moments[1] * decay**2 + 1
    before = values - moments[2:4]
    means = moments[2:4] + before / weight
    after = values - means
    # x x, x y, y y. From deviations: differences of large squares would be rounded away.
    products = torch.cat([before[:1] * after, before[1:] * after[1:]])
    return torch.cat([torch.stack([weight, weight_squares]), means, moments[4:7] * decay + products])


def _mean_covariance(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Variance of the mean of |G|^2, covariance of both means, variance of that of the trace; NaN after one step."""
    weight, weight_squares = moments[:2].unbind()
    num_independent = weight.square() / weight_squares
    variance, covariance, trace_variance = (moments[4:7] / weight / (num_independent - 1)).unbind()
    return variance, covariance, trace_variance


def _is_clear(moments: Tensor, z: float) -> tuple[Tensor, Tensor]:
    """Whether the mean of |G|^2 is more than z and 2 z standard errors above zero; never after one step."""
    mean, (variance, _, _) = moments[2], _mean_covariance(moments)
    is_positive, squares, limits = mean > 0, mean.square(), variance * z**2
    return is_positive & (squares > limits), is_positive & (squares > 4 * limits)
