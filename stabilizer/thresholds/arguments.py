"""Checks of what a user gives a threshold rule: each error has the argument, the value and what is allowed."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["check_number", "check_whole", "closest", "function_name", "imported_function"]


def check_number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    low: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
) -> float:
    """A finite number within bounds.

    Args:
        name: Of the argument, for the message.
        value: What was given.
        above: It must be larger than this.
        low: It must be at least this.
        high: It must be at most this.
        below: It must be smaller than this.

    Returns:
        The number.

    Raises:
        ValueError: If it is none (text and bools are none, even `"1.0"` and `True`), not finite or out of bounds.

    Example:
        >>> check_number("k", 5, above=0)
        5.0
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not (above < value < below and low <= value <= high):
        bounds = {"above": above, "at least": low, "at most": high, "below": below}
        told = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))
        raise ValueError(f"{name}={value!r}: expected a number {told}".rstrip())
    return float(value)


def check_whole(name: str, value: Any, *, low: int) -> int:
    """A whole number that is large enough.

    Args:
        name: Of the argument, for the message.
        value: What was given.
        low: It must be at least this.

    Returns:
        The number.

    Raises:
        ValueError: If it is none (text, bools and floats are none) or too small.

    Example:
        >>> check_whole("warmup_steps", 50, low=1)
        50
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {low}")
    return value


def closest(name: object, names: Collection[str]) -> str:
    """The known name that looks most like another, as the end of a message.

    Args:
        name: What was given.
        names: What is known.

    Returns:
        "; the closest is ...", or nothing if nothing is known.

    Example:
        >>> closest("robust", ["fixed", "robust_log"])
        '; the closest is robust_log'
    """
    found = difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)
    return f"; the closest is {found[0]}" if found else ""


def imported_function(argument: str, path: Any, *, example: str) -> Callable[..., Any]:
    """The function that a name means.

    Args:
        argument: For the message.
        path: Its import path.
        example: Of one.

    Raises:
        ValueError: If there is no such function.

    Example:
        >>> imported_function("function", "math.sqrt", example="my.alerts.page")(4.0)
        2.0
    """
    module, _, name = str(path).rpartition(".")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{argument}={path!r}: expected a function, or its name such as {example!r} ({error})"
        ) from None
    if not callable(function):
        raise ValueError(f"{argument}={path!r}: it is {function!r:.80}, and no function")
    return function


def function_name(function: Any) -> str:
    """Import path of a function, for a checkpoint.

    Args:
        function: Or any other object that can be called.

    Example:
        >>> import json
        >>> function_name(json.dumps)
        'json.dumps'
    """
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
