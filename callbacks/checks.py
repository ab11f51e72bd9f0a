"""Checks of arguments that several callbacks have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer.errors import warn

__all__ = ["check_choice", "check_interval", "check_optional_interval", "check_state", "compare_arguments"]


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Check a word.

    Args:
        name: Of the argument.
        value: What the user gave.
        allowed: What it may be.

    Raises:
        ValueError: If it is none of these.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(allowed)}")


def check_interval(name: str, value: object, *, minimum: int = 1) -> int:
    """Check an interval in steps.

    Args:
        name: Of the argument.
        value: What the user gave.
        minimum: 0 for a number of steps that may be none.

    Returns:
        The value.

    Raises:
        ValueError: If it is not a whole number of at least the minimum.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}={value!r}: expected a whole number of steps, at least {minimum}")
    return value


def check_optional_interval(name: str, value: object) -> int | None:
    """Check an interval in steps that may be off.

    Args:
        name: Of the argument.
        value: What the user gave; `None` is off.

    Returns:
        The value.

    Raises:
        ValueError: If it is neither `None` nor a whole number of at least 1.
    """
    if value is None:
        return None
    try:
        return check_interval(name, value)
    except ValueError as error:
        raise ValueError(f"{error}; None turns it off") from None


def check_state(key: str, state: Mapping[str, Any]) -> None:
    """Refuse what is no state of a callback.

    Args:
        key: Of the callback.
        state: From a checkpoint.

    Raises:
        ValueError: If it is of another version or lacks a key.
    """
    expected = {"version", "hyperparameters", "steps", "extra"}
    if state.get("version") != 1 or not expected <= state.keys():
        raise ValueError(
            f"{key}: cannot load a state of version {state.get('version')!r} with keys {sorted(state)}; expected "
            f"version 1 with {sorted(expected)}. Train on without it by removing the callback's entry from the "
            "checkpoint."
        )


def compare_arguments(key: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Warn of arguments that differ from those in a checkpoint.

    Args:
        key: Of the callback.
        saved: Those in the checkpoint.
        current: Those of this run.
    """
    changed = {name: (saved.get(name), value) for name, value in current.items() if saved.get(name) != value}
    if changed:
        described = ", ".join(f"{name}: {before!r} -> {now!r}" for name, (before, now) in changed.items())
        warn(f"{key}: arguments differ from the checkpoint's ({described}); the new ones are used")
