"""Checks of arguments that several callbacks have."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["check_choice", "check_interval", "check_optional_interval"]


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
