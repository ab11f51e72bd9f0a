"""Callbacks from a YAML file.

The file maps a feature to a switch or to its callback's arguments, as in `grad_norm: {every_n_steps: 5}`.

`stabilizer.callbacks` re-exports what is here, so the callbacks are imported inside functions.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stabilizer.errors import warn
from stabilizer.plain_yaml import BadFileError, read_mapping, short
from stabilizer.thresholds.arguments import closest

if TYPE_CHECKING:
    import os

    from stabilizer.callbacks.base import StabilizerCallback

__all__ = ["FEATURES", "PRESETS", "load_callbacks", "recommended"]

#: Key in the file -> module and class. The order is that of the callbacks.
FEATURES: Mapping[str, str] = {
    "grad_norm": "stabilizer.callbacks.grad_norm.GradNormCallback",
    "loss_mean_var": "stabilizer.callbacks.loss_mean_var.LossMeanVarCallback",
    "layer_clip": "stabilizer.callbacks.layer_clip.LayerClipCallback",
    "adaptive_clip": "stabilizer.callbacks.adaptive_clip.AdaptiveClipThreshold",
    "grad_loc": "stabilizer.callbacks.grad_loc.GradLocCallback",
    "grad_noise_scale": "stabilizer.callbacks.grad_noise_scale.GradNoiseScaleCallback",
    "early_warning": "stabilizer.callbacks.early_warning.EarlyWarningCallback",
    "layer_health": "stabilizer.callbacks.layer_health.LayerHealthCallback",
    "numerics": "stabilizer.callbacks.numerics.NumericsCallback",
    "rollout_mismatch": "stabilizer.callbacks.rollout_mismatch.RolloutMismatchCallback",
    "checkpoint_guard": "stabilizer.callbacks.checkpoint_guard.CheckpointGuardCallback",
    "update_clip": "stabilizer.callbacks.update_clip.UpdateClipCallback",
    "drill": "stabilizer.callbacks.drill.DrillCallback",
}

#: Name -> feature -> arguments. "safe" is what `recommended` gives.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "safe": {"grad_norm": {}, "loss_mean_var": {}, "adaptive_clip": {}, "grad_loc": {}},
}


_EXPECTED = f"features, such as grad_norm: true ({', '.join(FEATURES)})"


def load_callbacks(path: str | os.PathLike[str]) -> list[StabilizerCallback]:
    r"""Make the callbacks that a YAML file describes.

    Args:
        path: The file. Its keys are features (`grad_norm`, `loss_mean_var`), each with `true`, `false` or a mapping of
            the callback's arguments, in which `enabled: false` switches it off as well; `preset: safe` starts from the
            default suite, which the other keys change.

    Returns:
        The callbacks, for any host; an empty list, with a warning, if every feature is off.

    Raises:
        ValueError: If the file cannot be used. The message names the file, the key path, the value and what is allowed.
        OSError: If there is no such file.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "stabilizer.yaml")
        ...     _ = path.write_text("grad_norm: {every_n_steps: 5}\nloss_mean_var: false\n")
        ...     [callback] = load_callbacks(path)
        >>> callback.every_n_steps
        5
    """
    path = Path(path)
    content = path.read_bytes()
    try:
        callbacks = _make(_merged(read_mapping(content, expected=_EXPECTED)))
    except BadFileError as error:
        raise ValueError(f"{path}: {error}") from None
    if not callbacks:
        warn(f"{path}: every feature is off, so there are no callbacks; known features: {', '.join(FEATURES)}")
    return callbacks


def recommended(*, name: str = "") -> list[StabilizerCallback]:
    """Make the default suite; `preset: safe` in a file is the same.

    Args:
        name: Of every callback: prefix of their tags, for one suite of several.

    Returns:
        New callbacks.

    Example:
        >>> [type(callback).__name__ for callback in recommended()]
        ['GradNormCallback', 'LossMeanVarCallback', 'AdaptiveClipThreshold', 'GradLocCallback']
    """
    return _make({feature: {"name": name, **arguments} for feature, arguments in PRESETS["safe"].items()})


def _merged(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Feature -> arguments, in which `enabled` may be False; of the preset, changed by the other keys."""
    found: dict[str, dict[str, Any]] = {}
    if "preset" in content:
        preset = content["preset"]
        if not isinstance(preset, str) or preset not in PRESETS:
            raise BadFileError(
                f"preset={short(preset)}: expected one of {', '.join(PRESETS)}{closest(preset, PRESETS)}"
            )
        found = {feature: dict(arguments) for feature, arguments in PRESETS[preset].items()}
    for feature, value in content.items():
        if feature == "preset":
            continue
        if feature not in FEATURES:
            known = [*FEATURES, "preset"]
            raise BadFileError(f"{feature}: unknown feature; known are {', '.join(known)}{closest(feature, known)}")
        if value is not None and not isinstance(value, bool | dict):
            raise BadFileError(f"{feature}={short(value)}: expected true, false or a mapping of arguments")
        arguments = {"enabled": True, **value} if isinstance(value, dict) else {"enabled": bool(value)}
        if not isinstance(arguments["enabled"], bool):
            raise BadFileError(f"{feature}.enabled={short(arguments['enabled'])}: expected true or false")
        found[feature] = {**found.get(feature, {}), **arguments}
    return found


