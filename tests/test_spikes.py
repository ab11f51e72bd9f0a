"""The example that shows what clipping is for: a short run of it here, and what the long one has written."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from stabilizer.examples.spikes import WAYS, Faults, main, train

RESULT = Path(__file__).parent / "data" / "spikes.json"


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Six faults just before the last 50 steps of a narrow model, as the command line runs them."""
    path = tmp_path_factory.mktemp("spikes") / "spikes.json"
    shown = main(["--steps", "120", "--seeds", "0", "--dim", "24", "--num-faults", "6", "--output", str(path)])
    written: dict[str, Any] = json.loads(path.read_text())
    assert shown == written
    return written


def test_short_run_is_saved_by_clipping_the_layer(short: dict[str, Any]) -> None:
    ways = short["ways"]
    assert list(ways) == list(WAYS)
    best = ways["no_fault"]["mean"]
    # Fifty steps are too few for the whole damage.
    assert ways["no_clip"]["mean"] > 1.02 * best
    assert ways["layer_clip"]["mean"] < 1.01 * best
    # 10 layers, one of them clipped 6 times in 120 steps, and hardly ever a healthy one.
    assert 6 / 1200 <= ways["layer_clip"]["share_clipped"] < 12 / 1200
    # The first steps of a run have norms above 1 in any case.
    assert ways["clip_total"]["share_clipped"] > 0.1
    assert ways["no_clip"]["share_clipped"] == 0


def test_faults_are_the_only_difference() -> None:
    setting: dict[str, Any] = {"seed": 1, "steps": 115, "dim": 12}
    harmless = Faults(num=3, factor=1.0)
    assert train("no_clip", faults=harmless, **setting).loss == train("no_fault", **setting, faults=harmless).loss
    assert train("no_clip", faults=Faults(num=3), **setting).loss > train("no_fault", **setting, faults=harmless).loss


def test_faults_leave_out_the_warm_up_and_the_end() -> None:
    steps = Faults(num=500).steps(1000, seed=4)
    assert len(steps) == 500
    assert min(steps) >= 60
    assert max(steps) < 950
    assert steps == Faults(num=500).steps(1000, seed=4) != Faults(num=500).steps(1000, seed=5)


class TestResultOfTheLongRun:
    """`python -m stabilizer.examples.spikes --output tests/data/spikes.json` makes it."""

    @pytest.fixture
    def report(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(RESULT.read_text())
        return read

    def test_it_is_the_run_that_the_command_makes(self, report: dict[str, Any]) -> None:
        faults = Faults()
        assert report["setting"]["steps"] == 1000
        assert report["setting"]["faults"] == {
            "num": 20,
            "factor": faults.factor,
            "layer": faults.layer,
            "first": faults.first,
        }
        assert list(report["ways"]) == list(WAYS)
        for way in report["ways"].values():
            assert list(way["loss"]) == ["0", "1", "2"]
            assert way["mean"] == pytest.approx(statistics.fmean(way["loss"].values()), abs=1e-5)

    def test_faults_hurt_and_a_clip_of_the_layer_keeps_the_loss(self, report: dict[str, Any]) -> None:
        ways = report["ways"]
        best = ways["no_fault"]
        assert ways["no_clip"]["mean"] >= 1.05 * best["mean"]
        assert ways["layer_clip"]["mean"] <= 1.01 * best["mean"]
        for seed, loss in best["loss"].items():
            assert ways["layer_clip"]["loss"][seed] <= 1.01 * loss
