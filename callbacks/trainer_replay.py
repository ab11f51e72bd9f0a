"""Running a trainer's micro-batches again: its own compute_loss, and nothing of what surrounds it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from stabilizer.callbacks.hosting import stand_before
from stabilizer.callbacks.loop_replay import LoopReplayer
from stabilizer.callbacks.trainer_memory import Memory, Remembered, as_it_was, remember, undisturbed
from stabilizer.gating import gate_together
from stabilizer.localize.recording import MicroBatch

__all__ = ["TrainerReplayer"]

#: What TRL's trainers of policies compute their losses from.
_LOG_PROBS = "_get_per_token_logps_and_entropies"


class TrainerReplayer(LoopReplayer):
    """A `stabilizer.localize.replaying.Replayer` for trainers of transformers and TRL.

    The loss is that of `trainer.compute_loss`, on the batch as it was prepared. Where the model gives log-probabilities
    of tokens in place of logits (all trainers of TRL), the gate stands on these, and on the entropies beside them.

    Args:
        model: As it trains, wrapped.
        trainer: The trainer.
    """

    def __init__(self, model: nn.Module, trainer: Any) -> None:
        super().__init__(model)
        self._trainer = trainer
        self._compute: Callable[..., Any] | None = None
        self._remembered: weakref.WeakKeyDictionary[MicroBatch, Remembered] = weakref.WeakKeyDictionary()
        self.memory = Memory(trainer.accelerator)
        self.reason = _unknown(trainer)

    def begin(self, micro_batch: MicroBatch, compute: Callable[..., Any]) -> Remembered:
        """A loss is about to be computed.

        Args:
            micro_batch: As it was recorded.
            compute: The trainer's own `compute_loss`.
        """
        self._compute = compute
        self._remembered[micro_batch] = found = remember(self._trainer)
        return found

    def loss(self, micro_batch: MicroBatch) -> Tensor:
        """The loss of a micro-batch, as the trainer propagates it."""
        remembered = self._remembered[micro_batch]
        assert self._compute is not None
        (inputs,), kwargs = micro_batch.call()
        autocast = contextlib.nullcontext() if micro_batch.autocast is None else micro_batch.autocast.again()
        self.is_running = True
        try:
            with as_it_was(self._trainer, remembered), self.memory.playing(remembered), self._gated(), autocast:
                loss = self._compute(self.model, inputs, **kwargs)
        finally:
            self.is_running = False
        if isinstance(loss, tuple):
            loss = loss[0]
        whole: Tensor = loss.mean() / remembered.divisor
        scale = self.scale()
        return whole if scale is None else whole * scale.to(whole.device)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Metrics, counters, controllers and reporters of the trainer hear nothing of it."""
        with undisturbed(self._trainer):
            yield

    @contextlib.contextmanager
    def _gated(self) -> Iterator[None]:
        if hasattr(self._trainer, _LOG_PROBS):
            undo = stand_before(self._trainer, _LOG_PROBS, _with_gate)
        else:
            undo = self.model.register_forward_hook(_gate_output).remove
        try:
            yield
        finally:
            undo()


def _with_gate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _gated(original(*args, **kwargs))


def _gated(found: Any) -> Any:
    """What a trainer computes its loss from, with everything that is one number a token gated."""
    log_probs = found[0] if isinstance(found, tuple) else found
    if not isinstance(found, tuple):
        return gate_together(log_probs)[0]
    alike = [number for number, value in enumerate(found) if _is_like(value, log_probs)]
    items = list(found)
    for number, tensor in zip(alike, gate_together(*(found[number] for number in alike)), strict=True):
        items[number] = tensor
    return tuple(items)


def _gate_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: log-probabilities and entropies in what the model returns."""
    log_probs = getattr(output, "log_probs", None)
    if not isinstance(log_probs, Tensor) or log_probs.dim() != 2:
        return None
    names = [name for name in ("log_probs", "entropy") if _is_like(getattr(output, name, None), log_probs)]
    for name, tensor in zip(names, gate_together(*(getattr(output, name) for name in names)), strict=True):
        output[name] = tensor
    return output


def _is_like(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape and value.dtype == tensor.dtype


def _unknown(trainer: Any) -> str | None:
    """Why a trainer's loss cannot be gated, if it is one of TRL's that samples and is not what we know."""
    kind = next((kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    if kind is None or not hasattr(trainer, "_generate_and_score_completions") or hasattr(trainer, _LOG_PROBS):
        return None
    return (
        f"this version of trl is not known: {kind.__name__} has no {_LOG_PROBS}, whose log-probabilities are gated. "
        "Training goes on, without searches; known is trl 1.16"
    )
