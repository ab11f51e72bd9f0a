"""Prober: one forward of a micro-batch, then gated backward passes on the kept graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from stabilizer.errors import logger
from stabilizer.fsdp import has_fsdp1
from stabilizer.gate import Gate
from stabilizer.gating import gating
from stabilizer.localize.guard import Guard
from stabilizer.localize.lockstep import Lockstep
from stabilizer.localize.maps import BlockWatch, leaves_of
from stabilizer.localize.meeting import meeting, recover
from stabilizer.localize.recording import MicroBatch
from stabilizer.localize.replaying import Replayer, unscaled
from stabilizer.localize.tap import Tap
from stabilizer.localize.tensor_group import TensorGroup
from stabilizer.norms import norms
from stabilizer.reduction import world_size
from stabilizer.segments import Segments
from stabilizer.sensors import Sensors

__all__ = ["Pass", "Prober", "no_gate"]


def no_gate(tap: Tap) -> str:
    """Say that no gate was passed, and the way out.

    Args:
        tap: What was to be gated.
    """
    return (
        f"no gate was passed in the forward ({tap.name}): name a module in tap=, or put stabilizer.token_gate(x) on "
        "the losses or log-probs of the tokens"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """What one backward pass has shown on this rank.

    Attributes:
        squares: Local square sums by unit of the store, shape (units,), without the loss scale.
        arrived: Norm of the gradient that arrived at every unit of the gate, without the loss scale, shape (units,);
            `None` if none did.
    """

    squares: Tensor
    arrived: Tensor | None


class Prober:
    """Runs one micro-batch again, for one search, inside a guard.

    Args:
        replayer: The host's.
        lock: Keeps the ranks together.
        guard: Entered.
        sensors: Running.
        segments: Adds parameters up to units of the store.
        parameters: Those of the optimizer.
        tap: What is gated where the model has no `token_gate`.
        blocks: Repeated blocks, to be watched.
        group: Ranks with the same data.
        needs_gate: Whether a forward that passes no gate is an error. Where something is not finite, the forward itself
            tells the block in which it begins.
        on_pass: Called after every backward pass.

    Attributes:
        gate: Of the last forward.
        watch: Of the last forward.
        num_passes: Backward passes so far.
        num_forwards: Forward passes so far.
    """

    def __init__(
        self,
        replayer: Replayer,
        lock: Lockstep,
        *,
        guard: Guard,
        sensors: Sensors,
        segments: Segments,
        parameters: Sequence[Tensor],
        tap: Tap,
        blocks: Sequence[tuple[str, nn.Module]],
        group: TensorGroup,
        needs_gate: bool = True,
        on_pass: Callable[[], None] | None = None,
    ) -> None:
        self._needs_gate, self._on_pass = needs_gate, on_pass
        self._replayer, self._lock, self._guard = replayer, lock, guard
        self._sensors, self._segments = sensors, segments
        self._parameters, self._tap, self._blocks, self._group = list(parameters), tap, blocks, group
        # Its storage is freed after a backward pass, kept graph or not.
        self._keeps_graph = not has_fsdp1(replayer.model)
        self._loss: Tensor | None = None
        self._micro_batch: MicroBatch | None = None
        self._has_passed = False
        self._open = contextlib.ExitStack()
        self.gate, self.watch = Gate(), BlockWatch(blocks)
        self.num_passes = self.num_forwards = 0

    @property
    def is_partial(self) -> bool:
        """Whether layers stand between the gate and the loss, whose gradients do not come through it."""
        return self._tap.note is not None and self.gate.is_used

    def forward(self, micro_batch: MicroBatch | None) -> None:
        """Run the forward of a micro-batch as it was.

        Args:
            micro_batch: Of this step; `None` where this rank has none and the others do.

        Raises:
            RuntimeError: If no gate was passed and one is needed.
        """
        if micro_batch is None:
            self.drop()
            self._micro_batch, self.gate, self.watch = None, Gate(), BlockWatch(self._blocks)
            return
        with self._together():
            self._forward(micro_batch)

    def _forward(self, micro_batch: MicroBatch) -> None:
        self._run(micro_batch)
        if not self.gate.is_used and self._tap.fall_back():
            self._run(micro_batch)
        if not self.gate.is_used and self._needs_gate:
            raise RuntimeError(no_gate(self._tap))
        if not self.gate.is_used and not self._blocks:
            # There is nothing else to go by: any module is a place.
            self._blocks = leaves_of(self._replayer.model)
            self._run(micro_batch)
        if self.gate.is_by_hand or not self.gate.is_used:
            self._tap.note = None  # nothing but that is gated
        self.gate.seal()

    def _run(self, micro_batch: MicroBatch) -> None:
        self.drop()
        self._micro_batch, self._has_passed = micro_batch, False
        self._guard.restore_buffers(micro_batch)
        self.gate, self.watch = Gate(), BlockWatch(self._blocks)
        self.num_forwards += 1
        # Open until the last pass: reentrant checkpointing computes parts of the forward again in a backward.
        self._open.enter_context(gating(self.gate))
        self._open.enter_context(self._tap.on(self.gate))
        self._open.enter_context(self.watch)
        with torch.enable_grad():
            self._loss = self._replayer.loss(micro_batch)

    def backward(self, opened: Tensor | None) -> Pass:
        """One pass.

        Args:
            opened: Units whose gate is open, shape (units,), bool; `None` for all.

        Raises:
            RuntimeError: If no sensor saw it.
        """
        self._clear()
        self.num_passes += 1
        if self._micro_batch is None:
            return Pass(torch.zeros(()), None)
        with self._together():
            found = self._backward(self._micro_batch, opened)
        if self._on_pass is not None:
            self._on_pass()
        return found

    def _backward(self, micro_batch: MicroBatch, opened: Tensor | None) -> Pass:
        if self._loss is None or (self._has_passed and not self._keeps_graph):
            self._forward(micro_batch)
            self._clear()
        assert self._loss is not None
        self.gate.set_open(opened)
        self._has_passed = True
        self._loss.backward(retain_graph=self._keeps_graph)
        seen = self._sensors.take()
        if seen is None:
            raise RuntimeError(f"no local norms: {self._sensors.reason or 'the sensors saw no backward pass'}")
        squares = unscaled(self._summed(self._segments.sum(seen)), self._replayer)
        arrived = self._group.scores(self.gate.arrived)
        scale = self._replayer.scale()
        if arrived is not None and scale is not None:
            arrived = arrived / scale.to(arrived.device, torch.float32)
        return Pass(squares, arrived)

    def _summed(self, squares: Tensor) -> Tensor:
        """Of all ranks with the same data."""
        return self._group.sum_(squares)

    def take_gradients(self) -> list[Tensor | None]:
        """The gradients of the last pass, as the replayed model leaves them; they are not kept here."""
        taken = [parameter.grad for parameter in self._parameters]
        self._guard.forget_gradients()
        return taken

    @property
    def has_own_gradients(self) -> bool:
        """Whether the gradients of a pass are this rank's own and whole."""
        return self._replayer.is_replicated or world_size() == 1

    def squares_between(self, one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> Tensor | None:
        """Square sums of a difference of gradients, where they are this rank's own and whole.

        Args:
            one: As of `take_gradients`.
            other: Likewise.

        Returns:
            As of `Pass`; `None` where gradients are reduced, cut or of half precision.
        """
        known = [gradient for gradient in (*one, *other) if gradient is not None]
        if not self.has_own_gradients or any(gradient.dtype in (torch.float16, torch.bfloat16) for gradient in known):
            return None
        between = [
            (a if b is None else -b if a is None else a - b) if a is not None or b is not None else None
            for a, b in zip(one, other, strict=True)
        ]
        return unscaled(self._segments.sum(norms(between, device=known[0].device).square()), self._replayer)

    def drop(self) -> None:
        """Let go of the graph, and take the gate away."""
        self._loss = None
        self._open.close()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks run; where one of them fails, none waits, and nothing half done is left."""
        try:
            with meeting(self._lock.meet, has_dtensors=bool(self._group)):
                yield
        except BaseException:
            self.drop()
            try:
                recover(self._replayer.model)
            except Exception:
                logger.exception("FSDP could not be made ready again after a failed replay")
            raise

    def _clear(self) -> None:
        self._guard.forget_gradients()
        self.gate.clear()
        self.watch.clear()
        self._sensors.take()
