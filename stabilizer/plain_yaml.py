"""YAML files as plain mappings: no key twice, no tags, no aliases, nothing but what is written there."""

from __future__ import annotations

import re
import typing
from typing import Any

__all__ = ["BadFileError", "read_mapping", "short"]

_MAX_DEPTH = 20  # arguments have few levels; far deeper ones would end in a RecursionError


class BadFileError(Exception):
    """What is wrong, without the name of the file."""


def read_mapping(content: bytes, *, expected: str) -> dict[str, Any]:
    """The mapping that a text is: plain types, text keys, no key twice, nothing but what is written there.

    Args:
        content: Of a file.
        expected: What there should be, for the message about an empty one.

    Raises:
        BadFileError: If it is no such text.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFileError(
            f"byte {content[error.start]:#04x} at {error.start} is not UTF-8: expected a text file"
        ) from None
    loader = _loader(yaml)
    try:
        _refuse_extras(yaml, text, loader)
        documents = list(yaml.compose_all(text, Loader=loader))
        if not documents or (isinstance(documents[0], yaml.ScalarNode) and not documents[0].value):
            raise BadFileError(f"the file is empty: expected {expected}")
        if len(documents) > 1:
            raise BadFileError(f"{len(documents)} documents: expected one; remove the line of --- between them")
        content_read = _plain(documents[0], loader(""), "")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise BadFileError(f"line {mark.line + 1}, column {mark.column + 1}: not YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        raise BadFileError(f"character {error.character:#x} at {error.position}: expected a text file") from None
    if not isinstance(content_read, dict):
        kind = "list" if isinstance(content_read, list) else "single value"
        raise BadFileError(f"a {kind} ({short(content_read)}): expected a mapping, such as grad_norm: true")
    return content_read


def _refuse_extras(yaml: Any, text: str, loader: Any) -> None:
    """Refuse what YAML can do beyond plain values, before anything is made of it."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise BadFileError("nested too deeply: expected features and their arguments")
        where = f"line {event.start_mark.line + 1}, column {event.start_mark.column + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise BadFileError(f"{where}: alias *{event.anchor}: expected the value itself, written out")
        if getattr(event, "tag", None) is not None:
            raise BadFileError(f"{where}: tag {event.tag!r}: expected plain values without tags")


def _loader(yaml: Any) -> Any:
    """PyYAML's safe loader without dates, octal and sexagesimal numbers, and with 1e-3 as the number it is."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: typing.ClassVar[dict[str, list[tuple[str, Any]]]] = {
            start: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] in ("bool", "null", "merge")]
            for start, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    number = r"[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9]\d*)$"), "-+0123456789")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{number})$"), "-+0123456789.")
    return Loader


def _plain(node: Any, loader: Any, key_path: str) -> Any:
    if node.id == "scalar":
        return loader.construct_object(node)
    if node.id == "sequence":
        return [_plain(item, loader, f"{key_path}[{number}]") for number, item in enumerate(node.value)]
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"line {key_node.start_mark.line + 1}: " + (f"{key_path}: " if key_path else "")
        if key_node.tag.endswith(":merge"):
            raise BadFileError(f"{where}merge key <<: expected the keys themselves, written out")
        key = loader.construct_object(key_node) if key_node.id == "scalar" else key_node.id
        if not isinstance(key, str) or key_node.id != "scalar":
            raise BadFileError(f"{where}key {key!r} is no text: expected a name, or quotes around it")
        if key in found:
            raise BadFileError(f"{where}key {key!r} is there twice: expected it once")
        found[key] = _plain(value_node, loader, f"{key_path}.{key}".lstrip("."))
    return found


def short(value: object) -> str:
    """A value for a message.

    Args:
        value: Any.
    """
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
