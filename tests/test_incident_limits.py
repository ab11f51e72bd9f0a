"""The folder of incidents has limits, and a disk that fails ends nothing."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.errors import StabilizerWarning
from stabilizer.localize import writing
from stabilizer.localize.private_files import folder_size
from stabilizer.localize.writing import IncidentWriter
from tests.incidents import make_incident

BATCH: tuple[Any, Any] = (({"input_ids": torch.arange(12).reshape(3, 4)}, 4), {})


def test_no_more_incidents_than_the_limit_also_in_a_resumed_run(tmp_path: Path) -> None:
    for step in range(3):
        writer = IncidentWriter(tmp_path, max_incidents=3)
        assert not writer.is_full
        assert writer.write(make_incident(step=step)) is not None
    resumed = IncidentWriter(tmp_path, max_incidents=3)
    assert resumed.is_full
    with pytest.warns(StabilizerWarning, match=r"has 3 incidents, and max_incidents=3.*move the old ones or raise"):
        assert resumed.write(make_incident(step=3)) is None
    assert resumed.write(make_incident(step=4)) is None  # a second warning would be an error here
    assert len(list(tmp_path.iterdir())) == 3
    assert IncidentWriter(tmp_path, max_incidents=None).write(make_incident(step=9)) is not None


def test_other_folders_do_not_count(tmp_path: Path) -> None:
    for name in ("step_x", "checkpoints", ".step_3.abc.part"):
        (tmp_path / name).mkdir()
    assert IncidentWriter(tmp_path, max_incidents=1).write(make_incident()) is not None


def test_a_batch_over_the_limit_is_left_out_and_the_incident_is_not(tmp_path: Path) -> None:
    big = ((torch.zeros(40_000),), {})  # 160 kB
    writer = IncidentWriter(tmp_path, max_dump_mb=0.4, dump_batch=True)
    assert (writer.write(make_incident(step=0), batch=big) or tmp_path).joinpath("batch.safetensors").exists()
    assert (writer.write(make_incident(step=1), batch=big) or tmp_path).joinpath("batch.safetensors").exists()
    resumed = IncidentWriter(tmp_path, max_dump_mb=0.4, dump_batch=True)
    with pytest.warns(StabilizerWarning, match=r"batch.safetensors.*0.16 MB.*max_dump_mb=0.4"):
        folder = resumed.write(make_incident(step=2), batch=big)
    assert folder is not None
    assert sorted(path.name for path in folder.iterdir()) == ["incident.json", "incident.txt"]
    # A second warning would be an error here.
    assert resumed.write_batch(folder, big, rank=1, micro_batch=0) is None
    assert resumed.write(make_incident(step=3), batch=big) == tmp_path / "step_3"
    assert folder_size(tmp_path) <= 400_000


def test_a_picture_over_the_limit_is_left_out(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    with pytest.warns(StabilizerWarning, match=r"norms.png"):
        folder = IncidentWriter(tmp_path, max_dump_mb=0.005).write(make_incident(), figures={"norms": Figure(dpi=300)})
    assert folder is not None
    assert not (folder / "norms.png").exists()


def test_nothing_is_written_where_there_is_no_room(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(bytes(20_000))
    writer = IncidentWriter(tmp_path, max_dump_mb=0.02)
    assert writer.is_full
    with pytest.warns(StabilizerWarning, match=r"has 0.02 MB, and max_dump_mb=0.02"):
        assert writer.write(make_incident()) is None
    assert writer.write(make_incident()) is None  # a second warning would be an error here
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    "limit", [{"max_incidents": 0}, {"max_incidents": -1}, {"max_dump_mb": 0}, {"max_dump_mb": float("nan")}]
)
def test_a_limit_of_nothing_is_an_error(limit: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limit))}=.*expected more than 0"):
        IncidentWriter(tmp_path, **limit)


# A disk that fails.


def _full_disk(descriptor: int, *args: Any, **kwargs: Any) -> Any:
    os.close(descriptor)
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failing", ["fdopen", "mkdir", "rename"])
def test_a_disk_that_fails_is_told_of_once_and_ends_nothing(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = IncidentWriter(tmp_path / "incidents", dump_batch=True)
    (tmp_path / "incidents").mkdir()
    with monkeypatch.context() as patched:
        if failing == "fdopen":
            patched.setattr(os, "fdopen", _full_disk)
        else:

            def refuse(*args: Any, **kwargs: Any) -> None:
                raise OSError(errno.EROFS, "Read-only file system")

            patched.setattr(Path, failing, refuse)
        with pytest.warns(StabilizerWarning, match=f"{writer.folder}.*training goes on.*(No space|Read-only)"):
            assert writer.write(make_incident(), batch=BATCH) is None
        # A second warning would be an error here.
        assert writer.write(make_incident(), batch=BATCH) is None
        assert failing != "fdopen" or writer.write_batch(tmp_path, BATCH, rank=0, micro_batch=0) is None
    assert not [path for path in tmp_path.rglob("*") if path.name != "incidents"]
    assert writer.write(make_incident(), batch=BATCH) is not None


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("")
    with pytest.warns(StabilizerWarning, match="could not be written"):
        assert IncidentWriter(tmp_path / "incidents").write(make_incident()) is None


def test_what_breaks_off_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file it breaks off at: a folder that is there is whole."""
    writer, rename = IncidentWriter(tmp_path, dump_batch=True), Path.replace
    for last in range(3):
        num_calls = 0

        def interrupt(path: Path, target: Path, last: int = last) -> Path:
            nonlocal num_calls
            num_calls += 1
            if num_calls > last:
                raise KeyboardInterrupt
            return rename(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.write(make_incident(), batch=BATCH)
        assert list(tmp_path.iterdir()) == []


def test_other_ranks_tell_in_their_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writing, "current_rank", lambda: 1)
    writer = IncidentWriter(tmp_path, dump_batch=True)
    with caplog.at_level(logging.WARNING, "stabilizer"):
        assert writer.write_batch(tmp_path / "gone", BATCH, rank=1, micro_batch=0) is None
    assert "could not be written" in caplog.text
