"""What a run was configured with: all arguments of all callbacks, for a person, for `load_callbacks`, for a table."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import math
import numbers
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, TypeAlias

import torch

from stabilizer.markdown import code

__all__ = ["arguments_of", "configuration_text", "feature_of", "flat_arguments"]

#: What a YAML file can hold.
Plain: TypeAlias = Any

_PACKAGE = "stabilizer.callbacks."
# Of one argument: a threshold for every layer has room, a table of data has none.
_MAX_ITEMS, _MAX_LEVELS, _MAX_CHARS = 2000, 8, 2000
# Host as a callback knows it -> the distributions that may be it.
_HOSTS: Mapping[str, tuple[str, ...]] = {
    "lightning": ("lightning", "pytorch-lightning"),
    "accelerate": ("accelerate",),
    "transformers": ("transformers", "trl", "accelerate"),
    "plain": (),
}


class _Foreign:
    """A value that no YAML file can hold, such as a tokenizer, or that is too large for one.

    Args:
        value: It; not kept.
    """

    def __init__(self, value: Any) -> None:
        self.text = f"an object of {type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, str | Sequence | Mapping):
            self.text += f" with {len(value):,} items"


def feature_of(callback: Any) -> str:
    """What a callback is called in a YAML file; the name of the class for one of a user's own.

    Args:
        callback: Any of ours.
    """
    kind = type(callback)
    return kind.__name__ if _is_own(callback) else kind.__module__.removeprefix(_PACKAGE)


def _is_own(callback: Any) -> bool:
    """Whether it is of a user's own class, which no YAML file knows."""
    return not type(callback).__module__.startswith(_PACKAGE)


def arguments_of(callback: Any) -> dict[str, Any]:
    """All arguments of a callback, those that were left at their defaults as well.

    Args:
        callback: Any of ours.

    Returns:
        By name, in the order of the class: plain values, and `_Foreign` for what is none.
    """
    given = callback.given_arguments
    parameters = inspect.signature(type(callback)).parameters.values()
    known = {
        parameter.name: given.get(parameter.name, parameter.default)
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    found = {name: value for name, value in {**known, **given}.items() if value is not inspect.Parameter.empty}
    return {name: _plain(value) for name, value in found.items()}


def flat_arguments(callbacks: Sequence[Any], *, world_size: int, host: str) -> dict[str, bool | float | str]:
    """The arguments as one row of a table.

    Args:
        callbacks: Ours.
        world_size: Number of processes.
        host: See `RunHost.kind`.

    Returns:
        By "feature.argument", or "feature[name].argument"; lists and mappings as JSON, `None` as "null".
    """
    row: dict[str, bool | float | str] = {"world_size": world_size, "host": host}
    row.update({f"versions.{name}": version for name, version in _versions(host).items()})
    for callback in callbacks:
        start = feature_of(callback) + (f"[{callback.name}]" if callback.name else "")
        for name, value in arguments_of(callback).items():
            if name != "name":
                # A number that is not finite is no number of the table's.
                fits = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
                row[f"{start}.{name}"] = value if fits else _short(value)
    return row


def configuration_text(callbacks: Sequence[Any], *, world_size: int, host: str) -> str:
    """The configuration as Markdown, with YAML that `load_callbacks` takes; a user's own callbacks are comments in it.

    Args:
        callbacks: Ours.
        world_size: Number of processes.
        host: See `RunHost.kind`.
    """
    versions = ", ".join(f"{name} {version}" for name, version in _versions(host).items())
    # A file has one callback of a kind; of a second one there is a second file.
    files: list[dict[str, Any]] = []
    own: list[str] = []
    for callback in callbacks:
        feature = feature_of(callback)
        if _is_own(callback):
            own += [f"# {line}" for line in _yaml({feature: arguments_of(callback)}).splitlines()]
            continue
        file = next((file for file in files if feature not in file), None)
        if file is None:
            files.append(file := {})
        file[feature] = arguments_of(callback)
    contents = [_yaml(file) for file in files] or [""]
    contents[0] = "\n".join([contents[0], *own]).strip()
    blocks = [code(content, language="yaml") for content in contents]
    intro = f"**{len(callbacks)} callbacks** on {world_size} process{'es' * (world_size > 1)} in {_HOST_WORDS[host]}"
    return "\n\n".join([f"{intro}. {versions}.", *blocks, _HINT])


_HINT = (
    "Where to look: Custom Scalars has one page a topic. It hides peaks at first: untick *Ignore outliers in chart "
    "scaling*, and set *Smoothing* to 0."
)
_HOST_WORDS = {"lightning": "Lightning", "accelerate": "Accelerate", "transformers": "transformers", "plain": "a loop"}


def _versions(host: str) -> dict[str, str]:
    found = {
        "stabilizer": _version("torch-stabilizer"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {**found, **{name: version for name in _HOSTS[host] if (version := _version(name))}}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _plain(value: Any) -> Any:
    """What a YAML file can hold of a value; `_Foreign` for what it cannot, and for what nobody would read in it."""
    try:
        return _converted(value, _Room(), level=0)
    except _TooLargeError:
        return _Foreign(value)


class _TooLargeError(Exception):
    """A value has too many items, or too many levels of them."""


class _Room:
    """Counts the items of one argument."""

    def __init__(self) -> None:
        self.left = _MAX_ITEMS

    def take(self, num: int) -> None:
        self.left -= num
        if self.left < 0:
            raise _TooLargeError


def _converted(value: Any, room: _Room, *, level: int) -> Any:
    if level > _MAX_LEVELS:  # it may hold itself
        raise _TooLargeError
    if isinstance(value, enum.Enum):
        return _converted(value.value, room, level=level + 1)
    if value is None or isinstance(value, bool):
        return value
    # Numbers of numpy are numbers, and no YAML file knows them.
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, Mapping | Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return _items(value, room, level=level + 1)
    if dataclasses.is_dataclass(value) and hasattr(value, "as_dict"):
        return _converted(value.as_dict(), room, level=level + 1)
    if callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    return _Foreign(value)


def _items(value: Mapping[Any, Any] | Sequence[Any], room: _Room, *, level: int) -> Any:
    if isinstance(value, str):
        if len(value) > _MAX_CHARS:
            raise _TooLargeError
        return "".join(value)
    room.take(len(value))
    if isinstance(value, Mapping):
        return {str(key): _converted(item, room, level=level) for key, item in value.items()}
    return [_converted(item, room, level=level) for item in value]


def _short(value: Any) -> str:
    return value.text if isinstance(value, _Foreign) else json.dumps(value, default=lambda item: item.text)


def _yaml(file: Mapping[str, Mapping[str, Any]]) -> str:
    """One argument a line; what is no plain value stands there as a comment."""
    import yaml  # type: ignore[import-untyped]

    lines = []
    for feature, arguments in file.items():
        lines.append(f"{feature}:")
        for name, value in arguments.items():
            if _is_plain(value):
                # In a list, since a scalar alone would be a document with a mark at its end.
                text = yaml.safe_dump(
                    [value], default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False
                )
                lines.append(f"  {name}: {text.strip()[1:-1]}")
            else:
                lines.append(f"  # {name}: {_short(value)}")
        if all(line.startswith("  #") for line in lines[lines.index(f"{feature}:") + 1 :]):
            lines[lines.index(f"{feature}:")] += " true"
    return "\n".join(lines)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    return all(_is_plain(item) for item in value) if isinstance(value, list) else not isinstance(value, _Foreign)
