"""Which kinds of faults there are, and what fields each of them has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FIELDS", "IN_ONE_PLACE", "KINDS", "REPEATS", "TARGETS"]

_PLACE: dict[str, Any] = {"rank": 0, "micro_batch": 0}
_OFTEN: dict[str, Any] = {"num_steps": 1}
_AGAIN: dict[str, Any] = {"repeats": "always"}

#: Kind -> field -> default, `kind` and `step` left out.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "nan_gradient": {**_PLACE, "layer": None, **_OFTEN, **_AGAIN},
    "inf_gradient": {**_PLACE, "layer": None, **_OFTEN, **_AGAIN},
    "layer_spike": {**_PLACE, "layer": None, "factor": 1000.0, **_OFTEN, **_AGAIN},
    "token_loss": {**_PLACE, "layer": None, "token": (0, 0), "factor": 1000.0, **_OFTEN, **_AGAIN},
    "bit_flip": {**_PLACE, "layer": None, "target": "gradient", "bit": None, **_OFTEN, "repeats": "never"},
    "corrupted_batch": {**_PLACE, "token": None, "factor": 1000.0, **_OFTEN},
    "stuck_loss_scale": {"factor": 2.0**-20, **_OFTEN},
    "dead_rank": dict(_PLACE),
    "learning_rate_jump": {"factor": 100.0, **_OFTEN},
}

KINDS = tuple(FIELDS)

#: Fields of a fault that is on one rank, in one micro-batch.
IN_ONE_PLACE = frozenset(_PLACE)

_ALL = ("always", "never", "differently")
#: What a number that is not finite is multiplied by changes nothing, so that it cannot come out differently.
REPEATS: Mapping[str, tuple[str, ...]] = {
    kind: _ALL if kind in ("layer_spike", "token_loss") else _ALL[:2] for kind in KINDS
}

TARGETS = ("gradient", "weight")
