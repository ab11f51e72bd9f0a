"""The benchmark of a trainer's steps runs and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.trainer import main


def test_it_runs_and_writes_its_figures(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("STABILIZER_PREFLIGHT", "0")
    path = tmp_path / "trainer.json"
    assert main(["--tiny", "--output", str(path)]) == 0
    assert path.read_text().count("default suite") >= 2
