"""What is said of a noise scale: once where it comes from or why there is none, and what it means when that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.context import StepContext
from stabilizer.errors import logger, warn
from stabilizer.noise import Advice
from stabilizer.step_parts import ONE_PART, StepParts

__all__ = ["NoiseReports"]

# Looks without a single number before that is told: sensors see nothing at the first steps.
_PATIENCE = 3


class NoiseReports:
    """Speaks for one optimizer's noise scale, on the rank that logs.

    Args:
        owner: The callback's name.
        source: As the user has asked for it.
        unit: What the batch is counted in.
    """

    def __init__(self, *, owner: str, source: str, unit: str) -> None:
        self._owner, self._source, self._unit = owner, source, unit
        self._advice = Advice()
        self._verdict: str | None = None
        self._num_looks = 0
        self._has_told = False

    def reader(self, context: StepContext, parts: StepParts) -> Callable[[int, Tensor], None]:
        """What reads the numbers when they have reached the host.

        Args:
            context: Of the step.
            parts: Of the step.

        Returns:
            Takes a step, and ratio, its error, whether it is reliable, how many steps have entered, and the numbers of
            parts and ranks of this step.
        """
        reason, has_sizes, write = parts.reason, parts.has_sizes, context.write_text

        def read(step: int, values: Tensor) -> None:
            ratio, stderr, reliable, num_steps, num_parts, num_ranks = values.tolist()
            if not num_steps:
                self._tell_nothing(num_parts, num_ranks, reason)
                return
            if not self._has_told:
                self._has_told = True
                source = self._describe(num_parts, num_ranks, has_sizes=has_sizes)
                logger.info("%s: %s", self._owner, source)
                write(tags.GNS_ADVICE, source)
            verdict, sentence = self._advice.take(ratio, stderr=stderr, reliable=bool(reliable))
            if verdict != self._verdict and verdict != "unreliable":
                self._verdict = verdict
                logger.info("%s: step %d: %s", self._owner, step, sentence)
                write(tags.GNS_ADVICE, f"Step {step}. {sentence}")

        return read

    def state_dict(self) -> dict[str, Any]:
        """What was said last, plain types."""
        return {"advice": self._advice.state_dict(), "verdict": self._verdict}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        self._advice.load_state_dict(state["advice"])
        self._verdict = state["verdict"]

    def _describe(self, num_parts: float, num_ranks: float, *, has_sizes: bool) -> str:
        where = f"{num_ranks:.0f} ranks" if num_ranks > 1 else "one rank"
        unit = self._unit if has_sizes else "micro-batches, whose sizes nobody tells"
        return (
            f"The noise scale comes from the gradients of {num_parts:.0f} micro-batches a step on {where}, before any "
            f"reduction; it is counted in {unit}."
        )

    def _tell_nothing(self, num_parts: float, num_ranks: float, reason: str | None) -> None:
        self._num_looks += 1
        if self._num_looks != _PATIENCE or self._has_told:
            return
        self._has_told = True
        if reason is None and num_parts < 2:
            reason = ONE_PART
        elif reason is None and self._source != "auto":
            reason = f'source="{self._source}" with {num_parts:.0f} micro-batches on {num_ranks:.0f} ranks; try "auto"'
        warn(f"{self._owner}: the noise scale is not available: {reason or 'no step was finite'}")
