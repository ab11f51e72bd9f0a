"""What one suite's searches need: sensors on its parameters while all is well, and a localizer when it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.failures import Failures
from stabilizer.callbacks.local_gradients import LocalGradients
from stabilizer.callbacks.replays import Replays
from stabilizer.errors import TrainingStoppedError
from stabilizer.localize.localizer import Localizer
from stabilizer.localize.maps import blocks_of
from stabilizer.localize.recording import MicroBatch, Recorder
from stabilizer.localize.replaying import Replayer
from stabilizer.localize.tap import Tap
from stabilizer.plan import StepPlan
from stabilizer.store import GradientStore

__all__ = ["Searches", "StepReplay", "search_limitations"]


MOVED = (
    "another optimizer has moved since the forward, so that it would come out differently: only the first optimizer "
    "that moves in a step can be searched"
)


@dataclasses.dataclass(frozen=True, eq=False)
class StepReplay:
    """A step that can be run again.

    Attributes:
        store: Holds its gradients.
        replayer: The host's; `None` where it has none.
        micro_batches: Of the step, on this rank.
        gradients: Local norms.
        grad_scale: What the step's gradients are still multiplied by, shape ().
        reason: Why it cannot be run again as it was.
        asked: Callbacks that are to be called though they have not asked for this search.
    """

    store: GradientStore
    replayer: Replayer | None
    micro_batches: Sequence[MicroBatch]
    gradients: LocalGradients
    grad_scale: Tensor | None
    reason: str | None = None
    asked: list[StabilizerCallback] = dataclasses.field(default_factory=list)

    def ask(self, callback: StabilizerCallback) -> None:
        """Have another callback search this step too; on every rank alike.

        Args:
            callback: One that localises, and that comes later in the order of the step.
        """
        self.asked.append(callback)

    def tap(self, name: str | None) -> Tap:
        """Where the gate is to stand.

        Args:
            name: Of a module; `None` for the output embedding.
        """
        assert self.replayer is not None
        return Tap(self.replayer.model, name, blocks=blocks_of(self.replayer.model))

    def localizer(self, tap: Tap) -> Localizer:
        """What searches it.

        Args:
            tap: Where the gate stands.
        """
        assert self.replayer is not None
        return Localizer(
            self.store,
            self.replayer,
            micro_batches=self.micro_batches,
            local=self.gradients.local,
            sensors=self.gradients.sensors,
            segments=self.gradients.segments,
            tap=tap,
            blocks=blocks_of(self.replayer.model),
            reason=self.reason,
        )


def search_limitations(model: nn.Module, *, tap: str | None) -> list[str]:
    """What a search in this model cannot do as one expects.

    Args:
        model: As it trains.
        tap: Name of the module that is gated, if there is one.
    """
    found = []
    place = Tap(model, tap, blocks=blocks_of(model))
    if place.note is not None:
        found.append(place.note)
    if not place.is_known:
        found.append("no output embedding was found: name a module in tap=, unless the loss calls token_gate")
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        found.append("the host reads one number a step before the optimizer moves, and waits for the device")
    return found


class Searches:
    """One suite's part of what is kept for a search.

    Args:
        callbacks: All of ours.
        replays: Of the run; `None` where the host keeps none.
        model: As it trains, wrapped.
        number: Position of the optimizer.
    """

    def __init__(
        self, callbacks: Sequence[StabilizerCallback], replays: Replays | None, *, model: nn.Module, number: int
    ) -> None:
        self._callbacks = list(callbacks)
        self._replays = replays if replays is not None and replays.is_on else None
        self._model, self._number = model, number
        self._gradients: LocalGradients | None = None

    @property
    def gradients(self) -> LocalGradients | None:
        """Local norms of the step at hand; `None` where nobody asks, and before the second step."""
        return self._gradients

    def close_micro_batches(self, store: GradientStore) -> None:
        """The gradients of a step are complete, and will be measured.

        Args:
            store: Of the suite; another one when layers are unfrozen.
        """
        if self._replays is None:
            return
        self._replays.close_step(store)
        if self._gradients is None or self._gradients.store is not store:
            self.close()
            self._gradients = self._replays.gradients_of(self._number, self._model, store)

    def compare(self, store: GradientStore) -> None:
        """The gradients of a step are measured.

        Args:
            store: Of the suite.
        """
        if self._replays is not None:
            self._replays.compare(store)

    def run(
        self,
        contexts: Sequence[StepContext],
        plan: StepPlan,
        store: GradientStore,
        failures: Failures,
        *,
        grad_scale: Tensor | None,
    ) -> bool:
        """Let callbacks search the step; on every rank together.

        Args:
            contexts: Of all callbacks.
            plan: Of the step: who wants it to be searched.
            store: Holds the step's gradients.
            failures: Takes what goes wrong.
            grad_scale: What the gradients are still multiplied by, shape ().

        Returns:
            Whether the gradients are other ones now.
        """
        changed, wanted = False, self._wanted(plan, store)
        asked: list[StabilizerCallback] = []
        for number, (callback, context) in enumerate(zip(self._callbacks, contexts, strict=True)):
            is_meant = number in wanted or callback in asked
            if not callback.localizes or callback.has_failed or not is_meant:
                continue
            try:
                replay = self._replay(store, grad_scale=grad_scale, asked=asked)
                with replay.gradients.awake():
                    changed = callback.localize(context, replay) or changed
            except TrainingStoppedError:
                raise
            except Exception as error:
                failures.of_callback(number, "localize", error, step=context.step)
        for context in contexts:
            context.was_searched = True
        return changed

    def _wanted(self, plan: StepPlan, store: GradientStore) -> set[int]:
        """Who wants this search, on any rank: a collective, where there are several who may."""
        numbers = [number for number, callback in enumerate(self._callbacks) if callback.localizes]
        if len(numbers) < 2:
            return set(numbers)
        none = torch.zeros((), dtype=torch.bool, device=store.device)
        flags = torch.stack([plan.searches.get(number, none) for number in numbers]).to(torch.float32)
        return {number for number, flag in zip(numbers, store.sum(flags).tolist(), strict=True) if flag > 0}

    def _replay(
        self, store: GradientStore, *, grad_scale: Tensor | None, asked: list[StabilizerCallback]
    ) -> StepReplay:
        assert self._replays is not None
        assert self._gradients is not None
        recorder = self._replays.recorder
        return StepReplay(
            store=store,
            replayer=self._replays.replayer,
            micro_batches=recorder.micro_batches if isinstance(recorder, Recorder) else [],
            gradients=self._gradients,
            grad_scale=grad_scale,
            reason=MOVED if recorder is not None and self._replays.has_moved else None,
            asked=asked,
        )

    def end_step(self, *, next_step: int, is_kept: bool = True) -> None:
        """The step is over.

        Args:
            next_step: Number of the next one.
            is_kept: Whether the optimizer has moved.
        """
        working = [callback for callback in self._callbacks if not callback.has_failed]
        localizes = any(callback.localizes for callback in working)
        intervals = [callback.parts_every_n_steps for callback in working if callback.parts_every_n_steps is not None]
        if self._replays is not None:
            self._replays.end_step()
            if not localizes:
                self._replays.drop_batches()
            if not localizes and not intervals:
                self.stop()
        if self._gradients is not None:
            self._gradients.end_step(is_kept=is_kept)
            self._gradients.pause(not localizes and all(next_step % interval for interval in intervals))

    def stop(self) -> None:
        """Nothing can be searched any more: keep nothing for it."""
        if self._replays is not None:
            self._replays.stop()
            self._replays = None
        self.close()

    def close(self) -> None:
        """Take the sensors away."""
        if self._gradients is not None:
            self._gradients.sensors.close()
            self._gradients = None
