"""The guard of checkpoints in folders with much in them, and where others delete, or a save breaks off."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import CheckpointGuardCallback
from stabilizer.callbacks import checkpoint_worker as worker_module
from stabilizer.callbacks.checkpoint_saves import GuardedSaves
from stabilizer.checkpoints import Guard, index, last_good_checkpoint, read_guard, shelves, verify_checkpoint
from stabilizer.checkpoints.guard_file import guard_path, write_guard
from stabilizer.checkpoints.keeping import Keeper
from tests.checkpoint_runs import guards_below, lightning_run
from tests.models import make_mlp

MANY = 300


def _save(path: Path, step: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, "optimizer_states": [], "loops": {}, "global_step": step}, path)
    return path


def _guarded(folder: Path, name: str, step: int) -> Path:
    """A good checkpoint of an earlier run."""
    path = _save(folder / name, step)
    write_guard(guard_path(path), verify_checkpoint(path), durable=False)
    return path


def _fill(folder: Path) -> None:
    first = _guarded(folder, "old-0.ckpt", 1)
    guard = read_guard(first)
    assert guard is not None
    for number in range(1, MANY):
        path = folder / f"old-{number}.ckpt"
        os.link(first, path)
        files = tuple(dataclasses.replace(file, name=path.name) for file in guard.files)
        write_guard(guard_path(path), dataclasses.replace(guard, files=files), durable=False)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, threading.Thread]]:
    """The guard files that are read from now on, and by which thread."""
    found: list[tuple[str, threading.Thread]] = []

    def read(path: Path) -> Guard | None:
        found.append((path.name, threading.current_thread()))
        return read_guard(path)

    monkeypatch.setattr(shelves, "read_guard", read)
    return found


def test_a_save_costs_the_same_in_a_folder_with_hundreds_of_checkpoints(
    tmp_path: Path, reads: list[tuple[str, threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(tmp_path)
    saves = GuardedSaves(2, model=make_mlp())
    monkeypatch.setattr(saves, "expected", lambda: None)
    held: list[str] = []
    look = os.scandir

    def scandir(place: Any) -> Any:
        if saves.keeper.lock._is_owned():
            held.append(str(place))
        return look(place)

    monkeypatch.setattr(os, "scandir", scandir)
    counts = []
    for step in range(1, 7):
        before = len(reads)
        path = tmp_path / f"new-{step}.ckpt"
        saves.displace(path)
        saves.announce(path, step, inside=False)
        saves.saved(_save(path, step), step)
        saves.worker.wait()
        if step > 1 and saves.release(tmp_path / f"new-{step - 1}.ckpt"):
            (tmp_path / f"new-{step - 1}.ckpt").unlink()
        counts.append(len(reads) - before)
    assert counts[0] == MANY, "each is read once in a run"
    assert max(counts[1:]) <= 2
    assert threading.main_thread() not in {thread for name, thread in reads if name.startswith("old")}
    assert not held, "a save waits for the lock"
    assert sorted(path.name for path in tmp_path.glob("new*.ckpt")) == ["new-5.ckpt", "new-6.ckpt"]
    assert len(list(tmp_path.glob("old*.ckpt"))) == MANY


def test_what_changes_while_a_folder_is_looked_through_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        _guarded(tmp_path, f"{step}.ckpt", step)
    looked, known = index.read_entry, index.GuardIndex()

    def read(path: Path) -> Any:
        entry = looked(path)
        if path.name == "2.ckpt":
            known.put(path, Guard("bad", step=2))
            known.forget(tmp_path / "3.ckpt")
            known.put(tmp_path / "4.ckpt", Guard("pending", step=4))
        return entry

    monkeypatch.setattr(index, "read_entry", read)
    known.survey(tmp_path)
    found = {entry.path.name: entry.guard.verdict for entry in known.entries(tmp_path) if entry.guard}
    assert found == {"1.ckpt": "good", "2.ckpt": "bad", "4.ckpt": "pending"}


def test_what_others_have_written_is_seen(tmp_path: Path) -> None:
    path, known = _guarded(tmp_path, "1.ckpt", 1), index.GuardIndex()
    known.survey(tmp_path)
    for verdict in ("bad", "pending"):
        write_guard(guard_path(path), Guard(verdict, step=1))  # type: ignore[arg-type]
        known.survey(tmp_path)
        assert [entry.guard.verdict for entry in known.entries(tmp_path) if entry.guard] == [verdict]
        write_guard(guard_path(path), Guard(verdict, step=2))  # type: ignore[arg-type]
        guard = known.entry(path).guard
        assert guard is not None
        assert guard.step == 2


def test_a_good_one_that_somebody_deleted_takes_nobody_s_place(tmp_path: Path) -> None:
    keeper = Keeper(1)
    for step in (1, 2):
        path = _save(tmp_path / f"{step}.ckpt", step)
        keeper.note(path, Guard("pending", step=step))
        keeper.settle(path, verify_checkpoint(path))
    (tmp_path / "2.ckpt").unlink()
    assert not keeper.release(tmp_path / "1.ckpt")
    assert (tmp_path / "1.ckpt").exists()


def test_guard_files_of_what_somebody_deleted_are_taken_away(tmp_path: Path) -> None:
    """Those alone that name it: whatever else is called so is somebody's own."""
    keeper = Keeper(2)
    for step in (1, 2, 3):
        _guarded(tmp_path, f"{step}.ckpt", step)
    (tmp_path / "kept").mkdir()
    _guarded(tmp_path / "kept", "0.ckpt", 1).unlink()
    (tmp_path / "1.ckpt").unlink()
    (tmp_path / "2.ckpt").rename(tmp_path / "other.ckpt")
    shutil.copy(guard_path(tmp_path / "3.ckpt"), guard_path(tmp_path / "name.ckpt"))
    guard_path(tmp_path / "note.ckpt").write_text("{}")
    write_guard(guard_path(tmp_path / "soon.ckpt"), Guard("pending", step=4))
    write_guard(guard_path(tmp_path / "nameless.ckpt"), Guard("bad", step=4, reasons=("it cannot be read",)))
    for _ in range(2):
        keeper.survey(tmp_path)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.guard.json")) == [
        "3.ckpt.guard.json",
        "name.ckpt.guard.json",
        "nameless.ckpt.guard.json",
        "note.ckpt.guard.json",
        "soon.ckpt.guard.json",
    ]


