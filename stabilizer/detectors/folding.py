"""Alarm storms are folded: one event of a kind within a cooldown, with how many detections it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer.detectors.detection import Detection, DetectionKind
from stabilizer.thresholds.arguments import check_whole

__all__ = ["AlarmFolder"]

_VERSION = 1


class AlarmFolder:
    """Lets the first detection of a kind through, and folds those of the next steps into the next one.

    Each kind has its own cooldown, which begins with the event that was let through. What comes within it is counted;
    the next event after it has `count` of itself and these, and begins where the first of them began. What nothing came
    after stays in `pending`.

    Args:
        cooldown_steps: Steps between two events of a kind; 0 folds nothing.

    Raises:
        ValueError: If it is no whole number of at least 0.

    Example:
        >>> folder = AlarmFolder(cooldown_steps=20)
        >>> for step in (100, 101, 102, 130):
        ...     found = Detection("jump", step, 8.0, median=2.0, sigma=0.1, score=60.0, limit=4.5, first_step=step)
        ...     print(step, [event.count for event in folder.fold([found])])
        100 [1]
        101 []
        102 []
        130 [3]
    """

    def __init__(self, *, cooldown_steps: int = 100) -> None:
        self.cooldown_steps = check_whole("cooldown_steps", cooldown_steps, low=0)
        self._told_at: dict[DetectionKind, int] = {}
        # How many detections have been folded since, and where the first of them began.
        self._pending: dict[DetectionKind, tuple[int, int]] = {}
        self._untold: dict[DetectionKind, tuple[int, int]] = {}

    @property
    def pending(self) -> dict[DetectionKind, int]:
        """How many detections of each kind have been folded since its last event."""
        return {kind: num for kind, (num, _) in self._pending.items()}

    def take_untold(self) -> dict[DetectionKind, tuple[int, int]]:
        """How many of each kind no event has told of since the last call, and at which step the last of them was."""
        untold, self._untold = self._untold, {}
        return untold

    def fold(self, detections: Sequence[Detection]) -> list[Detection]:
        """The events that these detections make.

        Args:
            detections: Of one step.

        Returns:
            Those that are to be told.
        """
        events = []
        for found in detections:
            told_at = self._told_at.get(found.kind)
            num, first_step = self._pending.get(found.kind, (0, found.first_step))
            # A run that went back to an older step has not been told of what comes now.
            if told_at is not None and 0 <= found.step - told_at < self.cooldown_steps:
                self._pending[found.kind] = (num + found.count, first_step)
                self._untold[found.kind] = (self._untold.get(found.kind, (0, 0))[0] + found.count, found.step)
                continue
            self._told_at[found.kind] = found.step
            self._pending.pop(found.kind, None)
            self._untold.pop(found.kind, None)
            first_step = min(first_step, found.first_step)
            events.append(dataclasses.replace(found, count=num + found.count, first_step=first_step))
        return events

    def state_dict(self) -> dict[str, Any]:
        """All that the next events depend on.

        Returns:
            Plain types: numbers, lists and dicts.
        """
        pending = {kind: list(numbers) for kind, numbers in self._pending.items()}
        return {"version": _VERSION, "told_at": dict(self._told_at), "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved.

        Args:
            state: Of `state_dict`; left as it is.

        Raises:
            ValueError: If it is of another version.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the state of the folded alarms has version {state.get('version')!r}: expected {_VERSION}; start "
                "without it"
            )
        self._told_at = dict(state["told_at"])
        self._pending = {kind: (num, first) for kind, (num, first) in state["pending"].items()}
