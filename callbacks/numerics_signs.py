"""Signs of trouble between incidents: loss scale, underflow, parameters, slow collectives; nothing waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stabilizer import tags, timed
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.hosting import scale_still_in
from stabilizer.callbacks.incoming import Incoming
from stabilizer.callbacks.run_host import RunHost
from stabilizer.numerics.scale import ScaleHistory
from stabilizer.numerics.timing import CollectiveClock, Slowness
from stabilizer.numerics.underflow import lost_elements, lost_shares
from stabilizer.numerics.weights import any_nonfinite
from stabilizer.reduction import world_size

__all__ = ["RunTimes", "Signs", "local_part", "scaler_of"]

#: Share of a gradient's elements that float16 loses, from which on it is told.
_UNDERFLOW = 0.5


def scaler_of(host: RunHost) -> Any:
    """The gradient scaler of a run; `None` without one, or where a plain loop has not told of its own.

    Args:
        host: Of the run.
    """
    engine = host.engine
    if host.kind == "lightning":
        return getattr(engine.precision_plugin, "scaler", None)
    if host.kind == "transformers":
        engine = getattr(engine, "accelerator", None)
    return getattr(engine, "scaler", None) if engine is not None else getattr(host.replays.replayer, "scaler", None)


class RunTimes:
    """Times the steps and this package's collectives of a run, on this rank.

    Args:
        slow_ratio: See `Slowness`.

    Attributes:
        step_seconds: From the end of the last step but one to that of the last one; `None` before there are two.
        collective_seconds: Of the collectives of the last step whose times are known.
        median: Of these.
    """

    def __init__(self, slow_ratio: float) -> None:
        self.step_seconds: float | None = None
        self.collective_seconds: float | None = None
        self._slowness, self._clock = Slowness(slow_ratio), CollectiveClock()
        self._ended_at: float | None = None

    @property
    def median(self) -> float:
        """Of the collectives of the last steps, in seconds."""
        return self._slowness.median

    def start(self) -> Callable[[], None]:
        """Begin; with one process there is nothing to time.

        Returns:
            Ends it.
        """
        if world_size() == 1:
            return lambda: None
        timed.watches.append(self._clock)
        return lambda: timed.watches.remove(self._clock)

    def measured(self) -> None:
        """A step's gradients are measured: collectives that come now are those of a search."""
        self._clock.pause()

    def close_step(self, step: int) -> dict[str, float] | None:
        """A step is over.

        Args:
            step: Its number.

        Returns:
            Numbers of a step with slow collectives, if there is one.
        """
        now = time.monotonic()
        self.step_seconds = None if self._ended_at is None else now - self._ended_at
        self._ended_at = now
        slow = None
        for number, seconds in self._clock.close_step(step):
            self.collective_seconds, median = seconds, self._slowness.median
            if self._slowness.see(seconds):
                slow = {"slow_step": float(number), "seconds": seconds, "median_seconds": median}
        return slow


