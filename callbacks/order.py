"""When a callback runs within a step: order as data."""

from __future__ import annotations

import enum

__all__ = ["Order"]


class Order(enum.IntEnum):
    """When a callback runs within a step, whatever its place in the user's list."""

    CLIP_LAYERS = 20
    CLIP_TOTAL = 30
    # Whether a step that is out of the ordinary comes out so again: what repeats is searched after that.
    VERDICT = 34
    # Reads what clips hold the norms against; the search itself comes before anything is done to the gradients.
    LOCALIZE = 35
    SKIP = 40
    LOG = 50
    # Reads what the others have found at the same step.
    WARN = 60
