"""The benchmarks run and report; with `-m slow`, the targets that a machine without a GPU can check are met."""

from __future__ import annotations

import doctest
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gradient_statistics, processes, timing, two_processes
from benchmarks.timing import Figure, Samples, agreement, until_two_agree
from stabilizer.callbacks import StabilizerCallback, StepContext
from stabilizer.errors import logger
from tests.environments import ROOT
from tests.launcher import run_distributed

SCRIPT = "benchmarks/gradient_statistics.py"
FIELDS = {"row", "what", "value", "unit", "target", "how", "details", "is_met"}


def _call(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(rank, *args)


def _run_in_workers(function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_distributed(_call, function, *args)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All rows at tiny sizes, in workers that are there already."""
    path = tmp_path_factory.mktemp("benchmarks") / "deep" / "results.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_processes, "run_fresh", _run_in_workers)
        assert gradient_statistics.main(["--tiny", "--output", str(path)]) == 0, "without --check a miss is no error"
    read: dict[str, Any] = json.loads(path.read_text())
    return read


@pytest.mark.parametrize("row", gradient_statistics.ROWS)
def test_every_row_runs_and_is_reported(report: dict[str, Any], row: str) -> None:
    figures = [figure for figure in report["figures"] if figure["row"] == row]
    assert figures
    for figure in figures:
        assert figure.keys() == FIELDS
        assert figure["how"]
        if row == "gpu" and not torch.cuda.is_available():
            assert figure["value"] is None
            assert figure["is_met"] is None
            continue
        assert math.isfinite(figure["value"])
        assert figure["is_met"] == (None if figure["target"] is None else figure["value"] <= figure["target"])
        if figure["unit"] == "ratio":
            medians = list(figure["details"]["median_seconds"].values())
            assert figure["value"] == pytest.approx(medians[0] / medians[1])


def test_report_has_the_targets_of_the_project(report: dict[str, Any]) -> None:
    targets = {figure["what"]: figure["target"] for figure in report["figures"] if figure["target"] is not None}
    assert list(targets.values()) == [1.15, 0.75, 0.1, 1.3, 1.01, 0.0, 1.0], targets
    assert report["environment"]["is_tiny"] is True
    assert report["environment"]["torch"] == torch.__version__


def test_report_counts_collectives(report: dict[str, Any]) -> None:
    counts = {figure["what"]: figure["value"] for figure in report["figures"] if figure["unit"] == "collectives"}
    assert counts == {"FSDP2: collectives added to a quiet step": 2, "DDP: collectives added to a quiet step": 2}


@pytest.mark.parametrize(("value", "target", "status"), [(2.0, 1.0, 1), (1.0, 1.0, 0), (None, 1.0, 0), (2.0, None, 0)])
def test_check_fails_only_for_a_missed_target(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: float | None,
    target: float | None,
    status: int,
) -> None:
    figure = Figure("import", "this / that", value, "ratio", target, "not at all")
    monkeypatch.setitem(gradient_statistics.ROWS, "import", lambda *, tiny: [figure])
    assert gradient_statistics.main(["import", "--check"]) == status
    assert gradient_statistics.main(["import"]) == 0
    shown = capsys.readouterr().out
    assert ("not measured" in shown) == (value is None)
    assert "Nothing is written" in shown, "a selection of rows must not replace the results of all"


def test_all_rows_at_full_size_replace_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for row in gradient_statistics.ROWS:
        monkeypatch.setitem(gradient_statistics.ROWS, row, lambda *, tiny, row=row: [])
    monkeypatch.setattr("benchmarks.command.RESULTS", tmp_path)
    gradient_statistics.main(["--tiny"])
    assert not (tmp_path / "gradient_statistics.json").exists(), "tiny figures mean nothing"
    gradient_statistics.main([])
    assert (tmp_path / "gradient_statistics.json").exists()


def test_unknown_row_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gradient_statistics.main(["imports"])
    assert "'imports' is none of statistics, first_step, import, gpu, steps" in capsys.readouterr().err


def test_warns_when_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 9.0, 9.0))
    assert timing.busy() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (2.1, 0.0, 0.0))
    assert "2.1 on 2 cores" in str(timing.busy())


def test_runs_go_on_until_two_in_a_row_agree() -> None:
    runs = iter([{"a": [seconds], "b": [1.0]} for seconds in (1.0, 2.0, 1.0, 1.02, 9.0)])
    samples, apart = until_two_agree(lambda: next(runs), [("a", "b")])
    assert samples == {"a": [1.0, 1.02], "b": [1.0, 1.0]}
    assert apart == pytest.approx(0.02)


def test_runs_that_never_agree_say_so() -> None:
    runs = iter([{"a": [seconds], "b": [1.0]} for seconds in (1.0, 2.0, 1.0, 2.0)])
    samples, apart = until_two_agree(lambda: next(runs), [("a", "b")], runs=4)
    assert next(runs, None) is None
    figure = timing.ratio_figure("row", "a / b", samples, ("a", "b"), target=None, how="here", apart=apart)
    assert figure.how.endswith("two runs differ by 100%")
    assert figure.value == statistics.median([1.0, 2.0])


def test_agreement_looks_at_every_pair() -> None:
    first: Samples = {"a": [1.0], "b": [1.0], "c": [1.0]}
    second: Samples = {"a": [1.0], "b": [1.0], "c": [1.5]}
    assert agreement(first, second, [("a", "b")]) == 0
    assert agreement(first, second, [("a", "b"), ("c", "b")]) == pytest.approx(0.5)


def test_everybody_is_timed_in_every_round() -> None:
    order: list[str] = []
    functions = {name: (lambda name=name: order.append(name)) for name in "ab"}
    samples = timing.time_in_turn(functions, rounds=2)
    assert order == ["a", "b", "b", "a"]
    assert {name: len(seconds) for name, seconds in samples.items()} == {"a": 2, "b": 2}


def test_examples_of_timing() -> None:
    results = doctest.testmod(timing, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
    assert results.attempted == 4


class TestGpuRowsOnCpu:
    """What the GPU rows do, where there is no GPU: only the device is another."""

    @pytest.fixture
    def training(self, monkeypatch: pytest.MonkeyPatch) -> gpu.Training:
        self.mode = "default"
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))
        return gpu.Training(torch.device("cpu"), tiny=True)

    def test_steps_are_timed(self, training: gpu.Training) -> None:
        samples = gpu.quiet_steps(training, rounds=3)
        assert [len(samples[name]) for name in ("with", "without")] == [3, 3]
        assert min(samples["with"] + samples["without"]) > 0
        assert training.suite.step == 8, "five steps before, and each has trained with and without"

    def test_no_wait_is_found_in_what_never_waits(self, training: gpu.Training) -> None:
        assert gpu.count_waits(training) == 0
        assert self.mode == "default"

    @pytest.mark.parametrize("strict", [True, False])
    def test_every_wait_is_found(self, training: gpu.Training, monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
        class Waits(StabilizerCallback):
            def on_gradients(callback, context: StepContext) -> None:
                assert self.mode == "error"
                raise RuntimeError("called a synchronizing CUDA operation")

        monkeypatch.setattr(logger, "propagate", False)
        training.suite.callbacks[:] = [Waits(strict=strict)]
        # A callback that is not strict is off after its first error.
        assert gpu.count_waits(training) == (20 if strict else 1)


def _sum_of_ranks(rank: int, plus: int) -> tuple[int, int]:
    total = torch.tensor(rank + plus)
    torch.distributed.all_reduce(total)
    return rank, int(total)


def _fail(rank: int) -> None:
    raise ArithmeticError(f"rank {rank} cannot")


def test_fresh_processes_work_together() -> None:
    assert processes.run_fresh(_sum_of_ranks, 10) == [(0, 21), (1, 21)]


def test_fresh_process_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match=r"_fail: ranks \[0\] ended with an error"):
        processes.run_fresh(_fail, world_size=1)
    assert "rank 0 cannot" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("row", ["statistics", "first_step", "import"])
def test_targets_are_met(row: str, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, row, "--check", "--output", str(tmp_path / "results.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "results.json").read_text())["figures"]
    assert any(figure["is_met"] for figure in figures), "nothing was checked"
