"""Threshold rules: against oracles and published implementations, and with norms that must leave no trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stabilizer.thresholds import RULES, LayerThresholds, ThresholdRule, make_rule
from tests import reference_thresholds as reference
from tests.environments import ROOT

NAN, INF = math.nan, math.inf
Oracle = Callable[..., list[float]]

#: Every rule with a memory, in several settings, each with its oracle.
CASES: dict[str, tuple[Oracle, dict[str, Any]]] = {
    "robust_log": (reference.robust_log, {"name": "robust_log"}),
    "robust_log narrow": (reference.robust_log, {"name": "robust_log", "k": 2.0, "min_ratio": 1.1, "decay": 0.9}),
    "robust_log short": (reference.robust_log, {"name": "robust_log", "warmup_steps": 5, "escape_after": 8}),
    "robust_log long": (reference.robust_log, {"name": "robust_log", "warmup_steps": 2, "escape_after": 2}),
    "mean_multiple": (reference.mean_multiple, {"name": "mean_multiple"}),
    "mean_multiple short": (reference.mean_multiple, {"name": "mean_multiple", "k": 3, "warmup_steps": 1}),
    "quantile": (reference.quantile, {"name": "quantile", "q": 0.9, "window": 100}),
    "quantile of a few": (reference.quantile, {"name": "quantile", "q": 0.37, "window": 7, "warmup_steps": 3}),
    "quantile with the norm": (
        reference.quantile,
        {"name": "quantile", "q": 0.1, "window": 60, "warmup_steps": 1, "include_current": True},
    ),
    "zscore": (reference.zscore, {"name": "zscore"}),
    "zscore short": (reference.zscore, {"name": "zscore", "z": 1.5, "decay": 0.8, "warmup_steps": 2}),
}
SPECS = {**{label: spec for label, (_, spec) in CASES.items()}, "fixed": {"name": "fixed", "threshold": 0.3}}


def run(rule: ThresholdRule, norms: Tensor) -> Tensor:
    """Thresholds of all steps, shape (steps, layers)."""
    rows = []
    for row in norms:
        rows.append(rule.thresholds(row))
        rule.update(row)
    return torch.stack(rows) if rows else norms


def started(spec: Any, num_layers: int) -> ThresholdRule:
    rule = make_rule(spec)
    rule.start(num_layers, device="cpu")
    return rule


def hard_norms(num_steps: int = 700) -> Tensor:
    """Layers of any scale and width, with bursts, shifts, a mixture, zeros, and values that are not finite."""
    noise = np.random.randn(700, 8) * np.linspace(0.02, 0.9, 8)
    norms = np.exp(noise) * np.logspace(-20, 4, 8)
    norms[150 : 150 + 20, ::2] *= 1000
    norms[250:, 1] *= 50
    norms[250:, 2] /= 30
    norms[250:, 3] *= 3
    norms[300:, 4] *= np.where(np.random.rand(400) < 0.3, 30, 1)
    norms[400:, 5] *= np.exp(np.arange(300) / 60)
    for value in (NAN, INF, -INF, 0.0):
        norms[np.random.rand(700, 8) < 0.01] = value
    return torch.tensor(norms[:num_steps], dtype=torch.float32)


@pytest.mark.parametrize("label", CASES)
def test_every_threshold_is_that_of_the_oracle(label: str) -> None:
    oracle, spec = CASES[label]
    norms = hard_norms()
    found = run(started(spec, norms.shape[1]), norms)
    assert found.dtype == torch.float32
    arguments = {key: value for key, value in spec.items() if key != "name"}
    for layer, column in enumerate(norms.double().T.tolist()):
        expected = torch.tensor(oracle(column, **arguments), dtype=torch.float64).float()
        torch.testing.assert_close(found[:, layer], expected, rtol=2e-6, atol=0, msg=lambda text: f"{layer}: {text}")  # noqa: B023


def test_the_hard_norms_take_every_way_out() -> None:
    # Else the comparison above would say nothing of them.
    rule: Any = started("robust_log", 8)
    seen = {"restart": 0, "doubled": 0}
    for row in hard_norms():
        before, cold = rule.running.clone(), ~rule.is_warm
        rule.update(row)
        in_row, share = rule.running[3:]
        fresh = ~cold & (share == 1) & (before[4] < 1)
        seen["restart"] += int((fresh & (in_row == 0)).sum())
        seen["doubled"] += int((fresh & (in_row > 0)).sum())
    assert min(seen.values()) > 0, seen


# Published implementations.


def golden(name: str) -> Any:
    def number(value: Any) -> Any:
        return float(value) if value in ("nan", "inf") else value

    text = (ROOT / "tests" / "data" / "golden" / f"{name}.json").read_text()
    return json.loads(text, object_hook=lambda found: {key: number(value) for key, value in found.items()})


def norms_of(trace: Sequence[dict[str, Any]], key: str = "norm_in") -> Tensor:
    return torch.tensor([[step[key]] for step in trace], dtype=torch.float32)


_ZCLIP = {"alpha": "decay", "z_thresh": "z", "skip_update_on_spike": "skip_spikes", "clip_factor": "clip_factor"}


def zscore_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The rule for ZClip's arguments; its max_grad_norm is max_threshold of LayerThresholds."""
    spec: dict[str, Any] = {"name": "zscore"}
    for key, value in kwargs.items():
        if key in _ZCLIP:
            spec[_ZCLIP[key]] = value
        elif key == "warmup_steps":
            spec[key] = value
    if kwargs.get("mode") == "percentile":
        spec["clip_to"] = "bound"
    elif kwargs.get("clip_option") == "mean":
        spec["clip_to"] = "mean"
    return spec


