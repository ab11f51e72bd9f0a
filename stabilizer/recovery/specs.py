"""Conditions and rungs as a configuration holds them: words, mappings with their arguments, functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from stabilizer.named_specs import named_spec, refuse_twice, words
from stabilizer.thresholds.arguments import check_number, check_whole, function_name, imported_function

__all__ = ["CONDITIONS", "RUNGS", "Spec", "parsed_conditions", "parsed_ladder", "plain_specs", "quiet_steps"]

#: A word, a mapping with `name` and its arguments, or a function.
Spec: TypeAlias = str | Mapping[str, Any] | Callable[..., Any]

#: Name -> arguments and their defaults.
CONDITIONS: dict[str, dict[str, Any]] = {
    "nonfinite": {"num": 3, "window": 10},
    "loss": {"k": 4.0, "num_steps": 20, "window": 100},
    "call": {"function": None},
}
#: From the mildest to the last; a ladder has them in this order.
RUNGS: dict[str, dict[str, Any]] = {
    "alarm": {},
    "skip": {},
    "lower_lr": {"factor": 0.5, "num_steps": 100},
    "roll_back": {"max_rollbacks": 3, "cooldown_steps": 20, "lr_factor": 1.0, "lr_steps": 100},
    "stop": {},
}


def parsed_conditions(specs: Sequence[Spec]) -> list[dict[str, Any]]:
    """Conditions with all of their arguments.

    Args:
        specs: As a user has written them; see `CONDITIONS`.

    Returns:
        Mappings with `name`.

    Raises:
        ValueError: If one is none that is known, or there twice, or an argument is out of range.

    Example:
        >>> parsed_conditions([{"name": "nonfinite", "num": 1}])
        [{'name': 'nonfinite', 'num': 1, 'window': 10}]
    """
    found = [_checked_condition(named_spec("conditions", spec, CONDITIONS)) for spec in _listed("conditions", specs)]
    refuse_twice("conditions", [one["name"] for one in found])
    return found


def parsed_ladder(specs: Sequence[Spec]) -> list[dict[str, Any]]:
    """Rungs with all of their arguments.

    Args:
        specs: As a user has written them; see `RUNGS`.

    Returns:
        Mappings with `name`.

    Raises:
        ValueError: If one is none that is known, or there twice, or out of order, or an argument is out of range.

    Example:
        >>> [rung["name"] for rung in parsed_ladder(["alarm", {"name": "lower_lr", "factor": 0.1}, "stop"])]
        ['alarm', 'lower_lr', 'stop']
    """
    specs = _listed("ladder", specs)
    if any(callable(spec) for spec in specs):
        raise ValueError(f"ladder: {next(filter(callable, specs))!r}: a function is no rung; known are {words(RUNGS)}")
    found = [_checked_rung(named_spec("ladder", spec, RUNGS)) for spec in specs]
    names = [one["name"] for one in found]
    refuse_twice("ladder", names)
    order = list(RUNGS)
    if names != sorted(names, key=order.index):
        raise ValueError(f"ladder={names}: expected them from the mildest to the last: {words(RUNGS)}")
    return found


def plain_specs(parsed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was parsed as plain types, for a checkpoint; a function by its name.

    Args:
        parsed: Of `parsed_conditions` or `parsed_ladder`.
    """
    return [{key: function_name(value) if callable(value) else value for key, value in one.items()} for one in parsed]


def quiet_steps(conditions: Sequence[Mapping[str, Any]]) -> int:
    """Steps without trouble after which none of these conditions can have held all along.

    Args:
        conditions: Of `parsed_conditions`.

    Example:
        >>> quiet_steps(parsed_conditions(["nonfinite", "loss"]))
        40
    """
    periods = [one["window"] if one["name"] == "nonfinite" else one.get("num_steps", 1) for one in conditions]
    return 2 * max(periods, default=1)


def _listed(argument: str, specs: Any) -> list[Any]:
    if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence):
        example = "['nonfinite']" if argument == "conditions" else "['alarm']"
        raise ValueError(f"{argument}={specs!r}: expected a list, such as {example}; [] for none")
    return list(specs)


def _checked_condition(one: dict[str, Any]) -> dict[str, Any]:
    where = f"conditions: {one['name']}"
    if one["name"] == "nonfinite":
        check_whole(f"{where}: num", one["num"], low=1)
        check_whole(f"{where}: window", one["window"], low=one["num"])
    elif one["name"] == "loss":
        check_number(f"{where}: k", one["k"], above=0)
        check_whole(f"{where}: num_steps", one["num_steps"], low=1)
        check_whole(f"{where}: window", one["window"], low=20)
    elif not callable(one["function"]):
        return {
            **one,
            "function": imported_function("conditions: call: function", one["function"], example="my.alerts.is_lost"),
        }
    return one


def _checked_rung(one: dict[str, Any]) -> dict[str, Any]:
    where = f"ladder: {one['name']}"
    if one["name"] == "lower_lr":
        check_number(f"{where}: factor", one["factor"], above=0, below=1)
        check_whole(f"{where}: num_steps", one["num_steps"], low=1)
    elif one["name"] == "roll_back":
        check_whole(f"{where}: max_rollbacks", one["max_rollbacks"], low=1)
        check_whole(f"{where}: cooldown_steps", one["cooldown_steps"], low=0)
        check_number(f"{where}: lr_factor", one["lr_factor"], above=0, high=1)
        check_whole(f"{where}: lr_steps", one["lr_steps"], low=1)
    return one
