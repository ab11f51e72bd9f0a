"""Incidents in a folder: private, within limits, whole or not there, and never the end of a run."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from stabilizer.errors import StabilizerWarning
from stabilizer.localize import writing
from stabilizer.localize.incident import Incident
from stabilizer.localize.writing import IncidentWriter, load_batch
from tests.incidents import make_incident

IDS = torch.arange(12).reshape(3, 4)
SECRET = 7777777
BATCH: tuple[Any, Any] = (
    (
        {
            "input_ids": IDS,
            "meta": {"user": torch.tensor([SECRET]), "weights": (torch.ones(2), torch.zeros(3))},
            "user_name": "somebody's name",
        },
        4,
    ),
    {},
)


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Whatever is not closed by its own mode is open to everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def _all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def _written(folder: Path, **options: Any) -> Path:
    found = IncidentWriter(folder, **options).write(make_incident(), batch=BATCH)
    assert found is not None
    return found


# What is written.


def test_json_and_table(tmp_path: Path) -> None:
    folder = _written(tmp_path / "incidents")
    assert folder == tmp_path / "incidents" / "step_412"
    assert sorted(path.name for path in folder.iterdir()) == ["incident.json", "incident.txt"]
    assert Incident.from_json((folder / "incident.json").read_text()) == make_incident()
    assert "step 412" in (folder / "incident.txt").read_text()


def test_a_step_written_twice_overwrites_nothing(tmp_path: Path) -> None:
    """Two optimizers, or a run that was resumed from before it."""
    for number in range(3):
        IncidentWriter(tmp_path).write(make_incident(optimizer_index=number))
    names = ["step_412", "step_412_2", "step_412_3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    found = [Incident.from_json((tmp_path / name / "incident.json").read_text()).optimizer_index for name in names]
    assert found == [0, 1, 2]


def test_pictures(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    folder = IncidentWriter(tmp_path).write(make_incident(), figures={"norms": Figure()})
    assert folder is not None
    assert (folder / "norms.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_leaves_the_rest(tmp_path: Path) -> None:
    with pytest.warns(StabilizerWarning, match="picture norms"):
        folder = IncidentWriter(tmp_path).write(make_incident(), figures={"norms": object()})
    assert folder is not None
    assert (folder / "incident.json").exists()


# Privacy.


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
@pytest.mark.usefixtures("open_umask")
def test_only_the_owner_reads(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    parent = tmp_path / "logs" / "incidents"
    writer = IncidentWriter(parent, dump_batch=True)
    folder = writer.write(make_incident(), batch=BATCH, figures={"norms": Figure()})
    assert folder is not None
    assert writer.write_batch(folder, BATCH, rank=1, micro_batch=2) is not None
    files = list(folder.iterdir())
    assert len(files) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (parent, folder)} == {0o700}


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
@pytest.mark.usefixtures("open_umask")
def test_nobody_reads_while_it_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    rename = Path.replace

    def watched(path: Path, target: Path) -> Path:
        modes.append([stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)])
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    _written(tmp_path, dump_batch=True)
    assert modes == [[0o600, 0o700]] * 3


def test_no_batch_is_saved_by_default(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    assert IncidentWriter(tmp_path).write_batch(folder, BATCH, rank=0, micro_batch=0) is None
    assert not list(tmp_path.rglob("*.safetensors"))
    assert b"somebody" not in _all_bytes(tmp_path)


def test_the_batch_is_saved_on_request(tmp_path: Path) -> None:
    folder = _written(tmp_path, dump_batch=True)
    found = safetensors.torch.load_file(folder / "batch.safetensors")
    assert set(found) == {"input_ids", "meta.user", "meta.weights.0", "meta.weights.1"}
    assert torch.equal(found["input_ids"], IDS)
    assert b"somebody" not in _all_bytes(tmp_path)


@pytest.mark.parametrize("redact", [["user"], ["meta.user"], ["meta"], ["weights", "user"]])
def test_redacted_keys_are_left_out(redact: list[str], tmp_path: Path) -> None:
    folder = _written(tmp_path, dump_batch=True, redact=redact)
    assert SECRET.to_bytes(8, "little") not in _all_bytes(tmp_path)
    assert b"user" not in (folder / "batch.safetensors").read_bytes()
    batch, _ = load_batch(folder / "batch.safetensors")
    assert torch.equal(batch["input_ids"], IDS)
    assert ("weights" in batch.get("meta", {})) == (redact in (["user"], ["meta.user"]))


def test_a_key_that_does_not_exist_is_told_of(tmp_path: Path) -> None:
    """A mistyped key would leave the secret in."""
    with pytest.warns(StabilizerWarning, match=r"redact=\['users'\].*meta.user"):
        _written(tmp_path, dump_batch=True, redact=["users", "meta"])


def test_redact_is_a_list(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="redact='user': expected a list"):
        IncidentWriter(tmp_path, redact="user")


# Tensors of any kind.


def test_what_shares_memory_or_has_gaps_comes_back(tmp_path: Path) -> None:
    wide = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "all": wide,
        "view": wide[1:],
        "gaps": wide[:, ::2],
        "turned": wide.T,
        "scalar": torch.tensor(2.5),
        "half": wide.bfloat16(),
        "flags": wide > 3,
        "empty": wide[:0],
        "needs": wide.clone().requires_grad_(),
    }
    folder = IncidentWriter(tmp_path, dump_batch=True).write(make_incident(), batch=((tensors,), {}))
    assert folder is not None
    batch, place = load_batch(folder / "batch.safetensors")
    assert list(batch) == list(tensors)
    for key, tensor in tensors.items():
        assert torch.equal(batch[key], tensor)
        assert batch[key].dtype == tensor.dtype
    assert (place["rank"], place["micro_batch"]) == (0, 0)


def test_a_batch_that_cannot_be_saved_leaves_the_rest(tmp_path: Path) -> None:
    batch = ({"x": torch.ones(2, 2).to_sparse()},), {}
    with pytest.warns(StabilizerWarning, match="could not be saved"):
        folder = IncidentWriter(tmp_path, dump_batch=True).write(make_incident(), batch=batch)
    assert folder is not None
    assert (folder / "incident.json").exists()


def test_another_ranks_batch_stands_beside(tmp_path: Path) -> None:
    writer = IncidentWriter(tmp_path, dump_batch=True)
    folder = writer.write(make_incident())
    assert folder is not None
    path = writer.write_batch(folder, ((IDS, IDS + 1), {}), rank=3, micro_batch=1)
    assert path == folder / "batch_rank3_micro_batch1.safetensors"
    batch, place = load_batch(path)
    assert torch.equal(batch[1], IDS + 1)
    assert (place["rank"], place["micro_batch"]) == (3, 1)


def test_without_safetensors_dump_batch_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing.importlib.util, "find_spec", lambda name: None)
    IncidentWriter(tmp_path)
    with pytest.raises(ValueError, match="pip install safetensors"):
        IncidentWriter(tmp_path, dump_batch=True)
