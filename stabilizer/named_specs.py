"""What a configuration chooses from a table of names: words, mappings with their arguments, functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer.thresholds.arguments import closest

__all__ = ["named_spec", "refuse_twice", "words"]


def named_spec(argument: str, spec: Any, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One choice with all of its arguments.

    Args:
        argument: What errors speak of.
        spec: A name, a mapping with `name` and arguments, or, where "call" is a known name, a function.
        known: Name -> arguments and their defaults.

    Returns:
        A mapping with `name` and all arguments; their values are not checked.

    Raises:
        ValueError: If it is none of these, or an argument is not known.

    Example:
        >>> named_spec("on_alarm", {"name": "lower_lr", "factor": 0.1}, {"lower_lr": {"factor": 0.5, "num_steps": 9}})
        {'name': 'lower_lr', 'factor': 0.1, 'num_steps': 9}
    """
    takes_functions = "call" in known
    if callable(spec) and takes_functions:
        return {"name": "call", "function": spec}
    given = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        ways = "a mapping with its name, or a function" if takes_functions else "or a mapping with its name"
        raise ValueError(f"{argument}: {spec!r}: expected one of {words(known)}, {ways}")
    name = given["name"]
    if name not in known:
        ways = ", and functions by their import path" if takes_functions else ""
        raise ValueError(f"{argument}: {name!r}: allowed are {words(known)}{ways}{closest(name, list(known))}")
    unknown = [key for key in given if key != "name" and key not in known[name]]
    if unknown:
        arguments = ", ".join(known[name]) or "none"
        raise ValueError(f"{argument}: {name}: {unknown[0]!r} is no argument; known are {arguments}")
    return {"name": name, **known[name], **given}


def refuse_twice(argument: str, names: Sequence[str]) -> None:
    """Refuse a name that is there more than once; "call" may be, for several functions.

    Args:
        argument: What the error speaks of.
        names: All of them.

    Raises:
        ValueError: If one is.
    """
    for name in names:
        if name != "call" and names.count(name) > 1:
            raise ValueError(f"{argument}: {name!r} is there {names.count(name)} times: expected it once")


def words(known: Mapping[str, Any]) -> str:
    """The names as an error lists them.

    Args:
        known: By name.

    Example:
        >>> print(words({"alarm": {}, "stop": {}}))
        "alarm", "stop"
    """
    return ", ".join(f'"{name}"' for name in known)
