"""Local norms of one optimizer's parameters while all is well: from sensors, or from the step's own norms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stabilizer.late import HostCopy
from stabilizer.localize.replaying import Replayer, unscaled
from stabilizer.localize.suspects import LocalNorms
from stabilizer.segments import Segments
from stabilizer.sensors import Sensors
from stabilizer.store import GradientStore

__all__ = ["LocalGradients", "Trial"]

_TRIAL_STEPS = 8
# Of square sums, relative and absolute.
_TOLERANCE, _NOTHING = 1e-3, 1e-30


class LocalGradients:
    """Local norms of one optimizer's parameters.

    Where one process has one micro-batch a step, its local norms are the step's. Sensors that have seen nothing else
    for a while rest: the step's norms are taken, as long as nobody changes gradients before they are measured. What
    does not fit wakes the sensors for good; of that step there are no local norms.

    Args:
        model: As it trains, wrapped.
        store: Of the optimizer's gradients.

    Attributes:
        is_resting: Whether the sensors are off.
    """

    def __init__(self, model: nn.Module, store: GradientStore) -> None:
        self.sensors = Sensors(model, store.index)
        self.segments = Segments(store.unit_ids, num_segments=store.num_units, device=store.device)
        self.local = LocalNorms(store.num_units, device=store.device)
        self.store = store
        self.is_resting = False
        self._trial = Trial(store.device) if store.reducer.world_size == 1 else None
        self._usual_changes = 0
        self.sensors.start()

    def take(self, replayer: Replayer | None, *, is_wanted: bool, measured: Tensor | None = None) -> None:
        """A micro-batch is over.

        Args:
            replayer: Tells the loss scale.
            is_wanted: Whether it belongs to the step.
            measured: Square sums of the step by unit, without the loss scale, if it is all of the step.
        """
        if self.is_resting:
            if is_wanted:
                self._take_measured(measured)
            return
        seen = self.sensors.take()
        if not is_wanted:
            return
        squares = None if seen is None else unscaled(self.segments.sum(seen), replayer)
        self.local.add(squares)
        if self._trial is not None:
            self._try(self._trial, squares, measured)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """The sensors are on, for replays."""
        self.sensors.start()
        try:
            yield
        finally:
            if self.is_resting:
                self.sensors.close()

    def _take_measured(self, measured: Tensor | None) -> None:
        if measured is not None and self._num_changes() == self._usual_changes:
            self.local.add(measured)
            return
        self.is_resting = False
        self.local.add(None)
        self.sensors.start()

    def _try(self, trial: Trial, squares: Tensor | None, measured: Tensor | None) -> None:
        """Learn whether the sensors tell anything that is not known without them."""
        if measured is None:
            self._trial = None
            return
        if squares is None:  # the first step of sharded parameters
            return
        num_changes = self._num_changes()
        if num_changes != self._usual_changes:
            trial, self._usual_changes = Trial(self.store.device), num_changes
        trial.see(squares, measured)
        self._trial = trial if trial.verdict is None else None
        if trial.verdict:
            self.is_resting = True
            self.sensors.close()

    def _num_changes(self) -> int:
        """How often gradients were changed in place since they were made: more often, where somebody clips them."""
        gradients = [parameter.grad for parameter in self.store.index.parameters]
        return sum(gradient._version for gradient in gradients if gradient is not None)


class Trial:
    """Whether local norms and a step's are the same, step after step; nobody waits for the answer.

    Args:
        device: Where they are.

    Attributes:
        verdict: `None` as long as it is not known.
    """

    def __init__(self, device: torch.device) -> None:
        self.verdict: bool | None = None
        # Steps at which they agree, and at which they do not; one with a value that is not finite tells nothing.
        self._counts = torch.zeros(2, device=device)
        self._num_steps = 0
        self._answer: HostCopy | None = None

    def see(self, squares: Tensor, measured: Tensor) -> None:
        """Compare those of a step.

        Args:
            squares: What the sensors have seen, shape (units,).
            measured: What the store has measured, shape (units,).
        """
        squares = squares.to(measured.dtype)
        is_same = torch.isclose(squares, measured, rtol=_TOLERANCE, atol=_NOTHING).all()
        is_finite = torch.isfinite(squares + measured).all()
        self._counts += torch.stack([is_same & is_finite, ~is_same & is_finite])
        self._num_steps += 1
        if self._answer is not None and self._answer.is_ready:
            agreeing, differing = self._answer.read().tolist()
            self._answer = None
            if differing or agreeing >= _TRIAL_STEPS:
                self.verdict = not differing
        if self._answer is None and self._num_steps >= _TRIAL_STEPS:
            self._answer = HostCopy(self._counts)
