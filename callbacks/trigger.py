"""When a gradient is so far out of the ordinary that it is searched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer.localize.result import Suspicion
from stabilizer.thresholds import LayerThresholds, RuleSpec

__all__ = ["Limits", "Observation", "Trigger"]

_STEPS = 64
# A norm is normal up to as many times its usual value as its threshold is; at least, and where that is not known.
_MIN_FACTOR, _FACTOR = 2.0, 3.0


@dataclasses.dataclass(frozen=True, eq=False)
class Limits:
    """Thresholds that somebody else keeps.

    Attributes:
        owner: Whose they are, for a reader.
        thresholds: Shape (n,); infinity where there is none yet.
        find_typical: Gives usual norms, shape (n,); NaN where they are not known. Only a search asks for them.
    """

    owner: str
    thresholds: Tensor
    find_typical: Callable[[], Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Observation:
    """A step's norms against what sets off a search: the total first, then the layers.

    Attributes:
        names: "total", then the layers.
        norms: As measured, shape (n,).
        compared: For the usual number of tokens, shape (n,).
        thresholds: Shape (n,); infinity where there is none yet.
        excess: `compared / thresholds`, shape (n,).
        owners: Whose the thresholds are.
        find_typical: As of `Limits`, until the step is over.
    """

    names: Sequence[str]
    norms: Tensor
    compared: Tensor
    thresholds: Tensor
    excess: Tensor
    owners: Sequence[str]
    find_typical: Callable[[], Tensor]

    def worst(self, ratio: float) -> int:
        """Which norm is searched: the total if it is over `ratio` thresholds, else the layer that is farthest out.

        Args:
            ratio: Of the trigger.

        Returns:
            Position in `names`; that of the total for gradients that are not finite.
        """
        excess = torch.nan_to_num(self.excess, nan=torch.inf).tolist()
        return 0 if excess[0] > ratio else max(range(len(excess)), key=excess.__getitem__)

    def suspicion(self, worst: int, *, layer_names: Sequence[str], unit_layers: Sequence[int]) -> Suspicion:
        """What a search is told.

        Args:
            worst: Position in `names` of the norm that is searched.
            layer_names: All layers of the view.
            unit_layers: Position of its layer for every unit of the store.
        """
        threshold, typical = float(self.thresholds[worst]), float(self.find_typical()[worst])
        factor = threshold / typical if typical > 0 and math.isfinite(threshold) else _FACTOR
        factor = max(factor, _MIN_FACTOR) if math.isfinite(factor) else _FACTOR
        if not typical > 0 and math.isfinite(threshold):
            typical = threshold / factor  # of a rule that follows nothing
        # Local norms are compared as measured: of few tokens more is normal.
        measured = float(torch.nanmedian(self.norms / self.compared))
        chosen = [not worst or layer_names[layer] == self.names[worst] for layer in unit_layers]
        return Suspicion(
            norm=float(self.norms[worst]),
            chosen=torch.tensor(chosen, device=self.norms.device),
            factor=factor * measured if measured > 0 and math.isfinite(measured) else factor,
            typical=typical,
        )


class Trigger:
    """Compares norms with the thresholds in use, or with a rule of its own where nobody keeps any.

    A mean over few tokens scatters more than one over many: norms are compared as if every step had the usual number,
    times the square root of tokens / median.

    Args:
        layer_names: Of the layers that are looked at.
        rule: Of its own.
        owns_total: Whether nobody else has a threshold for the total.
        owns_layers: Whether nobody else has thresholds for these layers.
        device: Where the norms are.
    """

    def __init__(
        self,
        layer_names: Sequence[str],
        *,
        rule: RuleSpec,
        owns_total: bool,
        owns_layers: bool,
        device: torch.device,
    ) -> None:
        self.names = ("total", *layer_names)
        self._owned = [*([0] if owns_total else []), *(range(1, len(self.names)) if owns_layers else [])]
        self._own: LayerThresholds | None = None
        if self._owned:
            # The total has no layer's name.
            names = [self.names[position] if position else "(total)" for position in self._owned]
            self._own = LayerThresholds(names, rule=rule, device=device)
            self._own_name = self._own.describe().split("(")[0]
        self._is_all = len(self._owned) == len(self.names)
        self._tokens = torch.full((_STEPS,), torch.nan, dtype=torch.float64, device=device)
        self._num_steps = 0
        self._weight: Tensor | None = None

    def look(
        self,
        norms: Tensor,
        *,
        step: int,
        weight: Tensor | None,
        total: Limits | None,
        layers: Limits | None,
    ) -> Observation:
        """Hold a step's norms against the thresholds; nothing is remembered.

        Args:
            norms: The total first, then the layers, shape (n,).
            step: The optimizer step.
            weight: Tokens of the step, shape (); `None` if they are not known.
            total: Of the total, where somebody else keeps it.
            layers: Of the layers, where somebody else keeps them.
        """
        self._weight = weight
        compared = norms
        if weight is not None and self._num_steps:
            factor = (weight / torch.nanmedian(self._tokens)).sqrt()
            # Neither of the two is infinite.
            compared = norms * torch.where(factor > 0, factor, 1.0).to(norms.dtype)
        own = None if self._own is None else self._limits(compared, step=step)
        thresholds, find_typical, owners = self._joined(total, layers, own)
        return Observation(self.names, norms, compared, thresholds, compared / thresholds, owners, find_typical)

    def update(self, observation: Observation, *, valid: Tensor) -> None:
        """The step is over.

        Args:
            observation: Of it.
            valid: Whether its norms may enter a history, shape (), bool.
        """
        if self._own is not None:
            norms = observation.compared if self._is_all else self._of_own(observation.compared)
            self._own.update(norms, valid=valid)
        if self._weight is not None:
            slot = self._tokens[self._num_steps % _STEPS]
            slot.copy_(torch.where(self._weight > 0, self._weight.to(slot.dtype), torch.nan))
            self._num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU clones."""
        own = None if self._own is None else self._own.state_dict()
        return {"own": own, "tokens": self._tokens.cpu().clone(), "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        if self._own is not None and state["own"] is not None:
            self._own.load_state_dict(state["own"])
        self._tokens.copy_(state["tokens"])
        self._num_steps = int(state["num_steps"])

    def _limits(self, compared: Tensor, *, step: int) -> Limits:
        own = self._own
        assert own is not None
        norms = compared if self._is_all else self._of_own(compared)
        return Limits(self._own_name, own.thresholds(norms, step=step), lambda: own.typical)

    def _of_own(self, values: Tensor) -> Tensor:
        return values[:1] if self._owned == [0] else values[1:]

    def _joined(
        self, total: Limits | None, layers: Limits | None, own: Limits | None
    ) -> tuple[Tensor, Callable[[], Tensor], list[str]]:
        if self._is_all:
            assert own is not None
            return own.thresholds, own.find_typical, [own.owner] * len(self.names)
        first, rest = total or own, layers or own
        assert first is not None
        assert rest is not None
        thresholds = torch.cat([first.thresholds[:1], rest.thresholds])

        def find_typical() -> Tensor:
            return torch.cat([first.find_typical()[:1], rest.find_typical()])

        return thresholds, find_typical, [first.owner, *([rest.owner] * (len(self.names) - 1))]
