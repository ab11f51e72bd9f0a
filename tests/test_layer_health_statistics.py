"""The maths of layer health against an oracle that is written like the definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from stabilizer.health import Finding, FindingLog, HealthHistory, Limits, Row, make_layout
from stabilizer.health.explosions import CLASSES, explosions
from stabilizer.health.series import drift, last_trends, window_masks
from stabilizer.health.statistics import baseline, deep_to_shallow, depth_fit, log_norms, median
from stabilizer.windows import WindowedStatistics
from tests import reference_health as reference

LIMITS: dict[str, Any] = {"ratio": 10.0, "k": 6.0, "together_share": 0.75}


def _norms(num_steps: int, num_layers: int, *, seed: int = 0, spoilt: bool = True) -> npt.NDArray[np.float64]:
    """Log-normal norms with zeros, infinities and NaNs among them."""
    random = np.random.default_rng(seed)
    norms = np.exp(random.normal(0, 0.3, (num_steps, num_layers)) + random.normal(0, 2, num_layers))
    if spoilt:
        for value in (0.0, math.inf, math.nan):
            norms[random.random(norms.shape) < 0.05] = value
    return np.asarray(norms)


@pytest.mark.parametrize("num_steps", [1, 2, 9, 64])
def test_median(num_steps: int) -> None:
    norms = _norms(num_steps, 12)
    found = median(log_norms(torch.tensor(norms)))
    np.testing.assert_allclose(found.numpy(), reference.log_medians(norms), rtol=1e-12)


def test_median_of_nothing() -> None:
    assert median(torch.zeros(0, 2)).isnan().all()
    assert median(torch.full((3, 2), torch.nan)).isnan().all()


@pytest.mark.parametrize("seed", range(5))
def test_depth_fit(seed: int) -> None:
    random = np.random.default_rng(seed)
    logs = random.normal(0, 1, 10) - 0.5 * np.arange(10)
    logs[[2, 7]] = math.nan
    found = depth_fit(torch.tensor(logs))
    np.testing.assert_allclose([float(value) for value in found], reference.depth_line(logs.tolist()), rtol=1e-9)


def test_depth_fit_of_too_little_and_of_nothing_to_explain() -> None:
    assert all(math.isnan(value) for value in depth_fit(torch.tensor([0.0, -1.0, torch.nan, -2.0])).slope[None])
    assert float(depth_fit(torch.zeros(6)).r_squared) == 0


@pytest.mark.parametrize("num_blocks", [4, 5, 8, 13])
def test_deep_to_shallow(num_blocks: int) -> None:
    norms = _norms(31, num_blocks, seed=num_blocks)
    found = float(median(deep_to_shallow(log_norms(torch.tensor(norms)))).exp())
    assert found == pytest.approx(reference.deep_over_shallow(norms), rel=1e-9)


def test_baseline() -> None:
    norms = _norms(50, 9)
    found = baseline(log_norms(torch.tensor(norms)), min_count=2)
    np.testing.assert_allclose(torch.stack(list(found), 1).numpy(), reference.usual(norms), rtol=1e-9)
    assert float(baseline(torch.zeros(9, 1).double(), min_count=9).sigma) == 0.05
    assert baseline(torch.zeros(8, 1), min_count=9).median.isnan().all()


def test_baseline_is_not_moved_by_three_bad_steps_in_ten() -> None:
    norms = _norms(200, 20, spoilt=False)
    calm = baseline(log_norms(torch.tensor(norms)), min_count=100)
    norms[::10] *= 1000
    norms[1::10] *= 1000
    norms[2::10] *= 1000
    bad = baseline(log_norms(torch.tensor(norms)), min_count=100)
    assert ((bad.median - calm.median) / calm.sigma).abs().max() < 1
    assert (bad.sigma / calm.sigma).max() < 2.2


def test_explosions_of_random_steps() -> None:
    """Every class comes up, each step is in one, and the worst of each is told with its layers."""
    names = ["embed", *(f"layers.{block}" for block in range(7)), "norm", "head"]
    layout = make_layout(names, modules=[])
    random = np.random.default_rng(1)
    calm = _norms(300, len(names), spoilt=False)
    norms = np.exp(random.normal(0, 0.3, (600, len(names)))) * np.exp(reference.log_medians(calm))
    for row in norms[::2]:
        first, last = sorted(random.integers(0, len(names) + 1, 2))
        row[first:last] *= 10 ** random.uniform(0, 3)
    for row in norms[1::4]:  # some far, others raised only
        row[random.integers(0, 6)] *= 200
        row[random.random(len(row)) < random.uniform(0, 0.8)] *= 4
    norms[random.random(norms.shape) < 0.02] = 0
    usual = reference.usual(calm)
    expected = [reference.classify(row.tolist(), usual, layout.layer_blocks, **LIMITS) for row in norms]
    assert set(expected) == {"", *CLASSES}
    known = baseline(log_norms(torch.tensor(calm)), min_count=1)
    masks: dict[str, Any] = {"is_shallow": torch.tensor(layout.is_shallow), "is_before": torch.tensor(layout.is_before)}
    for step, row in enumerate(norms):
        found = explosions(log_norms(torch.tensor(row[None])), known, **masks, **LIMITS)
        assert [name for name, num in zip(CLASSES, found.counts.tolist(), strict=True) if num] == [
            name for name in (expected[step],) if name
        ], (step, row)
    found = explosions(log_norms(torch.tensor(norms)), known, **masks, **LIMITS)
    with np.errstate(divide="ignore"):
        excess = np.log(norms) - [middle for middle, _ in usual]
    for number, name in enumerate(CLASSES):
        steps = [step for step, is_one in enumerate(expected) if is_one == name]
        assert found.counts[number] == len(steps)
        worst = max(steps, key=lambda step: excess[step].max())
        assert found.rows[number] == worst
        has_norm = norms[worst] > 0
        np.testing.assert_allclose(found.excess[number].numpy()[has_norm], excess[worst][has_norm], rtol=1e-9)


def test_no_explosion() -> None:
    calm = log_norms(torch.ones(20, 3))
    shallow = torch.tensor([True, False, False])
    found = explosions(calm, baseline(calm, min_count=1), is_shallow=shallow, is_before=~shallow, **LIMITS)
    assert found.counts.tolist() == [0] * 4
    assert found.rows.tolist() == [-1] * 4


@pytest.mark.parametrize("num", [3, 39, 40, 41, 57, 160])
def test_windows_and_their_drift(num: int) -> None:
    """The last windows, whatever has been written over; none that is not full."""
    random = np.random.default_rng(num)
    values = random.normal(0, 1, num)
    series = WindowedStatistics(windows=(40,))
    for step, value in enumerate(values):
        series.update(float(value), 3 * step)
        series.update(math.nan, 3 * step + 1)
    masks = window_masks(series, num_windows=4)
    full = [values[num - start : num - start + 10] for start in (40, 30, 20, 10) if num >= start]
    assert masks.sum(1).tolist() == [0] * (4 - len(full)) + [10] * len(full)
    found = drift(series, num_windows=4).medians.tolist()
    assert found[4 - len(full) :] == pytest.approx([np.median(window) for window in full], rel=1e-6)
    trends = last_trends(series)
    if num >= 40:
        for start, slope, error in zip((40, 20), trends.slope.tolist(), trends.error.tolist(), strict=True):
            x, y = np.arange(20) * 3.0, values[num - start : num - start + 20]
            (expected, _), covariance = np.polyfit(x, y, 1, cov="unscaled")
            residual = y - np.polyval(np.polyfit(x, y, 1), x)
            assert slope == pytest.approx(expected, rel=1e-5)
            assert error == pytest.approx(math.sqrt(covariance[0, 0] * (residual**2).sum() / 18), rel=1e-5)
    else:
        assert math.isnan(trends.slope[0])


@pytest.mark.parametrize(("medians", "is_rising"), [([1, 2, 3, 4], True), ([1, 3, 2, 4], False), ([4, 4, 4, 4], False)])
def test_a_drift_rises_from_window_to_window(medians: list[float], is_rising: bool) -> None:
    series = WindowedStatistics(windows=(12,))
    for step in range(12):
        series.update(float(medians[step // 3]), step)
    assert bool(drift(series, num_windows=4).is_rising) == is_rising


def test_layout_of_several_containers() -> None:
    names = ["vision.blocks.0", "vision.blocks.1", "text.embed", *(f"text.layers.{n}" for n in range(3)), "head"]
    modules = ["text.layers.2.self_attn.q_proj", "text.layers.2.mlp.up", "text.layers.2.norm", "vision.blocks.0.mlp"]
    layout = make_layout(names, modules=modules)
    assert layout.blocks == ("text.layers.0", "text.layers.1", "text.layers.2")
    assert layout.layer_blocks == (-1, -1, -1, 0, 1, 2, -1)
    assert layout.is_shallow == (True, True, True, True, True, False, False)
    assert layout.is_before == (True, True, True, False, False, False, False)
    assert layout.module_parts == (4, 5, -1, -1)
    flat = make_layout(["a", "b"], modules=["a", "b"])
    assert (flat.blocks, flat.is_shallow, flat.module_parts) == ((), (False, False), (-1, -1))
    # Blocks of which some are left out keep their order.
    assert make_layout(["h.2", "h.10"], modules=["h.10.attn"]).module_parts == (2,)


def _history(names: list[str]) -> HealthHistory:
    layout = make_layout(names, modules=names)
    units = list(range(len(names)))
    return HealthHistory(layout, unit_modules=units, limits=Limits(window=16), device=torch.device("cpu"))


def _row(step: int, norms: npt.ArrayLike) -> Row:
    values = torch.as_tensor(norms, dtype=torch.float32)
    loss = torch.tensor([2.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    return Row(step, values, values.norm(), values.double().square(), torch.tensor(False), loss)


@pytest.mark.parametrize("interval", [1, 7, 50])
def test_steps_without_a_gradient_are_counted(interval: int) -> None:
    """However the steps come in."""
    names, random = ["a", "b", "c"], np.random.default_rng(0)
    history, idle = _history(names), [0, 0, 0]
    for step, is_active in enumerate(random.random((150, 3)) < [0.5, 0.1, 0.02]):
        history.append(_row(step, is_active.astype(float)))
        idle = [0 if active else num + 1 for num, active in zip(idle, is_active, strict=True)]
        if step % interval == 0:
            history.flush()
            assert history.idle.tolist() == idle
    assert idle[2] > 16


def test_norms_that_are_not_finite_are_kept_out_of_the_history() -> None:
    """Also where nobody has found the step to be bad: float32 ends before float64 does."""
    history, spoilt = _history(["a", "b"]), _history(["a", "b"])
    for step in range(40):
        history.append(_row(step, [1.0, 0.0 if step == 30 else 2.0]))
        spoilt.append(_row(step, [1.0, math.inf if step == 30 else 2.0]))
    first, second = history.state_dict(), spoilt.state_dict()
    assert all(values.isfinite().all() for values in (second["norms"], *second["totals"].values()))
    assert torch.equal(first["norms"], second["norms"])
    # Neither a gradient nor none.
    assert second["idle"].tolist() == [0, 0]


def test_findings_are_folded_and_told_again_when_worse() -> None:
    log = FindingLog(cooldown_steps=100, max_findings=3)
    told = []
    for step in range(0, 500, 50):
        severity: Any = "alarm" if step == 150 else "warning"
        told += log.see(step, [Finding("vanishing", severity, step, (), {}, "small")])
    assert [(one.step, one.severity) for one in told] == [
        (0, "warning"),
        (100, "warning"),
        (150, "alarm"),
        (250, "warning"),
        (350, "warning"),
        (450, "warning"),
    ]
    assert [one.text for one in told[:3]] == ["small", "small (found 1 time more since step 0)", "small"]
    assert log.findings == told[-3:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 7}, "window=7: expected a whole number, at least 8"),
        ({"window": 20.0}, r"window=20\.0: expected a whole number"),
        ({"drift_windows": 1}, "drift_windows=1: expected a whole number, at least 2"),
        ({"loss_window": True}, "loss_window=True: expected a whole number"),
        ({"decay_r_squared": 1.0}, r"decay_r_squared=1\.0: expected a number between 0 and 1"),
        ({"together_share": 0}, "together_share=0: expected a number between 0 and 1"),
        ({"explosion_ratio": 1.0}, r"explosion_ratio=1\.0: expected a number over 1"),
        ({"explosion_k": "6"}, "explosion_k='6': expected a number over 0"),
        ({"drift_ratio": math.nan}, "drift_ratio=nan: expected a number over 1"),
        ({"plateau_errors": math.inf}, "plateau_errors=inf: expected a number over 0"),
        ({"vanishing_alarm": 0.2}, r"vanishing_alarm=0\.2: expected at most vanishing_warning=0\.1"),
    ],
)
def test_limits_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**options)
