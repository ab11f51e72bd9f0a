"""The benchmark of what the watching callbacks add to a step runs and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stabilizer.callbacks
from benchmarks.monitors import Training, main
from stabilizer.callbacks import StabilizerCallback, StepContext


class Counts(StabilizerCallback):
    """How often each of its hooks is called."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients = self.ends = 0

    def on_gradients(self, context: StepContext) -> None:
        self.gradients += 1

    def on_step_end(self, context: StepContext) -> None:
        self.ends += 1


@pytest.mark.filterwarnings("ignore::stabilizer.StabilizerWarning")
def test_it_runs_and_has_a_figure_of_every_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("STABILIZER_PREFLIGHT", "0")
    path = tmp_path / "monitors.json"
    assert main(["--tiny", "--output", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    names = [figure["what"].split()[1] for figure in figures]
    assert len(figures) == 7
    assert all(hasattr(stabilizer.callbacks, name) for name in names)
    assert all(len(figure["details"]["added_seconds"]) == 2 for figure in figures)


def test_what_is_timed_is_a_whole_step_of_the_callbacks() -> None:
    """`ours` leaves out the model and the optimizer, and nothing of the callbacks."""
    counts = Counts()
    training = Training([counts], tiny=True)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.keep_gradients()
    for _ in range(3):
        training.ours()
    training.close()
    assert (counts.gradients, counts.ends) == (3, 3)
    assert all(old.equal(new) for old, new in zip(before, training.model.parameters(), strict=True))
