"""`stabilizer checkpoints`: what a folder has, and what is known of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stabilizer.cli import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "100")
    weights = torch.ones(2, 2)
    for name, value, step in (("good", weights, 3), ("epoch=0-step=7-with-a-long-name-that-goes-on", weights / 0, 7)):
        torch.save({"state_dict": {"w": value}, "global_step": step}, tmp_path / f"{name}.ckpt")
    return tmp_path


def test_a_table_of_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(folder)]) == 0
    before = capsys.readouterr().out
    assert before.count("no guard file") == 2
    assert main(["checkpoints", str(folder), "--verify"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    [good] = [line for line in lines if "good.ckpt" in line]
    assert [cell.strip() for cell in good.split("│")[1:4]] == ["3", "good.ckpt", "good (weights alone)"]
    # The name of the other one is whole, over several lines.
    cells = [line.split("│") for line in lines if "good.ckpt" not in line]
    assert "".join(cell[2].strip() for cell in cells) == "epoch=0-step=7-with-a-long-name-that-goes-on.ckpt"
    assert any(cell[3].strip().startswith("bad") for cell in cells)
    assert "not finite" in " ".join(" ".join(cell[5].strip() for cell in cells).split())


def test_what_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path / "nothing")]) == 2
    assert "is no folder: expected one with checkpoints in it" in capsys.readouterr().err
