"""Local norms of one optimizer's parameters while all is well: from sensors, or from the step's own norms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stabilizer.averaging import Averaging, averaging_of
from stabilizer.late import HostCopy
from stabilizer.localize.replaying import Replayer, unscaled
from stabilizer.localize.suspects import LocalNorms
from stabilizer.parameters import ParameterIndex
from stabilizer.segments import Segments
from stabilizer.sensors import Sensors
from stabilizer.store import GradientStore

__all__ = ["FirstNorms", "LocalGradients", "Trial"]

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
        is_resting: Whether the sensors are off because they tell nothing new.
        is_paused: Whether they are off because nobody asks; no local norms are known then.
        is_cut: Whether there were so many micro-batches in this step that the first ones are forgotten.
    """

    def __init__(self, model: nn.Module, store: GradientStore) -> None:
        self.model = model
        self.sensors = Sensors(model, store.index)
        self.segments = Segments(store.unit_ids, num_segments=store.num_units, device=store.device)
        self.local = LocalNorms(store.num_units, device=store.device)
        self.store = store
        self.is_resting = self.is_paused = self.is_cut = False
        self._trial = Trial(store.device) if store.reducer.world_size == 1 else None
        self._usual_changes = 0
        self._is_whole = False  # whether the last micro-batch is all of a step
        self._averaging: Averaging | None = None
        self.sensors.start()

    @property
    def averaging(self) -> Averaging:
        """How gradients of ranks become the step's; known after a forward pass."""
        if self._averaging is None:
            self._averaging = averaging_of(self.model, self.sensors)
        return self._averaging

    def take(self, replayer: Replayer | None, *, is_wanted: bool, is_whole: bool = False) -> None:
        """A micro-batch is over.

        Args:
            replayer: Tells the loss scale.
            is_wanted: Whether it belongs to the step.
            is_whole: Whether it is all of the step; `compare` comes then.
        """
        self._is_whole = is_wanted and is_whole
        if self.is_paused:
            return
        if self.is_resting:
            if is_wanted and not is_whole:
                self._wake()
            return
        seen = self.sensors.take()
        if is_wanted:
            self.add(seen, replayer, is_whole=is_whole)

    def add(self, seen: Tensor | None, replayer: Replayer | None, *, is_whole: bool) -> None:
        """Take what sensors have seen of a micro-batch of the step.

        Args:
            seen: Square sums by parameter of the store, shape (parameters,); `None` if they have not seen all of it.
            replayer: Tells the loss scale.
            is_whole: See `take`.
        """
        self.local.add(None if seen is None else unscaled(self.segments.sum(seen), replayer))
        if not is_whole:
            self._trial = None

    def compare(self, measured: Tensor) -> None:
        """The step has been measured.

        Args:
            measured: Square sums of the step by unit, without the loss scale.
        """
        if self.is_paused or not self._is_whole:
            return
        if self.is_resting:
            self._take_measured(measured)
        elif self._trial is not None and self.local.current:
            self._try(self._trial, self.local.current[-1], measured)

    def end_step(self, *, is_kept: bool) -> None:
        """The step is over.

        Args:
            is_kept: Whether its micro-batches tell what is usual.
        """
        self.is_cut = False
        self.local.end_step(is_kept=is_kept)

    def pause(self, is_paused: bool) -> None:
        """Between two steps: turn the sensors off for the next one, or on again.

        Args:
            is_paused: Whether nobody asks for the next step's local norms.
        """
        if is_paused == self.is_paused:
            return
        self.is_paused = is_paused
        if is_paused:
            self.sensors.close()
        elif not self.is_resting:
            self.sensors.start()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """The sensors are on, for replays."""
        self.sensors.start()
        try:
            yield
        finally:
            if self.is_resting or self.is_paused:
                self.sensors.close()

    def _take_measured(self, measured: Tensor) -> None:
        if self._num_changes() == self._usual_changes:
            self.local.add(measured)
        else:
            self._wake()

    def _wake(self) -> None:
        self.is_resting = False
        self.local.add(None)
        self.sensors.start()

    def _try(self, trial: Trial, squares: Tensor | None, measured: Tensor) -> None:
        """Learn whether the sensors tell anything that is not known without them."""
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


class FirstNorms:
    """Local norms of the micro-batches of a run's first step, when no optimizer has told yet what it trains.

    Without them a run that goes on from a checkpoint would know one step less than one that was never interrupted.
    Under FSDP2, whose first forward makes what is to be hooked, the first micro-batch is unseen all the same.

    Args:
        model: As it trains.

    Attributes:
        is_cut: As of `LocalGradients`.

    Raises:
        ValueError: If nothing in the model requires a gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        index = ParameterIndex(model)
        self._positions = {parameter: position for position, parameter in enumerate(index.parameters)}
        self._sensors = Sensors(model, index)
        self._seen: list[Tensor | None] = []
        self.is_cut = False
        self._sensors.start()

    @property
    def has_seen(self) -> bool:
        """Whether any gradient came since the last `take`."""
        return self._sensors.has_seen

    @property
    def is_unused(self) -> bool:
        """Whether none came, and none can have come unseen."""
        return self._sensors.is_complete and not self.has_seen

    def take(self, *, is_wanted: bool) -> None:
        """A micro-batch is over.

        Args:
            is_wanted: Whether it belongs to the step.
        """
        seen = self._sensors.take()
        if is_wanted:
            self._seen.append(seen)

    def drop(self, num: int) -> None:
        """Forget the first micro-batches: their gradients were thrown away.

        Args:
            num: How many.
        """
        del self._seen[:num]

    def hand_over(self, gradients: LocalGradients, replayer: Replayer | None) -> None:
        """An optimizer has come to its first step: give it its part of what was seen.

        Args:
            gradients: Its own.
            replayer: Tells the loss scale.
        """
        gradients.is_cut = self.is_cut
        positions = [self._positions.get(parameter) for parameter in gradients.store.index.parameters]
        for seen in self._seen:
            own = None
            if seen is not None and None not in positions:
                own = torch.stack([seen[position] for position in positions])
            gradients.add(own, replayer, is_whole=len(self._seen) == 1)
        self.close()

    def close(self) -> None:
        """Take the sensors away."""
        self._sensors.close()
        self._seen.clear()


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
