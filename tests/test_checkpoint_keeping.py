"""Which checkpoints stay, and which one a run resumes from."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import CheckpointGuardCallback
from stabilizer.checkpoints import Guard, last_good_checkpoint, read_guard, verify_checkpoint
from stabilizer.checkpoints.command import CheckpointsError, checkpoints
from stabilizer.checkpoints.guard_file import guard_path
from stabilizer.checkpoints.keeping import Keeper
from stabilizer.checkpoints.shelves import Entry, removable


def _save(folder: Path, step: int, *, name: str = "", value: float = 1.0, full: bool = True) -> Path:
    path = folder / (name or f"step{step}.ckpt")
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = {"optimizer_states": [], "loops": {}} if full else {}
    torch.save({"state_dict": {"w": torch.tensor([value])}, "global_step": step, **rest}, path)
    return path


def _noted(keeper: Keeper, folder: Path, step: int, verdict: str = "good", name: str = "") -> Path:
    path = _save(folder, step, name=name)
    keeper.note(path, Guard("pending", step=step))
    if verdict != "pending":
        _settle(keeper, path, verdict)
    return path


def _settle(keeper: Keeper, path: Path, verdict: Any = "good") -> None:
    guard = keeper.entry(path).guard
    assert guard is not None
    keeper.settle(path, dataclasses.replace(guard, verdict=verdict, files=verify_checkpoint(path).files))


def _there(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.ckpt"))


def _host_deletes(keeper: Keeper, path: Path) -> None:
    if keeper.release(path):
        path.unlink()


def test_a_host_that_keeps_one_leaves_two_good_ones(tmp_path: Path) -> None:
    keeper, before = Keeper(2), None
    for step in range(1, 6):
        path = _noted(keeper, tmp_path, step)
        if before is not None:
            _host_deletes(keeper, before)
        before = path
    assert _there(tmp_path) == ["step4.ckpt", "step5.ckpt"]


def test_bad_ones_push_none_out_and_go_when_the_host_wants(tmp_path: Path) -> None:
    keeper, before = Keeper(2), None
    for step, verdict in enumerate(["good", "good", "bad", "bad", "bad"], start=1):
        path = _noted(keeper, tmp_path, step, verdict)
        if before is not None:
            _host_deletes(keeper, before)
        before = path
    assert _there(tmp_path) == ["step1.ckpt", "step2.ckpt", "step5.ckpt"]
    assert last_good_checkpoint(tmp_path) == tmp_path / "step2.ckpt"
    _host_deletes(keeper, _noted(keeper, tmp_path, 6))
    assert _there(tmp_path) == ["step2.ckpt", "step5.ckpt", "step6.ckpt"]


def test_what_is_not_verified_yet_counts_for_nothing_but_itself(tmp_path: Path) -> None:
    keeper = Keeper(1)
    first, second = _noted(keeper, tmp_path, 1), _noted(keeper, tmp_path, 2, "pending")
    third = _noted(keeper, tmp_path, 3, "pending")
    for path in (first, second):
        _host_deletes(keeper, path)
    assert _there(tmp_path) == ["step1.ckpt", "step2.ckpt", "step3.ckpt"]
    _settle(keeper, third, "bad")
    assert _there(tmp_path) == ["step1.ckpt", "step2.ckpt", "step3.ckpt"]
    _settle(keeper, second)
    assert _there(tmp_path) == ["step2.ckpt", "step3.ckpt"]


def test_another_run_goes_on_deleting_what_was_unwanted(tmp_path: Path) -> None:
    keeper = Keeper(1)
    _host_deletes(keeper, _noted(keeper, tmp_path, 1))
    shutil.copytree(tmp_path, tmp_path / "copy")
    other = Keeper(1)
    _noted(other, tmp_path, 2)
    assert not (tmp_path / "step1.ckpt").exists()
    # A copy is somebody's own: nobody wanted it deleted.
    _noted(other, tmp_path / "copy", 2)
    assert _there(tmp_path / "copy") == ["step1.ckpt", "step2.ckpt"]


def test_without_a_number_all_is_left_to_the_host(tmp_path: Path) -> None:
    keeper = Keeper(None)
    path = _noted(keeper, tmp_path, 1)
    assert keeper.displace(path) is None
    assert keeper.release(path)
    assert not guard_path(path).exists()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_whatever_the_host_does_the_last_good_ones_are_there(keep: int, tmp_path: Path) -> None:
    """Random saves, verdicts and deletions, against a list of what was good."""
    numbers = random.Random(keep)
    keeper = Keeper(keep)
    alive: list[Path] = []
    pending: list[Path] = []
    good: list[int] = []
    for step in range(1, 60):
        path = _noted(keeper, tmp_path, step, "pending")
        alive.append(path)
        pending.append(path)
        while pending and numbers.random() < 0.6:
            known = pending.pop(0)
            verdict = numbers.choice(["good", "bad"])
            if known.exists():
                _settle(keeper, known, verdict)
                good += [int(known.stem[4:])] if verdict == "good" else []
        while len(alive) > 2 and numbers.random() < 0.8:
            _host_deletes(keeper, alive.pop(numbers.randrange(len(alive) - 1)))
        wanted = sorted(good)[-keep:]
        assert {f"step{number}.ckpt" for number in wanted} <= set(_there(tmp_path))
        assert len(_there(tmp_path)) <= len(alive) + len(pending) + keep
    assert len(good) > 20


def test_one_step_saved_twice_counts_once(tmp_path: Path) -> None:
    keeper = Keeper(2)
    for step in (1, 2, 3):
        _noted(keeper, tmp_path, step)
        _noted(keeper, tmp_path, step, name=f"last{step}.ckpt")
    for step in (1, 2, 3):
        _host_deletes(keeper, tmp_path / f"last{step}.ckpt")
    assert _there(tmp_path) == ["step1.ckpt", "step2.ckpt", "step3.ckpt"]
    for step in (1, 2):
        _host_deletes(keeper, tmp_path / f"step{step}.ckpt")
    assert _there(tmp_path) == ["step2.ckpt", "step3.ckpt"]


def test_weights_alone_do_not_stand_in_for_what_a_run_resumes_from(tmp_path: Path) -> None:
    guards = [Guard("good", step=step, is_full=step < 3, unwanted=1) for step in (1, 2, 3, 4)]
    entries = [Entry(tmp_path / f"{guard.step}.ckpt", guard) for guard in guards]
    for guard in guards:
        path = _save(tmp_path, guard.step, name=f"{guard.step}.ckpt")
        entries[guard.step - 1] = Entry(path, dataclasses.replace(guard, unwanted=path.stat().st_ino))
    assert [path.name for path in removable(entries, keep=1)] == ["1.ckpt", "3.ckpt"]


def test_what_is_written_over_waits_in_another_folder(tmp_path: Path) -> None:
    keeper = Keeper(1)
    for step in (1, 2, 3):
        moved = keeper.displace(tmp_path / "last.ckpt")
        assert (moved is None) == (step == 1)
        _noted(keeper, tmp_path, step, "good" if step < 3 else "bad", name="last.ckpt")
    assert _there(tmp_path) == ["kept/step2-last.ckpt", "last.ckpt"]
    assert last_good_checkpoint(tmp_path) == tmp_path / "kept" / "step2-last.ckpt"
    assert keeper.displace(tmp_path / "last.ckpt") == tmp_path / "kept" / "step3-last.ckpt"
    _noted(keeper, tmp_path, 4, name="last.ckpt")
    assert _there(tmp_path) == ["last.ckpt"]
    assert not (tmp_path / "kept").exists()


def test_a_save_that_fails_gives_back_what_it_would_have_replaced(tmp_path: Path) -> None:
    keeper = Keeper(1)
    path = _noted(keeper, tmp_path, 1, name="last.ckpt")
    before = read_guard(path)
    moved = keeper.displace(path)
    assert moved is not None
    keeper.restore(moved, path)
    assert read_guard(path) == before
    assert _there(tmp_path) == ["last.ckpt"]
    assert last_good_checkpoint(tmp_path) == path


def test_what_cannot_be_written_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk: nothing is lost, and nothing ends."""
    keeper = Keeper(1)
    paths = [_save(tmp_path, step) for step in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", _no_space)
        for step, path in enumerate(paths, start=1):
            keeper.note(path, Guard("good", step=step, files=verify_checkpoint(path).files))
        assert not guard_path(paths[0]).exists()
        assert keeper.release(paths[0])
        assert not keeper.release(paths[1])
    assert "cannot be written: [Errno 28] No space left on device" in caplog.text


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_cannot_be_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(1)
    _host_deletes(keeper, _noted(keeper, tmp_path, 1))
    monkeypatch.setattr(Path, "unlink", _no_space)
    _noted(keeper, tmp_path, 2)
    assert "cannot be deleted" in caplog.text
    assert (tmp_path / "step1.ckpt").exists()


def test_the_newest_good_one_is_found_wherever_it_is(tmp_path: Path) -> None:
    for step, place in ((3, "a"), (12, "b/c"), (9, "")):
        _save(tmp_path / place, step)
    _save(tmp_path, 20, value=float("nan"))
    _save(tmp_path, 30, full=False)
    torch.save({"tokens": torch.arange(9)}, tmp_path / "data.pt")  # no checkpoint at all
    os.symlink(tmp_path / "step20.ckpt", tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match=r"step20.ckpt is a bad checkpoint and is passed over: tensor state_dict.w"):
        assert last_good_checkpoint(tmp_path) == tmp_path / "b" / "c" / "step12.ckpt"
    assert last_good_checkpoint(tmp_path) == tmp_path / "b" / "c" / "step12.ckpt", "told once"
    assert last_good_checkpoint(tmp_path, before_step=11) == tmp_path / "step9.ckpt"
    assert last_good_checkpoint(tmp_path, before_step=9) == tmp_path / "step9.ckpt"
    assert last_good_checkpoint(tmp_path, before_step=8) == tmp_path / "a" / "step3.ckpt"
    assert last_good_checkpoint(tmp_path, before_step=2) is None
    assert last_good_checkpoint(str(tmp_path / "a")) == tmp_path / "a" / "step3.ckpt"
    assert last_good_checkpoint(tmp_path / "a" / "step3.ckpt") == tmp_path / "a" / "step3.ckpt"
    assert last_good_checkpoint(tmp_path / "nothing") is None


def test_only_as_many_are_verified_as_it_takes(tmp_path: Path) -> None:
    paths = [_save(tmp_path, step) for step in (1, 2, 3)]
    assert last_good_checkpoint(tmp_path) == paths[2]
    assert [guard_path(path).exists() for path in paths] == [False, False, True]


def test_steps_order_them_not_names_or_times(tmp_path: Path) -> None:
    for number, (step, name) in enumerate(itertools.product((7,), ("b", "a"))):
        os.utime(_save(tmp_path, step, name=f"{name}.ckpt"), (100 - number, 100 - number))
    os.utime(_save(tmp_path, 8, name="0.ckpt"), (1, 1))
    assert last_good_checkpoint(tmp_path) == tmp_path / "0.ckpt"
    (tmp_path / "0.ckpt").unlink()
    assert last_good_checkpoint(tmp_path) == tmp_path / "b.ckpt", "of one step, the one written last"


def test_the_command_shows_what_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _save(tmp_path / "run[1]", 3)
    _save(tmp_path, 4, value=float("inf"))
    _save(tmp_path, 5, full=False)
    checkpoints(tmp_path)
    assert capsys.readouterr().out.count("no guard file") == 3
    checkpoints(tmp_path, verify=True)
    shown = capsys.readouterr().out
    steps = [line.split()[1] for line in shown.splitlines() if line.startswith("│") and line.split()[1].isdigit()]
    assert steps == ["3", "4", "5"]
    assert "bad" in shown
    assert "run[1]" in shown
    with pytest.raises(CheckpointsError, match="is no folder"):
        checkpoints(tmp_path / "nothing")


def test_a_bad_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_good=0"):
        CheckpointGuardCallback(keep_good=0)
