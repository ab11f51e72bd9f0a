"""StepRunner: what a search and a rerun of one step have in common."""

from __future__ import annotations

from collections.abc import Sequence

from stabilizer.localize.lockstep import Lockstep
from stabilizer.localize.recording import MicroBatch
from stabilizer.localize.replaying import Replayer
from stabilizer.localize.surveying import Survey
from stabilizer.localize.suspects import LocalNorms
from stabilizer.segments import Segments
from stabilizer.sensors import Sensors
from stabilizer.store import GradientStore

__all__ = ["StepRunner"]


class StepRunner:
    """Base of what runs micro-batches of a step again, on all ranks together.

    Args:
        store: Holds the step's gradients.
        replayer: The host's.
        micro_batches: Of the step, on this rank.
        local: Local norms of the step and of those before.
        sensors: Running.
        segments: Adds parameters up to units of the store.
        reason: Why the step cannot be run again as it was.
    """

    def __init__(
        self,
        store: GradientStore,
        replayer: Replayer,
        *,
        micro_batches: Sequence[MicroBatch],
        local: LocalNorms,
        sensors: Sensors,
        segments: Segments,
        reason: str | None = None,
    ) -> None:
        self._store, self._replayer, self._reason = store, replayer, reason
        self._sensors, self._segments, self._local = sensors, segments, local
        self._parameters = list(store.index.parameters)
        self._reducer = store.reducer
        self._lock = Lockstep(self._reducer)
        self._survey = Survey(
            self._lock,
            self._reducer,
            micro_batches=micro_batches,
            local=local,
            sensors=sensors,
            index=store.index,
            is_averaged=replayer.is_replicated or store.reducer.world_size == 1,
            knows_reduction=replayer.knows_reduction,
        )

    def _check(self) -> None:
        """Raise if the step cannot be run again."""
        reason = self._reason or self._replayer.reason
        if reason is not None:
            raise RuntimeError(reason)