def _make(features: Mapping[str, Mapping[str, Any]]) -> list[StabilizerCallback]:
    """Callbacks in the order of the table. What is switched off is made as well: its mistakes are mistakes."""
    callbacks = []
    for feature in (feature for feature in FEATURES if feature in features):
        arguments = dict(features[feature])
        is_enabled = arguments.pop("enabled", True)
        callback = _make_one(feature, arguments)
        callbacks += [callback] if is_enabled else []
    return callbacks


def _make_one(feature: str, arguments: Mapping[str, Any]) -> StabilizerCallback:
    import jsonargparse

    module, _, name = FEATURES[feature].rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    hints = typing.get_type_hints(kind.__init__)
    parameters = inspect.signature(kind).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_class_arguments(kind, None)
    values: dict[str, Any] = {}
    for argument, value in arguments.items():
        if argument not in known:
            choices = ["enabled", *known]
            raise BadFileError(
                f"{feature}.{argument}={short(value)}: unknown argument; known are {', '.join(choices)}"
                f"{closest(argument, choices)}"
            )
        values[argument] = _parsed(parser, f"{feature}.{argument}", value, hints[argument])
    try:
        return typing.cast("StabilizerCallback", kind(**values))
    except ValueError as error:
        at_argument = re.match(r"(\w+)[=:]", str(error))
        joint = "." if at_argument and at_argument[1] in known else ": "
        raise BadFileError(f"{feature}{joint}{error}") from None


def _parsed(parser: Any, key_path: str, value: Any, hint: Any) -> Any:
    import jsonargparse

    argument = key_path.rpartition(".")[2]
    if value is not None or hint is Any or type(None) in typing.get_args(hint):
        try:
            parsed = parser.parse_object({argument: _masked(value)}, defaults=False)
            instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
            return _masked(instantiate(parsed).as_dict()[argument], undo=True)
        except (jsonargparse.ArgumentError, TypeError):
            pass
    raise BadFileError(f"{key_path}={short(value)}: expected {_listed(_choices(hint))}")


def _masked(value: Any, *, undo: bool = False) -> Any:
    """Mark text that looks like another type: jsonargparse would read the text "5" as a number once more."""
    if isinstance(value, dict):
        return {key: _masked(item, undo=undo) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, undo=undo) for item in value]
    if not isinstance(value, str):
        return value
    if undo:
        return value.removeprefix(_MARK)
    return _MARK + value if _LOOKS_LIKE_ANOTHER_TYPE.match(value) else value


_MARK = "text:"
_LOOKS_LIKE_ANOTHER_TYPE = re.compile(
    rf"\s*([-+.\d\[{{~]|(true|false|yes|no|on|off|null)\s*$|$)|{_MARK}", re.IGNORECASE
)


def _choices(hint: Any) -> list[str]:
    """A type in a user's words, its alternatives apart."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [choice for part in sorted(inner, key=lambda part: part is not type(None)) for choice in _choices(part)]
    if origin is typing.Literal:
        return [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in inner]
    if origin is Callable or hint is Callable:
        return ["the import path of a function"]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return [f"a mapping of {_listed(_choices(inner[0]))} to {_listed(_choices(inner[1]))}"]
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [f"a list in which each item is {_listed(_choices(inner[0]))}"]
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return ["any value" if hint is Any else words.get(hint, getattr(hint, "__name__", str(hint)))]


def _listed(choices: Sequence[str]) -> str:
    return ", ".join(choices[:-1]) + " or " + choices[-1] if choices[1:] else choices[0]