class Signs:
    """What is seen of one optimizer's steps beside its norms.

    Args:
        every_n_steps: Interval of the look for underflow.
        check_parameters_every_n_steps: Interval of the look at the parameters; `None` is off.

    Attributes:
        pending: What is to be told at the next step that can be searched: kind -> numbers.
    """

    def __init__(self, *, every_n_steps: int, check_parameters_every_n_steps: int | None) -> None:
        self._every, self._check = every_n_steps, check_parameters_every_n_steps
        self.history = ScaleHistory()
        self.pending: dict[str, dict[str, float]] = {}
        self._scale: Tensor | None = None
        self._shares: Tensor | None = None
        self._is_half = False
        # Of the step at hand: its scale, and whether it overflows.
        self._attempt: Tensor | None = None
        self._num_attempts = 0
        self._incoming: Incoming[tuple[str, int]] = Incoming()

    def begin_step(self, context: StepContext, host: RunHost) -> None:
        """Look at the gradients, before anybody changes them.

        Args:
            context: Of the step.
            host: Of the run.
        """
        self._close_attempt()
        self._num_attempts += 1
        replayer = host.replays.replayer
        scale = replayer.scale() if replayer is not None and context.is_scaled else None
        self._scale = self._shares = None
        if scale is not None:
            # The scaler changes it in place.
            self._scale = scale.detach().clone()
            self._attempt = torch.stack([self._scale.reshape(()), context.is_bad.to(self._scale)])
        if context.step % self._every:
            return
        optimizer = host.optimizers[context.optimizer_index]
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        gradients = [None if one.grad is None else local_part(one.grad) for one in parameters]
        is_in = scale is not None and scale_still_in(scaler_of(host), optimizer) is not None
        counts = lost_elements(gradients, scale=None if is_in else self._scale, device=context.store.norms.device)
        self._shares = lost_shares(counts)
        self._is_half = any(gradient is not None and gradient.dtype == torch.float16 for gradient in gradients)

    def end_step(self, context: StepContext, host: RunHost) -> None:
        """Look at what the optimizer has left.

        Args:
            context: Of the step.
            host: Of the run.
        """
        # The device has come this far since then: the host has read the flag of this step.
        self._read(before=self._num_attempts)
        outcome = context.outcome
        if self._shares is not None:
            if self._scale is not None:
                context.log(tags.NUMERICS_LOSS_SCALE, self._scale)
            context.log_many(dict(zip(tags.NUMERICS_UNDERFLOW, self._shares.unbind(), strict=True)))
            if context.is_scaled or self._is_half:
                self._incoming.push(self._num_attempts, self._shares[:1], ("underflow", context.step))
        if self._scale is not None and outcome is not None:
            row = torch.stack([self._scale.reshape(()), outcome.overflowed.to(self._scale)])
            self._incoming.push(self._num_attempts, row, ("scale", context.step))
        self._attempt = None
        self._scale = self._shares = None
        if self._check is not None and context.step % self._check == 0:
            groups = host.optimizers[context.optimizer_index].param_groups
            values = [local_part(one.detach()) for group in groups for one in group["params"]]
            flag = any_nonfinite(values, device=context.store.norms.device)
            self._incoming.push(self._num_attempts, flag.reshape(1).to(torch.float32), ("parameters", context.step))

    def let_go(self) -> None:
        """A run ends: read what is on its way to the host."""
        self._read(before=None)
        self._scale = self._shares = self._attempt = None

    def state_dict(self) -> dict[str, Any]:
        """Plain types; reads what is on its way to the host."""
        self._read(before=None)
        return {"history": self.history.state_dict(), "pending": {kind: dict(of) for kind, of in self.pending.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        self._incoming.clear()
        self.history.load_state_dict(state["history"])
        self.pending = {kind: dict(of) for kind, of in state["pending"].items()}

    def _read(self, *, before: int | None) -> None:
        for row in self._incoming.arrived(before=before, waits=before is None):
            (what, step), numbers = row.extra, row.numbers
            if what == "underflow" and numbers[0] > _UNDERFLOW:
                self.pending["underflow"] = {"seen_at": float(step), "share": numbers[0]}
            elif what == "parameters" and numbers[0]:
                self.pending["nonfinite_parameter"] = {"seen_at": float(step)}
            elif what == "scale" or (what == "abandoned" and numbers[1]):
                stuck = self.history.see(numbers[0], overflowed=bool(numbers[1]))
                if stuck:
                    self.pending[f"stuck_loss_scale/{stuck}"] = {"seen_at": float(step), **self.history.evidence}

    def _close_attempt(self) -> None:
        """In a plain loop a scaler does not even call an optimizer whose step overflows: nobody ends that step."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._incoming.push(self._num_attempts, attempt, ("abandoned", -1))
            self._read(before=self._num_attempts)


def local_part(tensor: Any) -> Tensor:
    """This rank's elements.

    Args:
        tensor: Sharded or not.
    """
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
