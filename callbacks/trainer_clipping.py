"""A trainer's own clip, taken over: its limit stays, and the callbacks see the gradients before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stabilizer.callbacks.adaptive_clip import AdaptiveClipThreshold
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.hosting import stand_before

__all__ = ["TakenOver", "check_clipping", "hold_limit", "take_over"]

_NAME = "max_grad_norm"


class TakenOver(NamedTuple):
    """What has become of a trainer's clip.

    Attributes:
        callbacks: Ours, with one more where none of them could take the limit.
        described: In words; empty if the trainer does not clip.
        limited: The user's own callback that has the limit for this run, if one has.
    """

    callbacks: list[StabilizerCallback]
    described: str = ""
    limited: AdaptiveClipThreshold | None = None


def check_clipping(arguments: Any, *, takes_over: bool) -> None:
    """Refuse a trainer that clips where it shall not be taken over.

    Args:
        arguments: `TrainingArguments`.
        takes_over: Whether the clip may be taken over.

    Raises:
        ValueError: Says what to set.
    """
    limit = _limit(arguments)
    if limit is not None and not takes_over:
        raise ValueError(
            f"take_over_clipping=False, and TrainingArguments(max_grad_norm={limit}) clips before the callbacks see "
            "the gradients: set max_grad_norm=0 and let AdaptiveClipThreshold(max_threshold=...) clip, or leave "
            "take_over_clipping=True"
        )


def take_over(arguments: Any, callbacks: Sequence[StabilizerCallback]) -> TakenOver:
    """Let a callback of ours have the trainer's limit. The trainer's own is to be set to 0 for the run.

    Args:
        arguments: `TrainingArguments`.
        callbacks: Ours.
    """
    limit, own = _limit(arguments), list(callbacks)
    if limit is None:
        return TakenOver(own)
    said = f"max_grad_norm={limit} of TrainingArguments is taken over"
    acting = [one for one in own if isinstance(one, AdaptiveClipThreshold) and one.clips and one.on_spike == "clip"]
    has_own = next((one for one in acting if one.max_threshold is not None), None)
    if has_own is not None:
        return TakenOver(own, f"{said}: {has_own.state_key} has max_threshold={has_own.max_threshold}, which stands")
    if acting:
        acting[0].max_threshold = limit
        return TakenOver(own, f"{said} as max_threshold of {acting[0].state_key}", acting[0])
    every = max(1, int(arguments.logging_steps)) if arguments.logging_steps >= 1 else 1
    clip = AdaptiveClipThreshold(
        rule={"name": "fixed", "threshold": limit},
        warmup_cap=None,
        on_nonfinite="ignore",
        every_n_steps=every,
        name=_NAME,
    )
    return TakenOver([*own, clip], f"{said} by {clip.state_key}, a fixed one")


def hold_limit(trainer: Any) -> Callable[[], None]:
    """Have a trainer not clip, and its checkpoints say that it does.

    Args:
        trainer: One that clips.

    Returns:
        Puts the limit back, unless somebody has set another one.
    """
    arguments, limit = trainer.args, trainer.args.max_grad_norm

    def save_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Its arguments are saved too; whoever trains with them again means the limit.
        held, arguments.max_grad_norm = arguments.max_grad_norm, arguments.max_grad_norm or limit
        try:
            return original(*args, **kwargs)
        finally:
            arguments.max_grad_norm = held

    arguments.max_grad_norm = 0.0
    undo = stand_before(trainer, "save_model", save_model)

    def put_back() -> None:
        undo()
        if arguments.max_grad_norm == 0:
            arguments.max_grad_norm = limit

    return put_back


def _limit(arguments: Any) -> float | None:
    limit = arguments.max_grad_norm
    return float(limit) if limit is not None and 0 < limit < math.inf else None
