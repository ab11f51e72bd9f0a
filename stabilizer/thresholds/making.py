"""Threshold rules from what a user writes: a name, a mapping from YAML, or a rule."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

from stabilizer.thresholds.arguments import closest
from stabilizer.thresholds.fixed import Fixed
from stabilizer.thresholds.mean_multiple import MeanMultiple
from stabilizer.thresholds.quantile import Quantile
from stabilizer.thresholds.robust_log import RobustLog
from stabilizer.thresholds.rule import ThresholdRule
from stabilizer.thresholds.zscore import ZScore

__all__ = ["RULES", "RuleSpec", "make_rule"]

RuleSpec: TypeAlias = str | Mapping[str, Any] | ThresholdRule

#: The rules that have a name.
RULES: Mapping[str, type[ThresholdRule]] = {
    rule.name: rule for rule in (RobustLog, MeanMultiple, Quantile, ZScore, Fixed)
}


def make_rule(spec: RuleSpec) -> ThresholdRule:
    """A rule of one's own, not started yet.

    Args:
        spec: A name; a mapping with a `name` and arguments, or with a `class_path` and `init_args`; or a rule, which is
            copied without its state.

    Returns:
        The rule.

    Raises:
        ValueError: If there is no such rule, or it refuses an argument; with the value, what is allowed and the closest
            name.

    Example:
        >>> make_rule({"name": "robust_log", "k": 4.0}).describe()
        'robust_log(k=4.0, min_ratio=2.0, sigma_min=0.05, decay=0.98, warmup_steps=50, escape_after=32)'
        >>> make_rule("robustlog")
        Traceback (most recent call last):
        ...
        ValueError: rule='robustlog': expected one of robust_log, mean_multiple, quantile, zscore, fixed; the closest is
        robust_log
    """
    if isinstance(spec, ThresholdRule):
        rule = copy.deepcopy(spec)
        rule.forget()
        return rule
    if isinstance(spec, str):
        return _made(_named(spec), {}, spec)
    if not isinstance(spec, Mapping):
        raise ValueError(f"rule={spec!r}: expected a name ({', '.join(RULES)}), a mapping or a rule")
    if "class_path" in spec:
        return _from_class_path(spec)
    if "name" not in spec:
        raise ValueError(f"rule={dict(spec)!r}: expected a name ({', '.join(RULES)}) or a class_path in it")
    arguments = {key: value for key, value in spec.items() if key != "name"}
    return _made(_named(spec["name"]), arguments, str(spec["name"]))


def _named(name: Any) -> type[ThresholdRule]:
    if name not in tuple(RULES):
        raise ValueError(f"rule={name!r}: expected one of {', '.join(RULES)}{closest(name, RULES)}")
    return RULES[name]


def _from_class_path(spec: Mapping[str, Any]) -> ThresholdRule:
    path, arguments = spec["class_path"], spec.get("init_args") or {}
    unknown = [key for key in spec if key not in ("class_path", "init_args")]
    if unknown:
        raise ValueError(f"rule: {unknown[0]!r} beside class_path: arguments belong into init_args")
    if not isinstance(path, str) or "." not in path:
        raise ValueError(f"class_path={path!r}: expected the whole path of a class, such as my_package.MyRule")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"init_args={arguments!r}: expected a mapping of arguments of {path}")
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"class_path={path!r} cannot be imported ({error})") from error
    if not (isinstance(found, type) and issubclass(found, ThresholdRule)):
        raise ValueError(f"class_path={path!r} is no subclass of stabilizer.thresholds.ThresholdRule")
    return _made(found, dict(arguments), path)


def _made(rule: type[ThresholdRule], arguments: dict[str, Any], name: str) -> ThresholdRule:
    if inspect.isabstract(rule):
        missing = ", ".join(sorted(rule.__abstractmethods__))
        raise ValueError(f"rule {name} does not implement {missing}")
    parameters = inspect.signature(rule).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    for key in arguments:
        if key not in known and not takes_any:
            raise ValueError(
                f"rule {name}: {key!r} is no argument; known are {', '.join(known) or 'none'}{closest(key, known)}"
            )
    for parameter in parameters:
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and parameter.name not in arguments:
            raise ValueError(f"rule {name} needs {parameter.name}: write {{name: {name}, {parameter.name}: ...}}")
    try:
        return rule(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rule {name}: {error}") from error
