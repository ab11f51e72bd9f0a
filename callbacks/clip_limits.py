"""What the clips beside a callback hold a step's norms against."""

from __future__ import annotations

import torch

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.clipping import ClipCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.trigger import Limits

__all__ = ["limits_beside"]


def limits_beside(callback: StabilizerCallback, context: StepContext) -> tuple[Limits | None, Limits | None]:
    """Thresholds of the total and of the layers, as far as other callbacks of the run keep them.

    Args:
        callback: Who asks.
        context: Of the step, after the clips have looked at it.

    Returns:
        `None` where nobody keeps any; of layers only those of a clip that looks at the same ones.
    """
    others = () if callback.driver is None else callback.driver.callbacks
    clips = {type(other).__name__: other for other in others if isinstance(other, ClipCallback)}
    total, layers = clips.get("AdaptiveClipThreshold"), clips.get("LayerClipCallback")
    if layers is not None and _selection(layers) != _selection(callback):
        layers = None
    return _limits(total, context, num=1), _limits(layers, context, num=len(context.selected_names))


def _limits(clip: ClipCallback | None, context: StepContext, *, num: int) -> Limits | None:
    if clip is None:
        return None
    found = clip.limits(context.optimizer_index)
    if found is not None:
        return found
    # It has failed: there is no threshold, rather than another one than before.
    nothing = torch.full((num,), torch.inf, device=context.store.norms.device)
    return Limits(type(clip).__name__, nothing, lambda: torch.full_like(nothing, torch.nan))


def _selection(callback: StabilizerCallback) -> tuple[object, ...]:
    return callback.granularity, callback.layers, callback.exclude
