"""The benchmark of the noise scale runs, and measures what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import noise_scale
from benchmarks.noise_scale import Bare
from stabilizer.callbacks import GradNoiseScaleCallback
from tests.models import make_mlp


def test_it_runs_and_reports_its_targets(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert noise_scale.main(["--tiny", "--output", str(path)]) == 0, "without --check a miss is no error"
    figures = json.loads(path.read_text())["figures"]
    assert [figure["target"] for figure in figures] == [1.2, 0.05, None, None]
    for figure in figures:
        assert math.isfinite(figure["value"])
        assert figure["details"]["median_seconds"]["foreach_norm"] > 0


def test_what_it_times_is_what_training_does() -> None:
    """Sensors see the gradients of every micro-batch, and the callback takes the step."""
    model, callback = make_mlp(), GradNoiseScaleCallback()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    bare = Bare(model, [callback])
    for _ in range(20):
        bare.step(2)
    assert bare.handle is not None
    # Two parts, each as large as the step itself, in place of half of it: noise that points backwards.
    found, size = callback.reading(), sum(p.numel() for p in model.parameters())
    assert (found["num_steps"], found["batch"]) == (20, 2)
    assert found["grad_sq"] == pytest.approx(2 * (size - 2 * size))
    bare.handle.close()
