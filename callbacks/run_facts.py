"""What a run is like, as far as a fixed threshold depends on it: written to the log once, and compared with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from stabilizer import tags
from stabilizer.background import SHARED
from stabilizer.batches import count
from stabilizer.callbacks.configuration import configuration_text, flat_arguments
from stabilizer.errors import logger, warn
from stabilizer.inspection import whole_sizes
from stabilizer.late import Sink
from stabilizer.markdown import code
from stabilizer.parameters import named_parameters
from stabilizer.reduction import world_size

__all__ = ["RunFacts", "num_trainable"]

# Accelerate's words for what Lightning has longer ones.
_WORDS = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class RunFacts:
    """Gathers what is known of a run until its first step, then writes it to the log.

    Nothing here waits for a device or asks another rank: the numbers are those of the rank that writes.

    Args:
        callbacks: All of ours; what they call a layer goes into the log, so that its thresholds find the layers again.
        precision: In the host's words; `None` where nobody says.

    Attributes:
        precision: As given; a host may set it until the first step.
        known: `num_params` (trainable elements of the whole model), `world_size`, `accumulation` (micro-batches a
            step), `batch` (samples of a micro-batch on one rank) and `precision`; `None` for what is not known.
            Empty before the first step.

    Example:
        >>> facts = RunFacts(precision="bf16-mixed")
        >>> facts.known = {"batch": 8, "precision": "bf16-mixed"}
        >>> facts.differences({"batch": 4, "precision": None})
        {'batch': (4, 8)}
    """

    def __init__(self, callbacks: Sequence[Any] = (), *, precision: str | None = None) -> None:
        self.precision = precision
        self.known: dict[str, int | str | None] = {}
        self._callbacks = list(callbacks)
        self._show: Callable[[bool], None] | None = None
        self._batch: int | None = None
        self._has_batch = self._is_done = False
        self._said: list[dict[str, tuple[Any, Any]]] = []

    def see_batch(self, batch: Any) -> None:
        """Count the samples of the first micro-batch.

        Args:
            batch: What the model is given; not kept.
        """
        if self._has_batch or self._is_done:
            return
        self._has_batch = True
        try:
            samples = count(batch, "samples")
            self._batch = samples if isinstance(samples, int) else None
        except Exception as error:  # attributes of a stranger's class may do anything
            logger.debug("the samples of a batch are not known", exc_info=error)

    def begin(self, sink: Sink) -> None:
        """Have the arguments of all callbacks shown beside those that the host shows, before it does. Never raises.

        Args:
            sink: The host's loggers.
        """
        if not sink.is_logging:
            return
        try:
            self._show = sink.arguments(flat_arguments(self._callbacks, **self._where()))
        except Exception:
            logger.exception("the arguments could not be shown among the run's; training goes on without it")

    def let_go(self) -> None:
        """The run is over, or begins anew: whatever was not written by now is not."""
        show, self._show = self._show, None
        if show is not None:
            show(False)

    def conclude(self, model: nn.Module, *, accumulation: int, sink: Sink, step: int) -> None:
        """Write what is known to the log, at the first step of a run; later calls do nothing. Never raises.

        Args:
            model: As it trains, wrapped.
            accumulation: Micro-batches of the step; 0 if that is not known.
            sink: The host's loggers.
            step: The optimizer step.
        """
        if self._is_done:
            return
        self._is_done = True
        try:
            self.known = {
                "num_params": num_trainable(model),
                "world_size": world_size(),
                "accumulation": accumulation or None,
                "batch": self._batch,
                "precision": _WORDS.get(str(self.precision), self.precision),
            }
            if sink.is_logging:
                found = {**self.known, "series": _series(self._callbacks)}
                known = code(json.dumps(found, indent=2), language="json")
                SHARED.add("the run's facts", lambda: sink.text(tags.RUN, known, step), failed=_tell)
                told = configuration_text(self._callbacks, **self._where())
                SHARED.add("the configuration", lambda: sink.text(tags.CONFIG, told, step), failed=_tell)
                show, self._show = self._show, None
                if show is not None:
                    show(True)
        except Exception as error:
            _tell(error)
        self._callbacks = []

    def _where(self) -> dict[str, Any]:
        hosts = [callback.host for callback in self._callbacks if callback.host is not None]
        return {"world_size": world_size(), "host": hosts[0].kind if hosts else "plain"}

    def differences(self, calibrated_for: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Where this run is another than the one that thresholds come from.

        Args:
            calibrated_for: Of the thresholds. What is unknown there or here is not compared.

        Returns:
            Field -> what it was, and what it is.
        """
        pairs = {field: (calibrated_for.get(field), self.known.get(field)) for field in tags.RUN_FIELDS}
        # A person may have written a host's own word.
        return {
            field: (before, now)
            for field, (before, now) in pairs.items()
            if None not in (before, now) and _WORDS.get(str(before), before) != now
        }

    def check(self, calibrated: Iterable[Mapping[str, Any] | None]) -> None:
        """Warn if thresholds come from a run that was another; of each difference once a run.

        Args:
            calibrated: What the thresholds were found with, if they say so.
        """
        for found in [self.differences(calibrated_for) for calibrated_for in calibrated if calibrated_for]:
            if not found or found in self._said:
                continue
            self._said.append(found)
            listed = ", ".join(f"{field} was {before!r} and is {now!r}" for field, (before, now) in found.items())
            warn(
                f"fixed thresholds were calibrated for another run: {listed}. Gradient norms change with it: record a "
                "run with mode='observe' and calibrate again (stabilizer calibrate LOGDIR)"
            )


def _tell(error: Exception) -> None:
    logger.error("what the run is like could not be written to the log; training goes on without it", exc_info=error)


def num_trainable(model: nn.Module) -> int:
    """Number of trainable elements over all ranks; starts no collective.

    Args:
        model: As it trains, wrapped, sharded or not.

    Example:
        >>> num_trainable(nn.Linear(3, 2))
        8
    """
    sizes = whole_sizes(model)
    return sum(sizes.get(p, p.numel()) for p, _ in named_parameters(model) if p.requires_grad)


def _series(callbacks: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Name before the tags -> what the norms under it are norms of."""
    found: dict[str, dict[str, Any]] = {}
    # Where there are several of a name, the last of these is the one that logs the norms.
    for kind in ("AdaptiveClipThreshold", "LayerClipCallback", "GradNormCallback"):
        for callback in callbacks:
            if type(callback).__name__ == kind:
                granularity = callback.granularity
                plain = granularity if isinstance(granularity, str) else dict(granularity)
                found[callback.name] = {"granularity": plain, "norm_type": callback.norm_type}
    return found
