"""States of callbacks in a folder: JSON for what is plain, safetensors for tensors. Nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["NAME", "has_states", "load_states", "save_states"]

NAME = "stabilizer"
_MARK = "__tensor__"


def save_states(states: dict[str, Any], folder: Path, *, name: str = NAME) -> None:
    """Write states.

    Args:
        states: Of `state_dict`: plain types with text as keys, and tensors.
        folder: An existing one.
        name: Of the files.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    plain = _without_tensors(states, "", tensors)
    save_file(tensors, folder / f"{name}.safetensors")
    # Last, and at once: a folder with this file is whole.
    unfinished = folder / f"{name}.json.part"
    unfinished.write_text(json.dumps(plain), encoding="utf-8")
    unfinished.replace(folder / f"{name}.json")


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
        # A copy of its own: two views of one storage cannot be written.
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {_MARK: path}
    if isinstance(value, dict):
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