def test_a_folder_that_is_a_link_is_one_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    _guarded(tmp_path / "disk", "1.ckpt", 1)
    keeper = Keeper(1)
    second = _save(tmp_path / "run" / "2.ckpt", 2)
    keeper.note(second, Guard("pending", step=2))
    keeper.settle(second, verify_checkpoint(second))
    assert keeper.known() == [tmp_path / "run" / "1.ckpt", second]
    assert keeper.release(tmp_path / "run" / "1.ckpt")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_deleted_before_it_is_verified_is_no_bad_checkpoint(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, runs = worker_module.verify_checkpoint, tmp_path / "runs"

    def verify(path: Path, **more: Any) -> Any:
        if "step=2" in path.name:
            shutil.rmtree(runs) if what == "folder" else path.unlink()
        return original(path, **more)

    monkeypatch.setattr(worker_module, "verify_checkpoint", verify)
    with caplog.at_level(logging.INFO, logger="stabilizer"):
        lightning_run(runs, CheckpointGuardCallback(), num_steps=2)
    assert caplog.text.count("step=2.ckpt was deleted before it was verified") == 1
    assert "BAD" not in caplog.text
    assert not guard_path(runs / "step=2.ckpt").exists()


def test_what_a_loop_never_saved_is_told(tmp_path: Path) -> None:
    saves = GuardedSaves(2, model=make_mlp())
    saves.announce(tmp_path / "typo.pt", 1, inside=False)
    saves.saved(tmp_path / "typo.pt", 1)
    saves.worker.wait()
    [(path, guard)] = saves.worker.verdicts
    assert (path.name, guard.verdict, saves.worker.num_bad) == ("typo.pt", "bad", 1)


def _breaks_off(number: int, *, whole: bool = False) -> Any:
    from lightning.pytorch.plugins import TorchCheckpointIO

    class Full(TorchCheckpointIO):
        num = 0

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.num += 1
            super().save_checkpoint(checkpoint, path, storage_options)
            if self.num == number:
                if not whole:
                    content = Path(path).read_bytes()
                    Path(path).write_bytes(content[: len(content) // 2])
                raise OSError(28, "No space left on device")

    return Full()


@pytest.mark.parametrize("checkpoint", [{}, {"save_last": True, "save_top_k": 0}])
def test_the_half_of_a_file_that_a_full_disk_leaves_is_taken_away(checkpoint: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        lightning_run(tmp_path, CheckpointGuardCallback(), checkpoint=checkpoint, plugins=[_breaks_off(3)])
    there = {name: (guard.verdict, guard.step) for name, guard in guards_below(tmp_path).items()}
    names = ("kept/step1-last.ckpt", "last.ckpt") if checkpoint else ("step=1.ckpt", "step=2.ckpt")
    assert there == {names[0]: ("good", 1), names[1]: ("good", 2)}
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.ckpt")} == set(names)
    assert last_good_checkpoint(tmp_path) == tmp_path / names[1]


def test_a_file_that_is_whole_or_was_there_stays(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        lightning_run(tmp_path / "whole", CheckpointGuardCallback(), plugins=[_breaks_off(2, whole=True)])
    assert last_good_checkpoint(tmp_path / "whole") == tmp_path / "whole" / "step=2.ckpt"
    checkpoint = {"save_last": True, "save_top_k": 0}
    guard = CheckpointGuardCallback(keep_good=None)
    with pytest.raises(OSError, match="No space left"):
        lightning_run(tmp_path / "over", guard, checkpoint=checkpoint, plugins=[_breaks_off(2)])
    assert (tmp_path / "over" / "last.ckpt").exists()


def test_a_run_that_trains_on_nothing_tells_it_once_at_length(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="BAD CHECKPOINT") as told:
        lightning_run(tmp_path, CheckpointGuardCallback(), bad_steps=range(2, 7))
    first, *others = [str(one.message) for one in told if "BAD CHECKPOINT" in str(one.message)]
    assert first.startswith(f"CheckpointGuardCallback: BAD CHECKPOINT {tmp_path / 'step=2.ckpt'} (step 2): tensor")
    assert first.endswith("it trains on nothing")
    assert len(others) == 4
    for step, text in enumerate(others, start=3):
        place = tmp_path / f"step={step}.ckpt"
        start = f"CheckpointGuardCallback: also a BAD CHECKPOINT {place} (step {step}; see step 2): tensor"
        assert text.startswith(start)
        assert len(text) < len(start) + 100
        assert "\n" not in text


def test_after_a_hundred_steps_it_is_told_at_length_again(tmp_path: Path) -> None:
    saves, texts = GuardedSaves(2, model=make_mlp()), []
    from stabilizer.callbacks.checkpoint_guard import _say

    for step in (10, 10, 109, 110, 150, 20):
        saves.worker.verdicts.append((tmp_path / "a.ckpt", Guard("bad", step=step, reasons=("x",))))
        with pytest.warns(UserWarning, match="BAD CHECKPOINT"):
            texts += _say(saves, CheckpointGuardCallback())
    assert [text.startswith("also") for text in texts] == [False, True, True, False, True, False]