@pytest.mark.parametrize("label", [label for label in golden("zclip")["runs"] if not label.startswith(("nan", "inf"))])
def test_zclip_as_published(label: str) -> None:
    found = golden("zclip")["runs"][label]
    maximum = {**golden("zclip")["defaults"], **found["kwargs"]}["max_grad_norm"]
    spec, trace = zscore_of(found["kwargs"]), found["trace"]
    rule = LayerThresholds(["total"], rule=spec, warmup_cap=maximum, max_threshold=maximum, device="cpu")
    free: Any = started(spec, 1)
    num_spikes = 0
    for step, row in zip(trace, norms_of(trace), strict=True):
        threshold = rule.thresholds(row, step=step["step"])
        after = torch.minimum(threshold, row).item()
        assert after == pytest.approx(step["norm_out"], rel=2e-6), step
        if step["is_spike"]:
            num_spikes += 1
            assert free.thresholds(row).item() == pytest.approx(step["adaptive_threshold"], rel=1e-6), step
        elif not step["warmup"]:
            assert (free.thresholds(row) >= row).item(), step
        rule.update(row)
        free.update(row)
        if step["mean_after"] is not None:
            assert free.mean.item() == pytest.approx(step["mean_after"], rel=1e-6)
            assert free.variance.item() == pytest.approx(step["var_after"], rel=1e-6)
    assert num_spikes == len(found["spike_steps"]) > 0


@pytest.mark.parametrize("label", ["p0", "p10", "p50", "p90", "p100"])
def test_autoclip_of_the_paper(label: str) -> None:
    found = golden("autoclip_original")["runs"][label]
    spec = {"name": "quantile", "q": found["clip_percentile"] / 100, "warmup_steps": 1, "include_current": True}
    thresholds = run(started(spec, 1), norms_of(found["trace"]))
    expected = [step["threshold"] for step in found["trace"]]
    assert thresholds.flatten().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("label", ["quantile_local_default", "quantile_global_default", "quantile_local_q0.5_h20"])
def test_quantile_clip_of_the_package(label: str) -> None:
    found = golden("autoclip_pypi")["runs"][label]
    trace, kwargs = found["trace"], found["kwargs"]
    norms = torch.cat([norms_of(trace, "in1"), norms_of(trace, "in2")], 1)
    after = torch.cat([norms_of(trace, "out1"), norms_of(trace, "out2")], 1)
    if kwargs.get("global_threshold"):
        norms, after = norms.norm(dim=1, keepdim=True), after.norm(dim=1, keepdim=True)
    spec = {
        "name": "quantile",
        "q": kwargs.get("quantile", 0.9),
        "window": kwargs.get("history_length", 1000),
        "warmup_steps": 1,
    }
    thresholds = run(started(spec, norms.shape[1]), norms)
    # It divides by the norm and 1e-6.
    expected = norms * (thresholds / (norms + 1e-6)).clamp(max=1)
    torch.testing.assert_close(after, expected, rtol=1e-6, atol=0)
    assert ((norms > thresholds) & (after < norms * (1 - 1e-4))).sum() > 4


