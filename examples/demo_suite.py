"""The callbacks of `stabilizer demo`: the default suite and what looks ahead, and the fault if there is one."""

from __future__ import annotations

from typing import Any

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    DrillCallback,
    EarlyWarningCallback,
    GradLocCallback,
    GradNoiseScaleCallback,
    GradNormCallback,
    LayerClipCallback,
    LayerHealthCallback,
    LossMeanVarCallback,
    NumericsCallback,
    StabilizerCallback,
)
from stabilizer.examples.bad_token import Bytes
from stabilizer.examples.planting import Planted

__all__ = ["HiddenDrill", "make_suite"]


class HiddenDrill(DrillCallback):
    """A drill that does not say what it breaks: the alarms shall. Not for your own runs."""

    is_announced = False

    def limitations(self, setting: Any) -> list[str]:
        """For the table at the start."""
        return ["breaks something on purpose; the last line of the run says what"]


def make_suite(
    grad_norm: GradNormCallback,
    loss_mean_var: LossMeanVarCallback,
    *,
    num_ranks: int,
    planted: Planted | None = None,
) -> list[StabilizerCallback]:
    """Make the callbacks of one run.

    Args:
        grad_norm: The callback that measures gradients.
        loss_mean_var: The callback that follows the loss.
        num_ranks: In how many processes; one alone has nothing to measure noise by.
        planted: What is broken on purpose.

    Returns:
        All that a careful run would have. Those that wait for hundreds of steps by default look earlier, since the
        demo has two hundred.
    """
    noise = [GradNoiseScaleCallback(min_samples=50)] if num_ranks > 1 else []
    drill = [] if planted is None else [HiddenDrill(faults=[planted.fault])]
    return [
        grad_norm,
        loss_mean_var,
        AdaptiveClipThreshold(),
        LayerClipCallback(every_n_steps=2),
        GradLocCallback(tokenizer=Bytes()),
        NumericsCallback(every_n_steps=10),
        *noise,
        LayerHealthCallback(every_n_steps=20, window=100, warmup_steps=40),
        EarlyWarningCallback(),
        *drill,
    ]
