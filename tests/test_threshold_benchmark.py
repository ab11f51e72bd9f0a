"""The benchmark of threshold rules: its published rules are those of their authors, its targets can be missed."""

from __future__ import annotations

import copy
import doctest

import numpy as np
import pytest

from benchmarks import published_rules, threshold_scenarios, thresholds
from benchmarks.published_rules import AdaGC, Array, AutoClip, ZClip
from benchmarks.threshold_scenarios import Clipper, Setting, thresholds_of
from tests.test_thresholds import golden

TINY = Setting(num_steps=420, num_runs=1, healthy_steps=100, incident_steps=100)


def _run(rule: Clipper, norms: Array) -> tuple[Array, Array]:
    """Thresholds and clipped norms."""
    found = thresholds_of(rule, norms)
    return found, np.minimum(norms, found)


@pytest.mark.parametrize("label", ["no_max_norm", "warmup10_alpha0.9_z2_no_max"])
def test_zclip_is_that_of_its_authors(label: str) -> None:
    run = golden("zclip")["runs"][label]
    names = {"alpha": "alpha", "z_thresh": "z", "warmup_steps": "warmup_steps"}
    rule = ZClip(**{names[key]: value for key, value in run["kwargs"].items() if key in names})
    norms = np.array([[step["norm_in"]] for step in run["trace"]])
    _, clipped = _run(rule, norms)
    # It divides by the norm and 1e-6.
    assert clipped[:, 0] == pytest.approx([step["norm_out"] for step in run["trace"]], rel=2e-6)
    assert (clipped < norms).sum() == len(run["spike_steps"]) > 0


def test_zclip_goes_blind_as_that_of_its_authors() -> None:
    norms = np.array(golden("norms_60")["norms"])[:, None]
    norms[40] = np.nan
    found, _ = _run(ZClip(), norms)
    assert np.isinf(found[41:]).all()
    assert [step["mean_after"] for step in golden("zclip")["runs"]["nan_at_step_40_no_max"]["trace"][3:]] == (
        pytest.approx([np.nan] * 9, nan_ok=True)
    )


@pytest.mark.parametrize("label", ["p0", "p10", "p50", "p90", "p100"])
def test_autoclip_is_that_of_its_authors(label: str) -> None:
    run = golden("autoclip_original")["runs"][label]
    norms = np.array([[step["norm_in"]] for step in run["trace"]])
    found, _ = _run(AutoClip(percentile=run["clip_percentile"]), norms)
    assert found[:, 0] == pytest.approx([step["threshold"] for step in run["trace"]], rel=1e-12)


@pytest.mark.parametrize(
    "label", ["warmup10", "warmup25_beta0.9", "warmup10_lambda_rel2", "default_warmup100", "nan_at_step_31_tensor1"]
)
def test_adagc_is_that_of_a_public_package(label: str) -> None:
    run = golden("adagc")["runs"][label]
    rule = AdaGC(**run["kwargs"], is_one_model=True)
    norms = np.array([golden("norms_60")["norms"], golden("adagc")["norms2"]]).T
    if label.startswith("nan"):
        norms[30, 0] = np.nan
    rule.start(2)
    traced = {step["step"]: step for step in run["trace"]}
    for number, row in enumerate(norms, 1):
        step = traced.get(number)
        if step is not None:
            clipped = row * np.minimum(rule.thresholds(row) / row, 1)
            expected = [float(value) for value in step["clipped_norm"]]
            if label.startswith("nan") and number > 31:
                # There the mean is NaN and the norm becomes it; here no comparison with NaN is true.
                assert np.isnan(rule.mean[0])
                clipped, expected = clipped[1:], expected[1:]
            assert clipped == pytest.approx(expected, rel=1e-6, nan_ok=True), number
        rule.update(row)
        if step is not None:
            gamma = [float(value) for value in step["gamma_after"]]
            assert rule.mean == pytest.approx(gamma, rel=1e-6, nan_ok=True), number


def test_it_runs_and_prints_a_table_for_every_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert thresholds.main(["--tiny", "robust_log", "fixed 1.0", "ZClip"]) == 0
    printed = capsys.readouterr().out
    for question in thresholds.TARGETS:
        assert question in printed
    assert "robust_log" in printed
    with pytest.raises(SystemExit):
        thresholds.main(["--tiny", "robustlog"])


def test_every_target_is_of_something_that_is_measured_and_can_be_missed() -> None:
    figures = thresholds.measure("robust_log", TINY)
    for question, targets in thresholds.TARGETS.items():
        for start in targets:
            matching = [what for what in figures[question] if what.startswith(start)]
            assert matching, (question, start)
            for bad in (1e9, float("nan")):
                spoiled = copy.deepcopy(figures)
                spoiled[question][matching[0]] = bad
                lines = [miss for miss in thresholds.misses(spoiled) if miss.startswith(f"{question}: {matching[0]}:")]
                assert len(lines) == 1, (question, start, bad)


def test_check_is_an_error_when_a_target_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "TARGETS", {"one spike of x1000": {"threshold": (0, 1.2)}})
    assert thresholds.main(["--tiny", "--check", "fixed 1.0"]) == 0
    monkeypatch.setattr(thresholds, "TARGETS", {"one spike of x1000": {"threshold": (0, 0.5)}})
    assert thresholds.main(["--tiny", "--check", "fixed 1.0"]) == 1
    assert thresholds.main(["--tiny", "fixed 1.0"]) == 0


def test_the_examples_hold() -> None:
    for module in (published_rules, threshold_scenarios, thresholds):
        assert doctest.testmod(module).failed == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_rule_meets_its_targets() -> None:
    assert thresholds.misses(thresholds.measure("robust_log", Setting())) == []
