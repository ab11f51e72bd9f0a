"""Files of checkpoints by their format: Lightning's, those of Accelerate, and any of `torch.save`."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from stabilizer.checkpoints.archive import Archive, named_tensors
from stabilizer.checkpoints.findings import Findings
from stabilizer.checkpoints.finiteness import Nonfinite, count_nonfinite, is_finite
from stabilizer.checkpoints.inert import SavedTensor

__all__ = ["check_lightning", "check_safetensors", "check_structure", "check_torch", "step_of_states"]

_OURS = "steps"  # key in a state of a callback of ours


def check_torch(
    path: Path, findings: Findings, *, label: str = "", is_model: bool = False, is_free: bool = False
) -> Any:
    """Check a file of `torch.save`: whole, loadable, and all its tensors finite.

    Args:
        path: The file.
        findings: Takes what is wrong.
        label: What comes before the names, for people.
        is_model: Whether its tensors are the model's.
        is_free: Whether they may be what is not finite.

    Returns:
        What is in it, tensors as `SavedTensor`; `None` if it is not whole.
    """
    with path.open("rb") as file:
        content, archive = _open(path, file, findings, label)
        tensors = _tensors(content, findings, label)
        _check(tensors, archive, findings, label, set(tensors) if is_model else set(), "", is_free=is_free)
    return content


def check_lightning(path: Path, findings: Findings) -> None:
    """Check a checkpoint of Lightning in one file.

    Of its tensors, those of the model and of the optimizers have to be finite: callbacks keep infinities by design (the
    best score so far of one that has seen none).

    Args:
        path: The file.
        findings: Takes what is wrong, the shapes, and the step.
    """
    with path.open("rb") as file:
        content, archive = _open(path, file, findings, "")
        if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
            # Not of Lightning: whatever its layout, the tensors must be finite. If nobody announced it as a
            # checkpoint, it may be anything.
            findings.is_full = findings.expected is not None
            tensors = _tensors(content, findings)
            _check(tensors, archive, findings, "", set(tensors), "")
            return
        findings.is_full = all(isinstance(content.get(key), dict | list) for key in ("optimizer_states", "loops"))
        callbacks, counted = content.get("callbacks"), content.get("global_step")
        findings.step = step_of_states(callbacks, default=counted if type(counted) is int else -1)
        tensors = _tensors(content["state_dict"], findings, path="state_dict")
        model = set(tensors)
        tensors.update(_tensors(content.get("optimizer_states"), findings, path="optimizer_states"))
        _check(tensors, archive, findings, "", model, "state_dict.")


def check_safetensors(
    path: Path, findings: Findings, *, label: str, is_model: bool = False, is_free: bool = False
) -> None:
    """Check a file of safetensors by its own reader.

    Args:
        path: The file.
        findings: Takes what is wrong.
        label: What comes before the names, for people.
        is_model: Whether its tensors are the model's.
        is_free: Whether they may be what is not finite.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                # One at a time: memory is bounded by the largest.
                tensor = file.get_tensor(name)
                if not is_free:
                    _check_loaded(name, tensor, findings, label, name if is_model else None)
    except (SafetensorError, ValueError, RuntimeError) as error:
        findings.blame(f"{label}it is cut off, or no safetensors file ({error})")


def check_structure(path: Path, findings: Findings, *, label: str) -> None:
    """Check what must not be unpickled and has no tensors to look at: that its end is there.

    Args:
        path: A file.
        findings: Takes what is wrong.
        label: For people.
    """
    if not path.stat().st_size:
        findings.blame(f"{label}it is empty")
    elif path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            findings.blame(f"{label}it is cut off, or no JSON")
    elif path.suffix in (".pkl", ".bin", ".pt", ".pth"):
        with path.open("rb") as file:
            start = file.read(2)
        # torch.save writes a zip file, whose table stands at its end; a plain pickle ends with a full stop.
        if start == b"PK" and not zipfile.is_zipfile(path):
            findings.blame(f"{label}it is cut off")


def step_of_states(states: Any, *, default: int = -1) -> int:
    """The step in the states of callbacks of ours.

    Args:
        states: By the key of each callback, as it was read.
        default: If there is none.

    Example:
        >>> step_of_states({"GradNormCallback": {"version": 1, "hyperparameters": {}, "steps": {"0": 7}, "extra": {}}})
        7
    """
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict) and {"version", "hyperparameters", "steps", "extra"} <= state.keys():
            steps = state[_OURS]
            counted = steps.get("0") if isinstance(steps, dict) else None
            if type(counted) is int and counted >= 0:
                return counted
    return default


def _open(path: Path, file: IO[bytes], findings: Findings, label: str) -> tuple[Any, Archive | None]:
    """What is in a file, and its reader; without a reader the tensors are loaded."""
    try:
        if not zipfile.is_zipfile(file):
            return _load_legacy(path), None
        archive = Archive(file)
        _load_without_data(path)  # last: it knows no bounds
    except ValueError as error:
        findings.blame(f"{label}{error}")
        return None, None
    return archive.content, archive


def _tensors(content: Any, findings: Findings, label: str = "", *, path: str = "") -> dict[str, SavedTensor | Tensor]:
    try:
        return dict(named_tensors(content, path))
    except ValueError as error:
        findings.blame(f"{label}{path}{': ' if path else ''}{error}")
        return {}


def _load_without_data(path: Path) -> None:
    """Load it as a resumed run would, but for the elements."""
    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        return  # an object that `weights_only` does not know, which a user may have put there; it is read as data
    except Exception as error:
        raise ValueError(f"torch.load: {type(error).__name__}: {error}") from None


def _load_legacy(path: Path) -> Any:
    """The format of torch before 1.6; a zip file that is cut off looks like none as well."""
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            raise ValueError("it is cut off")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"no file of torch.save ({type(error).__name__})") from None


def _check(
    tensors: dict[str, SavedTensor | Tensor],
    archive: Archive | None,
    findings: Findings,
    label: str,
    model: set[str],
    prefix: str,
    *,
    is_free: bool = False,
) -> None:
    if archive is not None:
        saved = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, SavedTensor)}
        try:
            bad = archive.check(saved)
        except ValueError as error:
            findings.blame(f"{label}{error}")
            bad = {}
    else:
        bad = {name: count_nonfinite(t) for name, t in tensors.items() if isinstance(t, Tensor) and not is_finite(t)}
    for name, tensor in tensors.items():
        model_name = name.removeprefix(prefix) if name in model else None
        if model_name is not None:
            findings.see_shape(model_name, tensor.shape)
        if name in bad and not is_free:
            _blame(label + name, bad[name], tensor.shape, findings, model_name)


def _check_loaded(name: str, tensor: Tensor, findings: Findings, label: str, model_name: str | None) -> None:
    if model_name is not None:
        findings.see_shape(model_name, tensor.shape)
    if not is_finite(tensor):
        _blame(label + name, count_nonfinite(tensor), tensor.shape, findings, model_name)


def _blame(name: str, count: Nonfinite, shape: Any, findings: Findings, model_name: str | None) -> None:
    findings.see_nonfinite(name, count, num_elements=math.prod(shape), model_name=model_name)
