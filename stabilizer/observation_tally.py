"""One rank's observations since the last optimizer step, kept as sums on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer.observation_sums import observation_sums
from stabilizer.observations import ObservationSums
from stabilizer.rollout.mismatch import BOUNDS

__all__ = ["ObservationTally"]

_Sums = dict[torch.device, ObservationSums]


class ObservationTally:
    """Adds up what is observed, and hands it out once a step, as `LossTally` does with losses.

    Gradients that are thrown away take nothing with them: rewards, say, are told before an update clears the old ones.

    Args:
        bounds: As of `observation_sums`.
        pass_reward: As of `observation_sums`.

    Attributes:
        is_paused: Tells whether a forward pass is a repeated one, whose observations have been taken before.

    Example:
        >>> tally = ObservationTally()
        >>> tally.observe(entropy=0.5)
        >>> tally.take(0)
        >>> tally.given(torch.device("cpu")).sums[0].item(), tally.given(torch.device("cpu")).sums[0].item()
        (1.0, 0.0)
    """

    def __init__(self, *, bounds: tuple[float, float] = BOUNDS, pass_reward: float = 0.5) -> None:
        self.bounds, self.pass_reward = bounds, pass_reward
        self.is_paused: Callable[[], bool] = _never
        self._pending: _Sums = {}
        # Of the next step, whatever becomes of the gradients at hand.
        self._late: _Sums = {}
        self._taken: _Sums = {}
        self._given: _Sums = {}
        self._takers: set[int] = set()

    def observe(self, *, is_late: bool = False, **observed: Any) -> None:
        """Take what is observed of a micro-batch.

        Args:
            is_late: Whether the step at hand has been measured already, so that this counts for the next one.
            **observed: See `observation_sums`.

        Raises:
            ValueError: If a name is not known, or a shape does not fit.
        """
        if self.is_paused():
            return
        if is_late:
            self._late = self._added(self._late, observed)
            return
        self._pending = self._added(self._pending, observed)

    def take(self, optimizer_index: int) -> None:
        """Give an optimizer the observations of its step; see `LossTally.take`.

        Args:
            optimizer_index: Whose step it is.
        """
        if self._pending or self._late:
            self._taken, self._takers = _merged(self._late, self._pending), set()
            self._late = {}
            self.discard()
        self._given = {} if optimizer_index in self._takers else self._taken
        self._takers.add(optimizer_index)

    def given(self, device: torch.device) -> ObservationSums:
        """What was given to the optimizer whose step it is; the second time nothing.

        Args:
            device: Where it is wanted.
        """
        given, self._given = self._given, {}
        total = ObservationSums.empty(device)
        for sums in given.values():
            total = total + sums.to(device)
        return total

    def put_back(self, optimizer_index: int) -> None:
        """See `LossTally.put_back`."""
        self._takers.discard(optimizer_index)

    def discard(self) -> None:
        """Forget what no step has taken."""
        self._pending = {}

    def state_dict(self) -> dict[str, Any]:
        """What the next step has been told already, as CPU tensors."""
        if not self._late:
            return {}
        total = ObservationSums.empty(torch.device("cpu"))
        for sums in self._late.values():
            total = total + sums.to(torch.device("cpu"))
        return {"sums": total.sums.clone(), "maxima": total.maxima.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`.
        """
        self._pending, self._taken, self._given, self._takers = {}, {}, {}, set()
        self._late = {}
        if state:
            self._late[torch.device("cpu")] = ObservationSums(state["sums"].clone(), state["maxima"].clone())

    def _added(self, sums: _Sums, observed: Mapping[str, Any]) -> _Sums:
        return _merged(sums, observation_sums(bounds=self.bounds, pass_reward=self.pass_reward, **observed))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "is_paused": _never}


def _merged(first: _Sums, second: _Sums) -> _Sums:
    both = dict(first)
    for device, sums in second.items():
        both[device] = both[device] + sums if device in both else sums
    return both


def _never() -> bool:
    return False
