"""One optimizer's noise scale: what enters it at a step, and what is read of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from stabilizer.errors import warn
from stabilizer.noise import NoiseScale, NoiseScaleReading, noise_estimate
from stabilizer.step_parts import StepParts
from stabilizer.thresholds import RobustLog

__all__ = ["BatchReading", "LossReduction", "NoiseScales"]

#: How a micro-batch's loss depends on its samples.
LossReduction: TypeAlias = Literal["auto", "mean", "sum"]

# Of the squares of coefficients of variation: losses are sums if they spread less than half as much so.
_CLEARLY = 0.5
# How many times the threshold that follows the run a spike is, as in a search for tokens. One that entered would be
# all that the running means hold, for as long as they remember.
_SPIKE = 3.0


class BatchReading(NamedTuple):
    """What `NoiseScales.read` returns: the reading of the total and of layers, and the usual batch, shape ()."""

    scales: NoiseScaleReading
    batch: Tensor


class NoiseScales:
    """The running noise scale of the selected layers together, and of each of them where that is asked for.

    Args:
        names: Of the layers that have a number of their own; none for the total alone.
        reduction: How losses depend on sizes; "auto" looks whether the losses of parts or those per sample are alike.
        device: Where the numbers are.
        **options: See `NoiseScale`.
    """

    def __init__(self, names: Sequence[str], *, reduction: LossReduction, device: torch.device, **options: Any) -> None:
        self.names = tuple(names)
        self._reduction = reduction
        self._scales = NoiseScale(shape=(1 + len(names),), device=device, **options)
        self._decay = self._scales.decay
        # Of the parts' own gradients together, which a spike in any of them is in.
        self._usual = RobustLog()
        self._usual.start(1, device=device)
        # Sum of the weights, mean batch, and the mean spreads of losses as means and as sums.
        self._means = torch.zeros(4, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)

    def update(self, parts: StepParts, *, small: Tensor, big: Tensor, valid: Tensor) -> None:
        """Take a step.

        Args:
            parts: Of the step.
            small: Sums of squares of the parts' norms by selected layer, shape (selected,).
            big: Squares of the step's norms, shape (selected,).
            valid: Whether it is a step like others, shape (), bool.
        """
        valid = valid & parts.is_known
        valid = valid & ~self._is_spike(small.sum().sqrt(), valid=valid)
        spreads = parts.spreads()
        is_told = valid & torch.isfinite(spreads).all()
        before = self._means
        spread = torch.where(is_told, before[2:] * self._decay + spreads, before[2:])
        weights = parts.weights(is_sum=self._is_sum(spread))
        batch = torch.stack([torch.ones_like(weights.batch), weights.batch])
        usual = torch.where(valid & torch.isfinite(batch).all(), before[:2] * self._decay + batch, before[:2])
        self._means = torch.cat([usual, spread]).to(before.dtype)
        rows = [torch.cat([row.sum().reshape(1), row[: len(self.names)]]) for row in (small, big)]
        self._scales.update(noise_estimate(*rows, **weights._asdict()), valid=valid)

    def read(self) -> BatchReading:
        """What is known; the host does not wait."""
        return BatchReading(self._scales.compute(), self._means[1] / self._means[0])

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU tensors."""
        means = self._means.detach().to("cpu", copy=True)
        return {
            "names": list(self.names),
            "means": means,
            "scales": self._scales.state_dict(),
            "usual": self._usual.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state; one of other layers is left alone, with a warning.

        Args:
            state: What `state_dict` gave.
        """
        if tuple(state["names"]) != self.names:
            warn(
                f"the saved noise scale is of {len(state['names'])} layers, these are {len(self.names)} (per_layer=, "
                "layers=, granularity= or the model have changed): it starts anew"
            )
            return
        self._scales.load_state_dict(state["scales"])
        if "usual" in state:  # not in checkpoints of before: what is usual is then learned anew
            self._usual.load_state_dict(state["usual"])
        self._means = state["means"].to(self._means)

    def _is_spike(self, norm: Tensor, *, valid: Tensor) -> Tensor:
        """Whether a step is far from all others, shape (), bool; a level that lasts is none after a while."""
        norms = norm.reshape(1).float()
        is_spike = norms > _SPIKE * self._usual.thresholds(norms)
        self._usual.update(norms, valid=valid)
        return is_spike[0]

    def _is_sum(self, spread: Tensor) -> Tensor:
        if self._reduction != "auto":
            return torch.full_like(spread[0], self._reduction == "sum", dtype=torch.bool)
        return spread[1] < _CLEARLY * spread[0]
