"""Alarm: what an action at an alarm is given, whatever it is about."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, ClassVar

__all__ = ["Alarm"]


class Alarm:
    """Base of dataclasses that say what is wrong at a step, the same on every rank.

    Attributes:
        subject: What it is about, in one word; the file of "record" is called after it.
        series: What `recent` are.
        kind: What is wrong; the tag that it is logged under ends with it.
        step: The optimizer step.
        score: What is logged.
        recent: The last values up to this one, as pairs of step and value.
        optimizer_index: Position of the optimizer.
    """

    subject: ClassVar[str]
    series: ClassVar[str]

    kind: str
    step: int
    score: Any
    recent: tuple[tuple[int, float], ...]
    optimizer_index: int

    @property
    def is_warning(self) -> bool:
        """Whether it is only told, whatever else is to be done at an alarm."""
        return False

    @property
    def text(self) -> str:
        """In one line."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """What it is in a few words."""
        return self.title_of(self.kind)

    @classmethod
    def title_of(cls, kind: str) -> str:
        """What alarms of a kind are, in a few words.

        Args:
            kind: Their `kind`.
        """
        kind = kind.removeprefix(f"{cls.subject}_")
        return f"non-finite {cls.subject}" if kind == "nonfinite" else f"{cls.subject} {kind}"

    @property
    def advice(self) -> str:
        """What to look at; the end of `text`, if it is not empty."""
        return ""

    def to_json(self) -> str:
        """One line of JSON; numbers that are not finite as text, which every reader takes."""
        own: Any = self
        fields: dict[str, Any] = {name: _plain(value) for name, value in dataclasses.asdict(own).items()}
        fields["recent"] = [[step, _plain(value)] for step, value in self.recent]
        return json.dumps(fields, allow_nan=False)


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
