"""The benchmark of importance ratios runs and reports; with `-m slow`, its target is met."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import rollout


def test_it_runs_and_reports_its_target(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert rollout.main(["--tiny", "--output", str(path)]) == 0, "without --check a miss is no error"
    figures = json.loads(path.read_text())["figures"]
    assert [figure["target"] for figure in figures] == [0.05, None, None]
    for figure in figures:
        assert math.isfinite(figure["value"])
        medians = figure["details"]["median_seconds"]
        assert min(medians.values()) > 0


def test_a_target_that_is_missed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "TARGET", 0.0)
    assert rollout.main(["--tiny", "--check", "--output", str(tmp_path / "results.json")]) == 1


@pytest.mark.slow
@pytest.mark.alone
def test_it_costs_less_than_a_twentieth_of_a_softmax(tmp_path: Path) -> None:
    assert rollout.main(["--check", "--output", str(tmp_path / "results.json")]) == 0
