"""Loops with planted losses, for tests of the alarms of LossMeanVarCallback."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from stabilizer.callbacks import LossMeanVarCallback
from stabilizer.callbacks.loss_alarms import LossAlarm
from tests.tiny_loops import Loop

__all__ = ["BURST", "NAN", "Writer", "healthy", "ignore", "play", "summary", "watcher", "with_spikes"]

NAN = math.nan


def healthy(num: int, *, seed: int = 0, level: float = 2.0, sigma: float = 0.05) -> list[float]:
    """Losses that only scatter.

    Args:
        num: How many.
        seed: Of the noise.
        level: Their mean.
        sigma: Their standard deviation.
    """
    generator = random.Random(seed)
    return [generator.gauss(level, sigma) for _ in range(num)]


def with_spikes(losses: list[float], spikes: dict[int, float]) -> list[float]:
    """Losses with some replaced.

    Args:
        losses: All.
        spikes: Step -> loss.
    """
    return [spikes.get(step, loss) for step, loss in enumerate(losses)]


class Writer:
    """What a SummaryWriter takes: scalars and texts, with a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.log_dir = folder
        self.scalars: dict[tuple[str, int], float] = {}
        self.texts: dict[tuple[str, int], str] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Keep it; twice is a mistake."""
        assert (tag, step) not in self.scalars
        self.scalars[tag, step] = value

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Keep it; twice is a mistake."""
        assert (tag, step) not in self.texts
        self.texts[tag, step] = text


def ignore(alarm: LossAlarm) -> None:
    """Do nothing."""


def watcher(*actions: Any, **options: Any) -> LossMeanVarCallback:
    """One that watches from step 50 on.

    Args:
        *actions: Of `on_alarm`; default none but a function that does nothing.
        **options: Of the callback.
    """
    defaults: dict[str, Any] = {"warmup_steps": 50, "cooldown_steps": 20, "windows": (20, 60)}
    return LossMeanVarCallback(on_alarm=list(actions) or [ignore], **{**defaults, **options})


def play(losses: list[float], *callbacks: Any, host: str = "plain", **options: Any) -> Loop:
    """Run a loop whose losses these are; the loop, which is over.

    Args:
        losses: One a step.
        *callbacks: Ours.
        host: Of the loop.
        **options: Of the loop.
    """
    loop = Loop(host, *callbacks, **options)
    with loop:
        for loss in losses:
            # A gradient that is not finite would stay in the weight, at any rate.
            loop.step(*(loss,) if math.isfinite(loss) else (2.0,), record=None if math.isfinite(loss) else loss)
    return loop


def summary(callback: LossMeanVarCallback) -> list[tuple[str, int, int]]:
    """Kind, step and count of all alarms."""
    return [(alarm.kind, alarm.step, alarm.count) for alarm in callback.alarms]


#: A burst of four steps at 80, and one more spike after the cooldown of `watcher`.
BURST = with_spikes(healthy(140), {80: 9.0, 81: 9.1, 82: 9.2, 84: 9.3, 110: 9.0})
