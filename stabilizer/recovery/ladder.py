"""Ladder: what is done about trouble that comes again, one rung after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer.recovery.conditions import Trouble
from stabilizer.recovery.specs import parsed_ladder

__all__ = ["Entry", "Ladder"]

_MAX_HISTORY = 100


@dataclasses.dataclass
class Entry:
    """One event of a run's history.

    Attributes:
        step: At which it was acted on.
        rung: What was done, or "wait" for trouble during the cooldown of a rollback.
        first_step: The first bad step.
        reason: Which condition has held, and how.
        outcome: What has come of it.
        count: How many events in a row this one stands for.
        before_step: The newest checkpoint that a rollback is to take, by the step that comes next there.
    """

    step: int
    rung: str
    first_step: int
    reason: str
    outcome: str = ""
    count: int = 1
    before_step: int = -1

    def __str__(self) -> str:
        """One line."""
        times = f" ({self.count} times)" if self.count > 1 else ""
        outcome = f" -> {self.outcome}" if self.outcome else ""
        return f"step {self.step}: {self.rung}{times}, because {self.reason}{outcome}"


class Ladder:
    """Says which rung is next, and remembers all of them.

    Each time a condition holds within `calm_steps` of the time before, the next rung is taken; after a longer quiet the
    first one again. The last rung is taken again and again; "roll_back" is taken up to `max_rollbacks` times in a run,
    at least `cooldown_steps` apart, and then the run stops, whether or not "stop" is a rung. Where the loss has left
    its window again within `calm_steps` of a rollback, the checkpoint may have been a bad one: the next rollback takes
    an older one.

    Args:
        rungs: See `parsed_ladder`.
        calm_steps: Steps without trouble.
        quiet_steps: Steps without trouble that show that parameters have not suffered: a condition that lasts comes
            again within fewer. Trouble after them has a first bad step of its own.

    Attributes:
        rungs: With all of their arguments.
        history: The last hundred events.
        num_rollbacks: Of the run.

    Raises:
        ValueError: If a rung is none.

    Example:
        >>> ladder = Ladder(["alarm", "skip", "stop"], calm_steps=50)
        >>> steps = (10, 20, 100, 110, 120)
        >>> [ladder.climb(Trouble("loss", step, step, "high"), step=step).rung for step in steps]
        ['alarm', 'skip', 'alarm', 'skip', 'stop']
    """

    def __init__(self, rungs: Sequence[Any], *, calm_steps: int, quiet_steps: int = 50) -> None:
        self.rungs = parsed_ladder(rungs)
        self.calm_steps, self.quiet_steps = calm_steps, quiet_steps
        self.history: list[Entry] = []
        self.num_rollbacks = 0
        self._next = 0
        self._last_step: int | None = None  # of the last trouble
        self._first_bad: int | None = None  # of the trouble at hand
        self._wait_until = 0
        self._last_rollback: tuple[int, int] | None = None  # its step, and that of the checkpoint

    @property
    def names(self) -> list[str]:
        """The rungs, in order."""
        return [rung["name"] for rung in self.rungs]

    def arguments(self, name: str) -> Mapping[str, Any]:
        """Arguments of a rung.

        Args:
            name: Of one that there is.
        """
        return next(rung for rung in self.rungs if rung["name"] == name)

    def is_calm(self, step: int) -> bool:
        """Whether nothing has been wrong for `calm_steps`.

        Args:
            step: The step at hand.
        """
        return self._last_step is None or step - self._last_step > self.calm_steps

    def first_bad(self, step: int) -> int | None:
        """The first bad step of the trouble at hand; `None` if it is over.

        Args:
            step: The step at hand.
        """
        is_over = self._last_step is None or step - self._last_step > self.quiet_steps
        return None if is_over else self._first_bad

    def climb(self, trouble: Trouble, *, step: int) -> Entry:
        """Take the next rung; the caller does what it says.

        Args:
            trouble: What holds.
            step: The step at hand, which may be a later one.

        Returns:
            The event, which is in the history from now on.
        """
        if self.is_calm(step):
            self._next = 0
        self._first_bad = self.first_bad(step)
        self._last_step = step
        self._first_bad = min(trouble.first_step, trouble.first_step if self._first_bad is None else self._first_bad)
        if step < self._wait_until:
            return self._note(step, "wait", trouble)
        name = self.names[self._next] if self.rungs else "wait"
        if name == "roll_back" and self.num_rollbacks >= self.arguments(name)["max_rollbacks"]:
            name = "stop"
        elif name != "roll_back":
            self._next = min(self._next + 1, len(self.rungs) - 1) if self.rungs else 0
        return self._note(step, name, trouble)

    def after_roll_back(self, entry: Entry) -> Entry | None:
        """The rung that takes the place of a rollback that could not be.

        Args:
            entry: Of the rollback.

        Returns:
            The next event, or `None` if there is no further rung.
        """
        if "stop" not in self.names:
            return None
        return self._note(entry.step, "stop", Trouble("", entry.step, entry.first_step, entry.reason))

    def rolled_back(self, *, step: int, target: int) -> None:
        """Count a rollback that was done; what led there is over.

        Args:
            step: The step at hand.
            target: The step that comes next in the checkpoint.
        """
        self._last_rollback = step, target
        self.num_rollbacks += 1
        self._first_bad = None
        self._wait_until = step + 1 + int(self.arguments("roll_back")["cooldown_steps"])

    def is_top(self, entry: Entry) -> bool:
        """Whether there is nothing more that could be done.

        Args:
            entry: The event at hand.
        """
        return not self.rungs or (entry.rung == self.names[-1] and entry.rung not in ("roll_back", "stop"))

    def told(self) -> str:
        """The history, a line for each event."""
        return "\n".join(str(entry) for entry in self.history)

    def state_dict(self) -> dict[str, Any]:
        """What the next rungs depend on: plain types."""
        return {
            "history": [dataclasses.asdict(entry) for entry in self.history],
            "num_rollbacks": self.num_rollbacks,
            "next": self._next,
            "last_step": self._last_step,
            "first_bad": self._first_bad,
            "wait_until": self._wait_until,
            "last_rollback": None if self._last_rollback is None else list(self._last_rollback),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved; of a shorter ladder its last rung.

        Args:
            state: Of `state_dict`.
        """
        self.history = [Entry(**entry) for entry in state["history"]]
        self.num_rollbacks = int(state["num_rollbacks"])
        self._next = max(min(int(state["next"]), len(self.rungs) - 1), 0)
        self._last_step, self._first_bad = state["last_step"], state["first_bad"]
        self._wait_until = int(state["wait_until"])
        last = state["last_rollback"]
        self._last_rollback = None if last is None else (int(last[0]), int(last[1]))

    def _note(self, step: int, name: str, trouble: Trouble) -> Entry:
        first = trouble.first_step if self._first_bad is None else self._first_bad
        last = self.history[-1] if self.history else None
        if last is not None and last.rung == name and name in ("alarm", "wait"):
            last.count += 1
            return last
        before = first
        if self._last_rollback is not None and trouble.condition != "nonfinite":
            rolled_back_at, target = self._last_rollback
            before = min(first, target - 1) if step - rolled_back_at <= self.calm_steps else first
        entry = Entry(step, name, first, trouble.text, before_step=before)
        self.history.append(entry)
        del self.history[:-_MAX_HISTORY]
        return entry
