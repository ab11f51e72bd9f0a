"""Guard files: written whole or not at all, and read as if anybody could have written them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.checkpoints import Expected, Guard, GuardedFile, Weight, last_good_checkpoint, read_guard
from stabilizer.checkpoints.guard_file import guard_path, write_guard

GOOD = Guard(
    "good",
    step=4,
    files=(GuardedFile("a.ckpt", 3, "00" * 32),),
    expected=Expected((Weight(("w", "v"), (2, 3)),), ("mask",), 1, 2),
    seconds=1.5,
)


def _checkpoint(folder: Path) -> Path:
    path = folder / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "optimizer_states": [], "loops": {}, "global_step": 3}, path)
    return path


def _write(path: Path, **changes: Any) -> None:
    plain = {**dataclasses.asdict(Guard("good", step=4)), "files": [], **changes}
    guard_path(path).write_text(json.dumps(plain))


@pytest.mark.parametrize("guard", [GOOD, Guard("pending"), Guard("bad", reasons=("a\nb", "é"), unwanted=5)])
def test_goes_round(guard: Guard, tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    write_guard(guard_path(path), guard)
    assert read_guard(path) == guard
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.ckpt", "a.ckpt.guard.json"]
    json.loads(guard_path(path).read_text(), parse_constant=pytest.fail)


def test_a_write_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _checkpoint(tmp_path)
    write_guard(guard_path(path), GOOD)
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(Path if function == "replace" else os, function, _no_space)
            with pytest.raises(OSError, match="No space left"):
                write_guard(guard_path(path), Guard("bad"))
        assert read_guard(path) == GOOD
        assert len(list(tmp_path.iterdir())) == 2


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


FILE = {"name": "a.ckpt", "size": 3, "sha256": "0"}
HOSTILE: dict[str, Any] = {
    "a list": [],
    "a number": 7,
    "no verdict": {"step": 1},
    "another verdict": {"verdict": "fine"},
    "a version to come": {"version": 2},
    "a step of text": {"step": "4"},
    "a step that is a bool": {"step": True},
    "a huge step": {"step": 10**30},
    "a step below all": {"step": -2},
    "seconds that are none": {"seconds": "inf"},
    "a negative inode": {"unwanted": -1},
    "reasons of numbers": {"reasons": [1]},
    "no files": {"files": []},
    "files that are none": {"files": ["a.ckpt"]},
    "a huge file": {"files": [{**FILE, "size": 10**40}]},
    "a negative file": {"files": [{**FILE, "size": -1}]},
    "a size of 1.5": {"files": [{**FILE, "size": 1.5}]},
    "a file twice": {"files": [FILE, FILE]},
    "out of the folder": {"files": [{**FILE, "name": "../a.ckpt"}]},
    "out by another way": {"files": [{**FILE, "name": "x/../../a.ckpt"}]},
    "an absolute path": {"files": [{**FILE, "name": "/etc/passwd"}]},
    "another drive": {"files": [{**FILE, "name": "c:\\\\a.ckpt"}]},
    "another file": {"files": [{**FILE, "name": "b.ckpt"}]},
    "a zero byte": {"files": [{**FILE, "name": "a\0.ckpt"}]},
    "no name": {"files": [{**FILE, "name": ""}]},
    "a huge shape": {"expected": {"weights": [{"names": ["w"], "shape": [10**25], "required": True}]}},
    "a shape of text": {"expected": {"weights": [{"names": ["w"], "shape": "many", "required": True}]}},
}
TEXTS = {
    "truncated": '{"verdict": "good", "step": 4, "fi',
    "empty": "",
    "not text": b"\xff\xfe\x00\x81",
    "deeply nested": "[" * 200_000 + "]" * 200_000,
    "a key twice": '{"verdict": "bad", "verdict": "pending"}',
    "NaN": '{"verdict": "bad", "seconds": NaN}',
    "a number of many digits": '{"verdict": "bad", "step": ' + "9" * 10_000 + "}",
    "a number beyond all": '{"verdict": "bad", "seconds": 1e999}',
    "a pickle": b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x85\x94R\x94.",
}


def _hostile(path: Path, case: str) -> None:
    if case in TEXTS:
        content = TEXTS[case]
        guard_path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    elif isinstance(HOSTILE[case], dict) and case != "no verdict":
        _write(path, **{"files": [FILE], **HOSTILE[case]})
    else:
        guard_path(path).write_text(json.dumps(HOSTILE[case]))


@pytest.mark.parametrize("case", [*HOSTILE, *TEXTS])
def test_a_hostile_one_is_one_clear_error_and_counts_for_nothing(case: str, tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    _hostile(path, case)
    with pytest.raises(ValueError, match=r"a\.ckpt\.guard\.json is no guard file: .{3,}") as error:
        read_guard(path)
    assert len(str(error.value)) < 600
    with pytest.warns(UserWarning, match="is no guard file: .*the checkpoint is verified anew") as told:
        assert last_good_checkpoint(tmp_path) == path
    assert len(told) == 1
    made = read_guard(path)
    assert made is not None
    assert (made.verdict, made.step, [file.name for file in made.files]) == ("good", 3, ["a.ckpt"])


@pytest.mark.parametrize(
    "name", ["../a", "x/../../a", "..", "/etc/passwd", "//etc/passwd", "c:\\a", "x\\..\\a", "a\0", ""]
)
def test_names_do_not_lead_out_of_a_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "random_states_0.pkl").write_bytes(b"1")
    (tmp_path / "a").write_bytes(b"1")
    guard = Guard("good", files=(GuardedFile(name, 1, "00" * 32),))
    write_guard(guard_path(folder), guard)
    with pytest.raises(ValueError, match="is not within the checkpoint"):
        read_guard(folder)


def test_a_huge_one_is_not_read(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    with guard_path(path).open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match="has 1099511627776 bytes: no guard file is so large"):
        read_guard(path)


def test_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    (tmp_path / "secret").write_text("{}")
    guard_path(path).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is no regular file"):
        read_guard(path)
    with pytest.warns(UserWarning, match="is no regular file"):
        assert last_good_checkpoint(tmp_path) == path
    assert (tmp_path / "secret").read_text() == "{}", "it was written through the link"
    guard_path(path).unlink()
    os.mkfifo(guard_path(path))
    with pytest.raises(ValueError, match="is no regular file"):
        read_guard(path)


def test_a_good_one_of_other_files_is_not_believed(tmp_path: Path) -> None:
    """The verdict is of the files that were verified, not of what has their names now."""
    path = _checkpoint(tmp_path)
    assert last_good_checkpoint(tmp_path) == path
    content = bytearray(path.read_bytes())
    for changed, problem in ((content[:-1], "bytes instead of"), (content[:50] + b"?" + content[51:], "checksum")):
        path.write_bytes(bytes(changed))
        with pytest.warns(UserWarning, match=f"is not what was verified: a.ckpt has .*{problem}.*delete a.ckpt.guard"):
            assert last_good_checkpoint(tmp_path) is None
    path.write_bytes(bytes(content))
    assert last_good_checkpoint(tmp_path) == path


def test_a_folder_that_nobody_may_write_to_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _checkpoint(tmp_path)
    monkeypatch.setattr(Path, "replace", _no_space)
    assert last_good_checkpoint(tmp_path) == path
    assert read_guard(path) is None