def test_what_ends_the_published_rules_leaves_no_trace_in_ours() -> None:
    for label in ("nan_at_step_40_no_max", "inf_at_step_40_no_max"):
        trace = golden("zclip")["runs"][label]["trace"]
        norms, rule = torch.tensor(golden("norms_60")["norms"])[:, None], started("zscore", 1)
        norms[40] = trace[2]["norm_in"]
        thresholds = run(rule, norms)
        assert not norms[40].isfinite()
        # The spike of x100, which ZClip lets pass after a NaN.
        assert norms[45] > 50 * thresholds[45]
        assert all(value.isfinite().all() for value in rule.state_dict().values())


# Norms that must leave no trace.


@pytest.mark.parametrize("label", SPECS)
@pytest.mark.parametrize("num_before", [0, 1, 10, 49, 50, 200])
def test_nothing_that_is_not_finite_or_zero_or_not_valid_enters(label: str, num_before: int) -> None:
    rule = started(SPECS[label], 6)
    norms = torch.rand(num_before + 2, 6) + 0.1
    run(rule, norms[:num_before])
    before, thresholds = rule.state_dict(), rule.thresholds(norms[-1])
    bad = torch.tensor([NAN, INF, -INF, 0.0, -0.0, -3.0])
    for _ in range(3):
        rule.update(bad)
        rule.update(norms[0], valid=torch.tensor(False))
        rule.update(torch.full((6,), NAN), valid=torch.tensor(True))
        rule.update(norms[0], valid=torch.zeros(6, dtype=torch.bool))
    assert all(torch.equal(value, before[name]) for name, value in rule.state_dict().items())
    assert all(value.isfinite().all() for value in before.values())
    assert torch.equal(rule.thresholds(norms[-1]), thresholds)
    # One layer's trouble is none of the others'.
    mixed, alone = norms[-2].clone(), started(SPECS[label], 6)
    mixed[[1, 4]] = torch.tensor([NAN, 0.0])
    run(alone, norms[: num_before + 1])
    rule.update(mixed)
    good = [0, 2, 3, 5]
    for name, value in rule.state_dict().items():
        assert torch.equal(value[..., good], alone.state_dict()[name][..., good])
        assert torch.equal(value[..., [1, 4]], before[name][..., [1, 4]])


@pytest.mark.parametrize("label", SPECS)
def test_asking_changes_nothing(label: str) -> None:
    rule = started(SPECS[label], 4)
    run(rule, torch.rand(80, 4) + 0.1)
    before = rule.state_dict()
    for scale in (1e-3, 1.0, 1e6, NAN):
        rule.thresholds(torch.full((4,), scale))
    assert all(torch.equal(value, before[name]) for name, value in rule.state_dict().items())


@pytest.mark.parametrize("label", SPECS)
def test_warm_up_and_what_is_typical(label: str) -> None:
    rule = started(SPECS[label], 3)
    norms = 0.5 * (torch.rand(120, 3) / 10 + 1)
    norms[::2, 1] = 0
    for step, row in enumerate(norms):
        threshold = rule.thresholds(row)
        if label != "quantile with the norm":
            assert torch.equal(threshold.isfinite(), rule.is_warm), step
            assert torch.equal(rule.is_warm, rule.num_accepted >= rule.warmup_steps), step
        rule.update(row)
    assert rule.num_accepted.tolist() == [120, 60, 120]
    assert rule.is_warm.all()
    if label == "fixed":
        assert rule.typical.isnan().all()
    else:
        assert rule.typical.tolist() == pytest.approx([0.525] * 3, rel=0.06)
        assert started(SPECS[label], 1).typical.isnan().all()


@pytest.mark.parametrize("num_layers", [1, 200])
@pytest.mark.parametrize("name", [name for name in RULES if name != "fixed"])
def test_any_number_of_layers_and_any_scale(name: str, num_layers: int) -> None:
    rule = started(name, num_layers)
    scale = torch.logspace(-35, 30, num_layers)
    run(rule, scale * (1 + torch.rand(60, num_layers) / 10))
    ratio = rule.thresholds(scale) / scale
    assert ratio.isfinite().all()
    # zscore's 1e-6 is in units of the norm, as published.
    assert (ratio[scale > 1e-3] < 6).all()
    assert (ratio > 1).all()
