"""States of callbacks in a folder: JSON for what is plain, safetensors for tensors. Nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["NAME", "Encoded", "encode_states", "has_states", "load_states", "save_states", "write_states"]

NAME = "stabilizer"
_MARK = "__tensor__"


class Encoded(NamedTuple):
    """States as they go into files: text, and tensors by name."""

    text: str
    tensors: dict[str, Tensor]


def encode_states(states: dict[str, Any]) -> Encoded:
    """Take states apart; every rank does, so that a state that cannot be saved is no rank's own trouble.

    Args:
        states: Of `state_dict`: plain types with text as keys, and tensors.

    Raises:
        TypeError: If there is anything else in them.
    """
    tensors: dict[str, Tensor] = {}
    plain = _without_tensors(states, "", tensors)
    return Encoded(json.dumps(plain), tensors)


def write_states(encoded: Encoded, folder: Path, *, name: str = NAME) -> None:
    """Write states. What breaks off in the middle leaves a folder without states.

    Args:
        encoded: From `encode_states`.
        folder: An existing one.
        name: Of the files.
    """
    from safetensors.torch import save_file

    path, unfinished = folder / f"{name}.json", folder / f"{name}.json.part"
    # First away with it, and last back, at once: a folder with this file is whole.
    path.unlink(missing_ok=True)
    save_file(encoded.tensors, folder / f"{name}.safetensors")
    unfinished.write_text(encoded.text, encoding="utf-8")
    unfinished.replace(path)


def save_states(states: dict[str, Any], folder: Path, *, name: str = NAME) -> None:
    """Encode and write states.

    Args:
        states: See `encode_states`.
        folder: An existing one.
        name: Of the files.
    """
    write_states(encode_states(states), folder, name=name)


def has_states(folder: Path, *, name: str = NAME) -> bool:
    """Whether a folder has states.

    Args:
        folder: Any.
        name: Of the files.
    """
    return (folder / f"{name}.json").is_file()


def load_states(folder: Path, *, name: str = NAME) -> dict[str, Any]:
    """Read states.

    Args:
        folder: One that `save_states` has written to.
        name: Of the files.

    Returns:
        What was saved; tensors are on the CPU.
    """
    from safetensors.torch import load_file

    plain = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    states: dict[str, Any] = _with_tensors(plain, load_file(folder / f"{name}.safetensors"))
    return states


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while path in tensors:  # a key may hold a slash
            path += "_"
        # A copy of its own: two views of one storage cannot be written.
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {_MARK: path}
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"state {path or '/'}: key {wrong[0]!r} is no text, and would come back as text")
        return {key: _without_tensors(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, f"{path}/{number}", tensors) for number, item in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_MARK}:
            return tensors[value[_MARK]]
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    return [_with_tensors(item, tensors) for item in value] if isinstance(value, list) else value
