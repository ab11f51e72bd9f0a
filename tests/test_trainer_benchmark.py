"""The benchmark of a trainer's steps runs and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.trainer import main


def test_it_runs_and_writes_its_figures(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("STABILIZER_PREFLIGHT", "0")
    path = tmp_path / "trainer.json"
    assert main(["--tiny", "--output", str(path)]) == 0
    assert path.read_text().count("default suite") >= 2


@pytest.mark.slow
def test_the_target_is_met(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("STABILIZER_PREFLIGHT", "0")
    assert main(["--check", "--output", str(tmp_path / "trainer.json")]) == 0
