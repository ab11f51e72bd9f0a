"""Checkpoints that are folders: what they are known by, what they have to have, and their files one by one."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from stabilizer.checkpoints.archive import Archive
from stabilizer.checkpoints.findings import Findings
from stabilizer.checkpoints.guard_file import FIRST_STATES, SUFFIX, TRAINER_STATE, guard_path
from stabilizer.checkpoints.reading import check_safetensors, check_structure, check_torch, step_of_states
from stabilizer.checkpoints.sharded import METADATA, check_sharded

__all__ = ["FILE_SUFFIXES", "check_folder", "files_of", "is_checkpoint", "peek_step"]

#: Of checkpoints that are one file.
FILE_SUFFIXES = (".ckpt", ".pt", ".pth")
_LIGHTNING_REST = "meta.pt"
_MODELS = ("model", "pytorch_model", "adapter_model")


def is_checkpoint(path: Path) -> bool:
    """Whether a path looks like a checkpoint, by its names alone.

    Args:
        path: A file or a folder; a link is none, what it leads to is.
    """
    if path.is_symlink():
        return False
    if path.is_dir():
        names = (METADATA, FIRST_STATES, TRAINER_STATE, guard_path(path, inside=True).name)
        return any((path / name).is_file() for name in names)
    return path.suffix in FILE_SUFFIXES and path.is_file()


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint, without guard files; links are not followed.

    Args:
        path: A file or a folder.

    Raises:
        OSError: If a folder cannot be read.
    """
    if not path.is_dir():
        return [path]
    found = []
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            found += files_of(Path(entry.path))
        elif not entry.name.endswith(SUFFIX) and not entry.name.startswith(".stabilizer"):
            found.append(Path(entry.path))
    return found


def check_folder(folder: Path, findings: Findings) -> None:
    """Check a checkpoint that is a folder, of whichever host.

    Args:
        folder: Of torch.distributed.checkpoint, of `accelerator.save_state`, or of transformers' trainer.
        findings: Takes what is wrong, the shapes, and the step.

    Raises:
        OSError: If a file cannot be read.
    """
    if (folder / METADATA).is_file():
        _check_lightning_folder(folder, findings)
    elif any((folder / name).is_file() for name in (FIRST_STATES, TRAINER_STATE, guard_path(folder, inside=True).name)):
        _check_files(folder, findings)
    else:
        findings.blame(f"it has neither {METADATA} nor random states: the save broke off, or it is no checkpoint")


def _check_lightning_folder(folder: Path, findings: Findings) -> None:
    check_sharded(folder, findings)
    rest = folder / _LIGHTNING_REST
    if rest.is_file():
        # Progress and states of callbacks, who may keep what is not finite.
        content = check_torch(rest, findings, label=f"{_LIGHTNING_REST}: ", is_free=True)
        if isinstance(content, dict) and findings.step < 0:
            findings.step = step_of_states(content.get("callbacks"), default=_whole(content.get("global_step")))
        findings.is_full = isinstance(content, dict) and "loops" in content
    elif findings.expected is not None:
        findings.blame(f"{_LIGHTNING_REST} is missing: the save broke off")


def _check_files(folder: Path, findings: Findings) -> None:
    files = [file.relative_to(folder).as_posix() for file in files_of(folder)]
    for name in sorted({name.partition("/")[0] for name in files}):
        path, label = folder / name, f"{name}: "
        if path.is_dir():
            if (path / METADATA).is_file():
                check_sharded(path, findings, label=label)
            else:
                findings.blame(f"{label}{METADATA} is missing: the save broke off")
        else:
            _check_file(path, findings, label)
    tops = {name.partition("/")[0] for name in files}
    (_check_trainer if TRAINER_STATE in tops else _check_accelerate)(tops, findings)
    if not any(name.startswith(_MODELS) for name in tops):
        findings.blame("no model is there: the save broke off")
    if findings.step < 0:
        findings.step = _step_of_folder(folder)


def _check_file(path: Path, findings: Findings, label: str) -> None:
    name = path.name
    is_model = name.startswith(_MODELS)
    if name.startswith("stabilizer") and path.suffix == ".safetensors":
        # States of callbacks: of no use if they cannot be read, but NaN may mean "none" there.
        check_safetensors(path, findings, label=label, is_free=True)
    elif path.suffix == ".safetensors":
        check_safetensors(path, findings, label=label, is_model=is_model)
    elif path.suffix in (".bin", ".pt") and (is_model or name.startswith("optimizer")):
        check_torch(path, findings, label=label, is_model=is_model)
    else:
        check_structure(path, findings, label=label)


def _check_accelerate(tops: set[str], findings: Findings) -> None:
    """A save that broke off lacks what comes late: Accelerate writes models, optimizers, then every rank its own."""
    expected = findings.expected
    _check_ranks(tops, r"random_states_(\d{1,9})\.pkl", "random_states_{}.pkl", findings)
    wanted = max(expected.num_optimizers if expected else 0, 1)
    found = len({name for name in tops if re.fullmatch(r"optimizer(_\d+)?(\.bin)?", name)})
    if found < wanted:
        findings.blame(f"{found} of {wanted} optimizers are there: the save broke off")


def _check_trainer(tops: set[str], findings: Findings) -> None:
    """Transformers' trainer writes its own state last; it may be told to save nothing but the model."""
    findings.is_full = any(re.fullmatch(r"optimizer(_\d+)?(\.pt|\.bin)?", name) for name in tops)
    if findings.is_full and "rng_state.pth" not in tops:
        _check_ranks(tops, r"rng_state_(\d{1,9})\.pth", "rng_state_{}.pth", findings)


def _check_ranks(tops: set[str], pattern: str, name: str, findings: Findings) -> None:
    """Every rank has its file."""
    ranks = {int(found[1]) for top in tops if (found := re.fullmatch(pattern, top))}
    known = findings.expected.num_processes if findings.expected else 0
    missing = [
        number for number in range(min(max(known, 1, *(rank + 1 for rank in ranks)), 1 << 20)) if number not in ranks
    ]
    if missing:
        findings.blame(f"{name.format(missing[0])} is missing: the save broke off")


def peek_step(path: Path) -> int:
    """The step of a checkpoint, without a look at its tensors; -1 if it does not say.

    Args:
        path: A file or a folder.
    """
    if path.is_dir() and not (path / METADATA).is_file():
        return _step_of_folder(path)
    file = path / _LIGHTNING_REST if path.is_dir() else path
    content: Any = None
    with contextlib.suppress(OSError, ValueError), file.open("rb") as opened:
        content = Archive(opened).content
    if not isinstance(content, dict):
        return -1
    return step_of_states(content.get("callbacks"), default=_whole(content.get("global_step")))


def _whole(value: Any) -> int:
    return value if type(value) is int else -1


def _step_of_folder(folder: Path) -> int:
    found = re.search(r"(\d{1,15})$", folder.name)
    own = _json(folder / TRAINER_STATE).get("global_step", int(found[1]) if found else -1)
    return step_of_states(_json(folder / "stabilizer.json"), default=_whole(own))


def _json(path: Path) -> dict[str, Any]:
    found: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
    return found if isinstance(found, dict) else {}
