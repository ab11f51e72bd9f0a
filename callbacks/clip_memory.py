"""What a clip remembers of one optimizer, and what it finds at one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.clip_counts import WINDOW, ClipRates, SkipCounter
from stabilizer.thresholds import LayerThresholds

__all__ = ["ClipMemory", "Spikes"]

_NUM_WORST = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Spikes:
    """A step's norms against their thresholds.

    Attributes:
        norms: Shape (n,): of the selected layers, or of the total alone.
        limits: Their thresholds, infinity where there is none.
        flags: Which norms are over theirs, bool.
        coefficients: What brings those down to it, 1 for the others.
    """

    norms: Tensor
    limits: Tensor
    flags: Tensor
    coefficients: Tensor


class ClipMemory:
    """Thresholds, shares of clipped steps and counts of skipped ones.

    Args:
        names: What has a threshold.
        thresholds: Of these.
        device: Where they are.
    """

    def __init__(self, names: Sequence[str], thresholds: LayerThresholds, *, device: torch.device) -> None:
        self.names, self.thresholds = tuple(names), thresholds
        self.rates = ClipRates(len(self.names), device=device)
        self.skips = SkipCounter(device=device)
        self._retired: dict[str, Any] | None = None

    def find(self, norms: Tensor, *, step: int) -> Spikes:
        """Hold a step's norms against their thresholds; nothing is remembered.

        Args:
            norms: Shape (n,), float32.
            step: The optimizer step.
        """
        limits = self.thresholds.thresholds(norms, step=step)
        flags = (norms > limits) & torch.isfinite(norms)
        return Spikes(norms, limits, flags, torch.where(flags, limits / norms, 1.0))

    def summary(self, source: str, *, verb: str) -> list[tuple[str, str]]:
        """The shares of steps over a threshold for people to read, the worst first; waits for the device.

        Args:
            source: Key of the callback.
            verb: What was done to such a norm.

        Returns:
            A row, or none if there was no such step.
        """
        shares = dict(zip(self.names, self.rates.shares.tolist(), strict=True))
        worst = [name for name in sorted(shares, key=shares.__getitem__, reverse=True)[:_NUM_WORST] if shares[name]]
        if not worst:
            return []
        shown = [f"{name} {_percent(shares.pop(name))}" for name in worst]
        shown += [f"{len(shares)} others at most {_percent(max(shares.values()))}"] if shares else []
        num_steps = min(self.rates.num_steps, WINDOW)
        return [(verb, f"{', '.join(shown)} of the last {num_steps:,} steps ({source})")]

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU clones; of layers that are frozen for now as well."""
        own = {
            "names": list(self.names),
            "thresholds": self.thresholds.state_dict(),
            "rates": self.rates.state_dict(),
            "skips": self.skips.state_dict(),
        }
        return own if self._retired is None else {**own, "retired": self._retired}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state, name by name; what belongs to other names is kept for when these come back.

        Args:
            state: What `state_dict` gave.
        """
        columns = {name: column for column, name in enumerate(state["names"])}
        self.thresholds.load_state_dict(_united(state))
        self.rates.load_state_dict(state["rates"], [columns.get(name) for name in self.names])
        self.skips.load_state_dict(state["skips"])
        others = _without(_united(state), self.names)
        self._retired = others if others["layers"] else None


def _percent(share: float) -> str:
    return f"{share:.1%}" if share else "0%"


def _united(state: Mapping[str, Any]) -> dict[str, Any]:
    """Thresholds of the layers that train and of those that do not, as one state."""
    own, retired = state["thresholds"], state.get("retired")
    if retired is None:
        return dict(own)
    offset = len(own["layers"])
    rules = [{**rule, "positions": [offset + at for at in rule["positions"]]} for rule in retired["rules"]]
    return {"layers": [*own["layers"], *retired["layers"]], "rules": [*own["rules"], *rules]}


def _without(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The part of a state of thresholds that is of other layers than these."""
    kept = [position for position, name in enumerate(state["layers"]) if name not in names]
    places = {position: place for place, position in enumerate(kept)}
    rules = []
    for rule in state["rules"]:
        columns = [column for column, position in enumerate(rule["positions"]) if position in places]
        if columns:
            positions = [places[rule["positions"][column]] for column in columns]
            values = {name: value[..., columns].clone() for name, value in rule["state"].items()}
            rules.append({**rule, "positions": positions, "state": values})
    return {"layers": [state["layers"][position] for position in kept], "rules": rules}
