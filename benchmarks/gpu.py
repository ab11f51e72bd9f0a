"""Rows of one CUDA device: what a quiet training step costs more, whether the host waits, and memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.one_process import Silent, gpt2
from benchmarks.timing import Figure, Samples, ratio_figure
from stabilizer.callbacks import GradNormCallback
from stabilizer.callbacks.suite import Suite
from stabilizer.errors import logger

__all__ = ["Training", "count_waits", "gpu_rows", "quiet_steps"]

_STEP = "GPU: quiet step with GradNormCallback / without"
_WAITS = "GPU: steps of 20 in which the host waits for the device"
_MEMORY = "GPU: memory of GradNormCallback beside its ring"
_MEGABYTE = 1e6


def gpu_rows(*, tiny: bool = False) -> list[Figure]:
    """Cost of the callback in the training of a GPT of 124 M parameters in bf16.

    Args:
        tiny: Try it out.

    Returns:
        A ratio, a count and a size, each with a target; without values where there is no CUDA device.
    """
    rows = ((_STEP, "ratio", 1.01), (_WAITS, "steps", 0.0), (_MEMORY, "MB", 1.0))
    if not torch.cuda.is_available():
        return [Figure("gpu", what, None, unit, target, "no CUDA device") for what, unit, target in rows]
    device = torch.device("cuda", torch.cuda.current_device())
    training = Training(device, tiny=tiny)
    num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
    how = f"{num_parameters / 1e6:.0f} M parameters in bf16, {torch.cuda.get_device_name(device)}"
    memory = _memory(training)
    waits = count_waits(training)
    samples = quiet_steps(training, rounds=3 if tiny else 100)
    return [
        ratio_figure("gpu", _STEP, samples, ("with", "without"), target=1.01, how=how),
        Figure("gpu", _WAITS, waits, "steps", 0.0, f'{how}, set_sync_debug_mode("error")'),
        Figure("gpu", _MEMORY, memory, "MB", 1.0, f"{how}, torch.cuda.memory_allocated"),
    ]


class Training:
    """A model, an optimizer and a suite that can be left out of a step.

    Args:
        device: Any.
        tiny: Try it out.
    """

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        self.device = device
        self.model: nn.Module = gpt2(tiny=tiny).to(device, torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._shape = (2, 17) if tiny else (8, 1025)
        self._num_tokens = 64 if tiny else 50257
        self.tokens = torch.randint(self._num_tokens, self._shape, device=device)
        # Strict: an error must not be taken for a step that costs nothing.
        callback = GradNormCallback(strict=True)
        self.suite = Suite([callback], model=self.model, optimizer=self.optimizer, sink=Silent())

    def backward(self) -> None:
        """Everything before our part."""
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()

    def step(self, measured: bool) -> None:
        """A whole step.

        Args:
            measured: With the callback.
        """
        self.backward()
        if measured:
            self.suite.run()
        self.optimizer.step()
        if measured:
            self.suite.finish()
        self.optimizer.zero_grad(set_to_none=False)


def quiet_steps(training: Training, *, rounds: int) -> Samples:
    """Time steps with and without the callback in turn; the device is busy all the time, as in training.

    Args:
        training: What to train.
        rounds: Steps of either kind.

    Returns:
        Seconds of the steps on the device. Medians are those of quiet steps, since nine of ten are.
    """
    clock = _clock(training.device)
    marks: dict[str, list[tuple[Callable[[], float], Callable[[], float]]]] = {"with": [], "without": []}
    for number in range(-5, rounds):
        for name in ("with", "without") if number % 2 else ("without", "with"):
            start = clock()
            training.step(name == "with")
            if number >= 0:
                marks[name].append((start, clock()))
    return {name: [end() - start() for start, end in pairs] for name, pairs in marks.items()}


def _clock(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Takes the time without waiting; what it gives is read at the end, in seconds."""
    if device.type != "cuda":
        return lambda: (lambda now: lambda: now)(time.perf_counter())
    origin = torch.cuda.Event(enable_timing=True)
    origin.record()

    def mark() -> Callable[[], float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()

        def read() -> float:
            event.synchronize()
            return float(origin.elapsed_time(event)) / 1000

        return read

    return mark


def _memory(training: Training) -> float:
    """Megabytes that stay allocated for the callback, its ring left out."""
    for _ in range(2):
        training.step(False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(12):
        training.step(True)
    torch.cuda.synchronize()
    store = training.suite._store
    assert store is not None
    ring = store.view().ring
    after = torch.cuda.memory_allocated()
    return (after - before - ring.numel() * ring.element_size()) / _MEGABYTE


class _Errors(logging.Handler):
    """Counts what the suite reports instead of raising."""

    num_errors = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_errors += 1


def count_waits(training: Training) -> float:
    """Steps of 20 in which the suite waited for the device."""
    handler, num_steps = _Errors(level=logging.ERROR), 0
    logger.addHandler(handler)
    try:
        for _ in range(20):
            reported = handler.num_errors
            training.backward()
            raised = _runs_into(training.suite.run)
            training.optimizer.step()
            raised = _runs_into(training.suite.finish) or raised
            training.optimizer.zero_grad(set_to_none=False)
            num_steps += raised or handler.num_errors > reported
    finally:
        logger.removeHandler(handler)
    return float(num_steps)


def _runs_into(function: Callable[[], None]) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False
