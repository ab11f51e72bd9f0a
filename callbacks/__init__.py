"""The callbacks. Each works in a Lightning Trainer of either package; see `StabilizerCallback` for your own."""

import stabilizer.callbacks.lightning  # noqa: F401  (registers what serves Lightning's hooks)
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.grad_norm import GradNormCallback, NormHistory

__all__ = ["GradNormCallback", "NormHistory", "StabilizerCallback", "StepContext"]
