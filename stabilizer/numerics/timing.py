"""How long collectives and steps take, by the host's clock or the device's own; nobody waits."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

__all__ = ["CollectiveClock", "Slowness"]

_STEPS = 128
_MIN_STEPS = 20
# What a machine that has other things to do takes now and then.
_MIN_SECONDS = 1.0


class Slowness:
    """Compares a duration with the median of the last ones.

    Args:
        ratio: A duration of more than this many medians is slow; one of less than a second never is.

    Example:
        >>> slowness = Slowness(10.0)
        >>> [slowness.see(seconds) for seconds in [0.2] * 30 + [2.5]][-2:]
        [False, True]
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._durations: deque[float] = deque(maxlen=_STEPS)

    @property
    def median(self) -> float:
        """Of the last durations, in seconds; 0 before there is one."""
        return statistics.median(self._durations) if self._durations else 0.0

    def see(self, seconds: float) -> bool:
        """Take a duration, and say whether it is slow.

        Args:
            seconds: It.
        """
        is_known = len(self._durations) >= _MIN_STEPS
        is_slow = is_known and seconds > max(self._ratio * self.median, _MIN_SECONDS)
        # Slow ones too: a network that has become slow for good is told, and then it is the usual one.
        self._durations.append(seconds)
        return is_slow


class CollectiveClock:
    """Times this package's own collectives, step by step: a `stabilizer.timed.CollectiveWatch`.

    On a CPU by the host's clock, on a device by its events, which are read when they have happened.
    """

    def __init__(self) -> None:
        self._seconds, self._begun = 0.0, 0.0
        self._events: list[tuple[Any, Any]] = []
        self._steps: deque[tuple[int, float, list[tuple[Any, Any]]]] = deque()
        self._start: Any = None
        self._is_paused = False

    def pause(self) -> None:
        """What comes until the step is over is no part of every step: a search, in which ranks wait for each other."""
        self._is_paused = True

    def begin(self, tensor: Tensor) -> None:
        """A collective begins.

        Args:
            tensor: That is summed.
        """
        if self._is_paused:
            return
        if tensor.device.type == "cpu":
            self._begun = time.monotonic()
        else:
            self._start = _recorded(tensor.device)

    def end(self, tensor: Tensor) -> None:
        """It is over.

        Args:
            tensor: As of `begin`.
        """
        if self._is_paused:
            return
        if tensor.device.type == "cpu":
            self._seconds += time.monotonic() - self._begun
        elif self._start is not None:
            self._events.append((self._start, _recorded(tensor.device)))
            self._start = None

    def close_step(self, step: int) -> list[tuple[int, float]]:
        """A step is over.

        Args:
            step: Its number.

        Returns:
            Steps whose durations are known now, and the seconds that their collectives took.
        """
        self._steps.append((step, self._seconds, self._events))
        self._seconds, self._events, self._is_paused = 0.0, [], False
        found = []
        while self._steps and all(end.query() for _, end in self._steps[0][2]):
            number, seconds, events = self._steps.popleft()
            found.append((number, seconds + sum(start.elapsed_time(end) / 1000.0 for start, end in events)))
        return found


def _recorded(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event
