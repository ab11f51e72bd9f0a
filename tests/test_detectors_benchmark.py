"""The benchmark of loss detectors: its plain rules do what their descriptions say, its targets can be missed."""

from __future__ import annotations

import copy
import doctest
import math
import time

import numpy as np
import pytest

from benchmarks import detectors, loss_series, plain_detectors
from benchmarks.loss_series import NOISES, Setting, measure
from benchmarks.plain_detectors import FirstMaximum, MeanAndSigmas, PageHinkley, WindowMean
from stabilizer.detectors import LossDetector


def _alarms(rule: loss_series.Watcher, losses: list[float]) -> list[int]:
    return [step for step, loss in enumerate(losses) if rule.update(step, loss)]


def test_mean_and_sigmas_is_that_of_numpy() -> None:
    losses = (2.5 + 0.05 * np.random.default_rng(0).standard_t(2, 2000)).tolist()
    expected = [
        step
        for step in range(128, 2000)
        if losses[step] > np.mean(losses[step - 128 : step]) + 6 * np.std(losses[step - 128 : step], ddof=1)
    ]
    assert _alarms(MeanAndSigmas(), losses) == expected != []


def test_mean_and_sigmas_goes_blind_after_four_equal_spikes() -> None:
    # With k of n values far away, they are sqrt((n - k) / k) standard deviations from the mean: n / (1 + 6^2) = 3.5.
    losses = (2.5 + 0.01 * np.random.default_rng(0).standard_normal(200)).tolist()
    losses[150:160] = [1000.0] * 10
    assert _alarms(MeanAndSigmas(), losses) == [150, 151, 152, 153]


def test_window_mean_wants_patience() -> None:
    losses = [1.0] * 100 + [2.5] * 5 + [1.0] + [2.5] * 4 + [1.0] * 20
    assert _alarms(WindowMean(), losses) == [104]


def test_first_maximum_looks_back_at_the_first_only() -> None:
    losses = [1.0] * 99 + [3.0] + [30.0, 30.1, 1.0]
    assert _alarms(FirstMaximum(), losses) == [101]


def test_page_hinkley_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    losses = (2.5 + 0.05 * (rng.standard_normal(600) + np.where(np.arange(600) >= 400, 1.5, 0))).tolist()
    std = np.std(losses[:100], ddof=1)
    means = np.cumsum(losses) / np.arange(1, 601)
    sums = np.cumsum(((np.array(losses) - means) / std - 0.5)[100:])
    height = sums - np.minimum.accumulate(np.minimum(sums, 0))
    assert _alarms(PageHinkley(), losses)[0] == 100 + int(np.argmax(height > 12)) > 400


@pytest.mark.parametrize("kind", NOISES)
def test_sigma_is_the_same_for_all_noises(kind: str) -> None:
    values = NOISES[kind](np.random.default_rng(0), 400_000)
    assert 1.4826 * np.median(np.abs(values)) == pytest.approx(1, rel=0.01)


def test_it_runs_and_prints_a_table_for_every_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert detectors.main(["--quick", "stabilizer", "Page-Hinkley"]) == 0
    printed = capsys.readouterr().out
    for question in detectors.TARGETS:
        assert question in printed
    assert "Page-Hinkley" in printed
    with pytest.raises(SystemExit):
        detectors.main(["--quick", "stabiliser"])


def test_every_target_is_of_something_that_is_measured_and_can_be_missed() -> None:
    figures = measure(detectors.Ours, detectors.QUICK)
    for question, targets in detectors.TARGETS.items():
        for what in targets:
            for bad in (1e9, math.nan):
                spoiled = copy.deepcopy(figures)
                assert what in spoiled[question]
                spoiled[question][what] = bad
                lines = [miss for miss in detectors.misses(spoiled) if miss.startswith(f"{question}: {what}: ")]
                assert len(lines) == 1, (question, what, bad)


def test_check_is_an_error_when_a_target_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_series, "HEALTHY", {"normal": NOISES["normal"]})
    monkeypatch.setattr(loss_series, "NOISES", {"normal": NOISES["normal"]})
    question = "ramp of 5 sigma in 100 steps"
    for low, status in ((0, 0), (101, 1)):
        monkeypatch.setattr(detectors, "TARGETS", {question: {"normal, within 60, %": (low, 200)}})
        assert detectors.main(["--quick", "--check", "10 x max of first 100"]) == status
    assert detectors.main(["--quick", "stabilizer"]) == 0


def test_the_examples_hold() -> None:
    for module in (detectors, loss_series, plain_detectors):
        assert doctest.testmod(module).failed == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_detectors_meet_their_targets() -> None:
    assert detectors.misses(measure(detectors.Ours, Setting())) == []


@pytest.mark.alone
@pytest.mark.slow
def test_a_loss_costs_less_than_20_microseconds() -> None:
    losses = (2.5 + 0.05 * np.random.default_rng(0).standard_normal(20_000)).tolist()
    detector, costs = LossDetector(), []
    for start in range(0, 20_000, 500):
        before = time.process_time()
        for step in range(start, start + 500):
            detector.update(step, losses[step])
        costs.append((time.process_time() - before) / 500)
    # The quietest of many stretches that each hold all of the periodic work: what else the machine does is no cost.
    assert min(costs[4:]) < 20e-6
