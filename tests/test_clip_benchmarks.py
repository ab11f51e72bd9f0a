"""What clipping costs, in time and in operators of a step, and what a threshold costs that is too low.

With `-m slow` the targets of one process are checked.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import clipping
from benchmarks.one_process import Silent, gpt2
from benchmarks.timing import Figure
from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback
from stabilizer.callbacks.suite import Suite
from stabilizer.errors import StabilizerWarning
from stabilizer.examples.low_threshold import gradients, main, second_moments
from tests.environments import ROOT
from tests.launcher import run_distributed

FIELDS = {"row", "what", "value", "unit", "target", "how", "details", "is_met"}


def _call(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(rank, *args)


def _run_in_workers(function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_distributed(_call, function, *args)


class TestBenchmark:
    def test_every_row_is_reported_with_its_target(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(clipping, "run_fresh", _run_in_workers)
        path = tmp_path / "deep" / "results.json"
        assert clipping.main(["--tiny", "--output", str(path)]) == 0, "without --check a miss is no error"
        report = json.loads(path.read_text())
        assert report["environment"]["is_tiny"] is True
        assert [(figure["row"], figure["target"]) for figure in report["figures"]] == [
            ("one_process", 0.8),
            ("one_process", 1.1),
            ("two_processes", 0.8),
            ("two_processes", 1.1),
        ]
        for figure in report["figures"]:
            assert figure.keys() == FIELDS
            medians = list(figure["details"]["median_seconds"].values())
            assert math.isfinite(figure["value"])
            assert figure["value"] == pytest.approx(medians[0] / medians[1])
            assert figure["is_met"] == (figure["value"] <= figure["target"])

    @pytest.mark.parametrize(("value", "status"), [(2.0, 1), (0.5, 0)])
    def test_check_fails_for_a_missed_target(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float, status: int
    ) -> None:
        figure = Figure("one_process", "this / that", value, "ratio", 0.8, "not at all")
        monkeypatch.setitem(clipping.ROWS, "one_process", lambda *, tiny: [figure])
        assert clipping.main(["one_process", "--check"]) == status
        assert clipping.main(["one_process"]) == 0
        assert "Nothing is written" in capsys.readouterr().out, "a selection must not replace the results of all"

    def test_all_rows_at_full_size_replace_the_results(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for row in clipping.ROWS:
            monkeypatch.setitem(clipping.ROWS, row, lambda *, tiny: [])
        monkeypatch.setattr("benchmarks.command.RESULTS", tmp_path)
        clipping.main(["--tiny"])
        assert not (tmp_path / "clipping.json").exists(), "tiny figures mean nothing"
        clipping.main([])
        assert (tmp_path / "clipping.json").exists()

    def test_unknown_row_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            clipping.main(["one"])
        assert "'one' is none of one_process, two_processes" in capsys.readouterr().err

    def test_what_is_timed_is_what_is_meant(self) -> None:
        timer = clipping.ClipTimer(gpt2(tiny=True))
        before = [gradient.clone() for gradient in timer.gradients]
        timer.clip()
        torch.testing.assert_close(timer.gradients, before, rtol=0, atol=0)
        timer.spike()
        torch.testing.assert_close(timer.gradients, [10 * gradient for gradient in before])
        timer.clip()
        # All norms have been the same so far: the threshold is the least multiple, twice the median.
        torch.testing.assert_close(timer.gradients, [2 * gradient for gradient in before], rtol=0.02, atol=0)
        timer.calm()
        timer.time(rounds=2)

    def test_a_run_that_clips_nothing_is_no_measurement(self) -> None:
        timer = clipping.ClipTimer(gpt2(tiny=True))
        timer.suite.callbacks[:] = []
        with pytest.raises(AssertionError, match="not close"):
            timer.time(rounds=1)

    @pytest.mark.slow
    @pytest.mark.alone
    @pytest.mark.timeout(1500)
    def test_targets_are_met_in_one_process(self, tmp_path: Path) -> None:
        output = ["--output", str(tmp_path / "results.json")]
        command = [sys.executable, "benchmarks/clipping.py", "one_process", "--check", *output]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
        assert done.returncode == 0, done.stdout + done.stderr


#: Operators of a quiet step with both callbacks, with torch 2.13: 324 (33 for the statistics, 126 for the layers'
#: thresholds, counts and late copies, 165 for those of the total, which is logged at every step).
LIMIT = 330


class Operators(TorchDispatchMode):
    """Counts all operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_operators(num_layers: int, *, factors: dict[int, float] | None = None) -> Counter[str]:
    """Operators of a step at which only the total is logged, with warm thresholds."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [LayerClipCallback(), AdaptiveClipThreshold(warmup_cap=None)]
    suite = Suite(callbacks, model=model, optimizer=optimizer, sink=Silent())

    def step() -> None:
        suite.run()
        suite.before_step()
        suite.finish()

    for _ in range(53):
        step()
    for layer, factor in (factors or {}).items():
        for parameter in model[layer].parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
    counted = Operators()
    with counted:
        step()
    return counted.names


class TestOperatorsOfOneStep:
    """On a device each is a launch, on a CPU a few microseconds."""

    def test_number_does_not_grow_with_the_layers(self) -> None:
        assert count_operators(10) == count_operators(40)

    def test_a_quiet_step_has_few_and_changes_nothing(self) -> None:
        names = count_operators(10)
        assert names.total() <= LIMIT, names
        assert not any("_foreach_mul" in name for name in names)

    def test_a_spike_costs_one_multiplication_of_its_layer(self) -> None:
        more = count_operators(10, factors={3: 100.0}) - count_operators(10)
        assert more == Counter({"aten._foreach_mul_.Scalar": 1})


class TestLowThreshold:
    """Against what follows from the distribution of the norms, and against Adam's own recurrence in float64."""

    @pytest.fixture(autouse=True)
    def _expected_advice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STABILIZER_PREFLIGHT", "0")

    @pytest.mark.filterwarnings("ignore:LayerClipCallback, step:stabilizer.errors.StabilizerWarning")
    def test_second_moment_is_as_low_as_the_distribution_says(self, capsys: pytest.CaptureFixture[str]) -> None:
        low, middle, high = main(steps=400)
        assert low.share_clipped > middle.share_clipped > high.share_clipped == 0
        assert low.second_moment < middle.second_moment < high.second_moment <= 1
        assert low.step_size > middle.step_size > high.step_size >= 1
        assert high.second_moment == pytest.approx(1.0, abs=0.01)
        assert high.step_size == pytest.approx(1.0, abs=0.01)
        for bias in (low, middle, high):
            share, moment = log_normal(bias.k, log_std=0.5)
            assert bias.share_clipped == pytest.approx(share, abs=0.01)
            assert bias.second_moment == pytest.approx(moment, abs=0.03)
        assert f"{low.share_clipped:.2%}" in capsys.readouterr().out

    @pytest.mark.filterwarnings("ignore:LayerClipCallback, step:stabilizer.errors.StabilizerWarning")
    def test_second_moments_are_those_of_clipped_gradients(self) -> None:
        rows = gradients(steps=60, num_layers=3, seed=3)
        moments, share = second_moments(rows, threshold=1.2)
        wide = rows.double()
        norms = wide.norm(dim=-1, keepdim=True)
        clipped = wide * (1.2 / norms).clamp(max=1)
        expected = torch.zeros_like(wide[0])
        for step, row in enumerate(clipped):
            expected = 0.95 * expected + 0.05 * row**2
            torch.testing.assert_close(moments[step].double(), expected, rtol=1e-4, atol=1e-9)
        assert share == pytest.approx(float((norms > 1.2).double().mean()), abs=1e-6)

    def test_clipping_healthy_steps_is_told(self) -> None:
        with pytest.warns(StabilizerWarning, match="under 3 times the usual norm.*Adam's second moment too small"):
            second_moments(gradients(steps=101, num_layers=2), threshold=1.4)


def log_normal(k: float, *, log_std: float) -> tuple[float, float]:
    """P(x > k) and E[min(x, k)^2] / E[x^2] of a log-normal x with median 1."""
    z = math.log(k) / log_std
    tail = 1 - normal(z)
    whole = math.exp(2 * log_std**2)
    return tail, (whole * normal(z - 2 * log_std) + k**2 * tail) / whole


def normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))
