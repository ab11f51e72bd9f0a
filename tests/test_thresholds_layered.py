"""Thresholds of named layers, and rules from what a user writes: names, YAML, classes of one's own, and mistakes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor

import stabilizer
from stabilizer import StabilizerWarning
from stabilizer.thresholds import RULES, Fixed, LayerThresholds, MeanMultiple, RobustLog, ThresholdRule, make_rule
from tests.test_thresholds import started
from tests.test_thresholds_state import NAMES, layered, run_layers


class Halfway(ThresholdRule):
    """A rule of a user's own."""

    largest: Tensor

    def __init__(self, factor: float, warmup_steps: int = 2) -> None:
        if factor <= 1:
            raise ValueError(f"factor={factor!r}: expected more than 1")
        self.factor, self.warmup_steps = factor, warmup_steps

    def allocate(self, num_layers: int) -> None:
        self.add_state("largest", torch.zeros(num_layers, device=self.device))

    def thresholds(self, norms: Tensor) -> Tensor:
        return torch.where(self.is_warm, self.factor * self.largest, math.inf)

    def enter(self, norms: Tensor, accepted: Tensor) -> None:
        self.largest.copy_(torch.where(accepted, torch.maximum(self.largest, norms.float()), self.largest))


class Unfinished(ThresholdRule):
    """It has no thresholds."""

    def allocate(self, num_layers: int) -> None:
        pass


# Which rule a layer has.


def test_first_pattern_wins_and_the_rest_has_the_default() -> None:
    rules = {r"blocks\.[01]": Fixed(1.0), r"blocks\..*": Fixed(2.0), "embed": Fixed(3.0)}
    thresholds = LayerThresholds(NAMES, rule=Fixed(4.0), rules=rules, device="cpu")
    assert thresholds.thresholds(torch.ones(5), step=0).tolist() == [3, 1, 1, 2, 4]
    assert [positions for _, positions in thresholds.parts] == [[1, 2], [3], [0], [4]]
    assert thresholds.describe().startswith("fixed(threshold=1.0, schedule=None, calibrated_for=None) for 2 layers, ")
    everything = LayerThresholds(NAMES, rule="zscore", rules={".*": Fixed(1.0)}, device="cpu")
    assert everything.describe() == "fixed(threshold=1.0, schedule=None, calibrated_for=None)"
    assert everything.thresholds(torch.ones(5), step=0).tolist() == [1] * 5


def test_each_layer_is_as_if_it_were_alone() -> None:
    norms = torch.rand(200, 5) + 0.1
    norms[100] *= 50
    found = run_layers(layered(min_norm=0.0, warmup_cap=None, max_threshold=None), norms)
    specs: list[Any] = ["zscore", "robust_log", "mean_multiple", "mean_multiple", {"name": "quantile", "window": 100}]
    for layer, spec in enumerate(specs):
        alone = LayerThresholds(["total"], rule=spec, device="cpu")
        assert torch.equal(found[:, layer], run_layers(alone, norms[:, [layer]])[:, 0])


def test_views_of_all_layers_are_in_their_order() -> None:
    thresholds = layered()
    norms = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    valid = torch.tensor([True, False, True, True, True])
    for _ in range(30):
        thresholds.update(norms, valid=valid)
    for _ in range(30):
        thresholds.update(norms.where(norms != 4, torch.nan))
    assert thresholds.num_accepted.tolist() == [60, 30, 60, 30, 60]
    assert thresholds.is_warm.tolist() == [True, False, True, False, True]
    assert thresholds.typical.tolist() == pytest.approx([1, math.nan, 3, math.nan, 5], nan_ok=True)


def test_cap_floor_and_maximum() -> None:
    options: dict[str, Any] = {"rule": {"name": "mean_multiple", "warmup_steps": 1}, "device": "cpu"}
    norms = torch.tensor([0.01, 1.0, 100.0])
    plain = LayerThresholds(NAMES[:3], **options)
    bound = LayerThresholds(NAMES[:3], **options, min_norm=0.5, warmup_cap=1.5, max_threshold=20)
    low = LayerThresholds(NAMES[:3], **options, min_norm=2.0, warmup_cap=1.0)
    assert plain.thresholds(norms, step=0).tolist() == [math.inf] * 3
    assert bound.thresholds(norms, step=0).tolist() == [1.5] * 3
    assert low.thresholds(norms, step=0).tolist() == [2.0] * 3
    for thresholds in (plain, bound, low):
        thresholds.update(norms)
    assert plain.thresholds(norms, step=1).tolist() == pytest.approx([0.05, 5, 500])
    assert bound.thresholds(norms, step=1).tolist() == pytest.approx([0.5, 5, 20])
    assert low.thresholds(norms, step=1).tolist() == pytest.approx([2, 5, 500])


def test_schedule_follows_the_step() -> None:
    text = "{name: fixed, threshold: 2.0, schedule: {'100': 1.0, 10: 4.0}, calibrated_for: {batch_size: 512}}"
    thresholds = LayerThresholds(["total"], rule=yaml.safe_load(text), device="cpu")
    norm = torch.ones(1)
    found = [thresholds.thresholds(norm, step=step).item() for step in (0, 9, 10, 99, 100, 5000, 9)]
    assert found == [2, 2, 4, 4, 1, 1, 2]
    assert thresholds.is_warm.all()


# A state of another model.


def test_layers_that_are_gone_or_new() -> None:
    norms = torch.rand(100, 5) + torch.tensor([1.0, 2, 3, 4, 5])
    old = layered()
    run_layers(old, norms)
    names = ["head", "blocks.2", "blocks.0", "blocks.3"]
    rules: dict[str, Any] = {r"blocks\.[123]": "mean_multiple", "head": {"name": "quantile", "window": 100}}
    new = LayerThresholds(names, rule="robust_log", rules=rules, device="cpu")
    new.update(torch.ones(4))
    new.load_state_dict(old.state_dict())
    assert new.num_accepted.tolist() == [100, 100, 100, 0]
    expected = old.thresholds(norms[0], step=100)[[4, 3, 1]]
    assert torch.equal(new.thresholds(torch.ones(4), step=100)[:3], expected)
    assert new.thresholds(torch.ones(4), step=100)[3].isinf()


def test_another_rule_starts_anew_with_one_warning() -> None:
    old = LayerThresholds(NAMES, rule="mean_multiple", device="cpu")
    run_layers(old, torch.rand(100, 5) + 0.1)
    rules: Mapping[str, Any] = {"embed": "zscore", "head": {"name": "mean_multiple", "k": 3.0}}
    new = LayerThresholds(NAMES, rule="robust_log", rules=rules, device="cpu")
    with pytest.warns(StabilizerWarning, match=r"blocks.0, blocks.1, blocks.2.* new warm-up") as caught:
        new.load_state_dict(old.state_dict())
    assert len(caught) == 1
    assert "head" not in str(caught[0].message).partition("were made")[0]
    assert new.num_accepted.tolist() == [0, 0, 0, 0, 100]
    # The same rule with a ring of another length.
    longer = LayerThresholds(NAMES, rule={"name": "robust_log", "escape_after": 16}, device="cpu")
    with pytest.warns(StabilizerWarning, match="new warm-up"):
        longer.load_state_dict(LayerThresholds(NAMES, rule="robust_log", device="cpu").state_dict())


# Rules from what a user writes.


def test_names_and_the_public_door() -> None:
    assert list(RULES) == ["robust_log", "mean_multiple", "quantile", "zscore", "fixed"]
    assert stabilizer.thresholds.make_rule is make_rule
    assert make_rule("robust_log").describe() == (
        "robust_log(k=5.0, min_ratio=2.0, sigma_min=0.05, decay=0.98, warmup_steps=50, escape_after=32)"
    )
    assert [make_rule(name).k for name in ("robust_log", "mean_multiple", "zscore")] == [5, 5, 2.5]
    assert math.isnan(make_rule({"name": "fixed", "threshold": 1}).k)


def test_a_rule_is_always_a_fresh_one() -> None:
    given = started("mean_multiple", 3)
    given.update(torch.ones(3))
    made = make_rule(given)
    assert made is not given
    assert made.state_dict() == {}
    assert not hasattr(made, "num_accepted")
    assert made.describe() == given.describe()
    made.start(2, device="cpu")
    assert made.num_accepted.tolist() == [0, 0]
    assert given.num_accepted.tolist() == [1, 1, 1]
    given.start(1, device="cpu")
    assert given.num_accepted.tolist() == [0]
    shared = LayerThresholds(NAMES, rule=given, rules={"embed": given}, device="cpu")
    assert shared.parts[0][0] is not shared.parts[1][0]


@pytest.mark.parametrize(
    "text",
    [
        "{class_path: tests.test_thresholds_layered.Halfway, init_args: {factor: 3.0}}",
        "{class_path: tests.test_thresholds_layered.Halfway, init_args: {factor: 3, warmup_steps: 2}}",
    ],
)
def test_a_rule_of_ones_own_plugs_in(text: str) -> None:
    thresholds = LayerThresholds(NAMES, rule="zscore", rules={"embed|head": yaml.safe_load(text)}, device="cpu")
    norms = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0])
    assert run_layers(thresholds, norms.expand(3, -1))[:, [0, 4]].tolist() == [[math.inf] * 2] * 2 + [[3, 6]]
    assert "Halfway(factor=3" in thresholds.describe()
    other = LayerThresholds(NAMES, rule=Halfway(3.0), device="cpu")
    other.load_state_dict(LayerThresholds(NAMES, rule=Halfway(3.0), device="cpu").state_dict())
    assert make_rule({"class_path": "stabilizer.thresholds.Fixed", "init_args": {"threshold": 1}}).describe() == (
        "fixed(threshold=1.0, schedule=None, calibrated_for=None)"
    )


OWN = "tests.test_thresholds_layered"
MISTAKES: list[tuple[Any, str]] = [
    ("robustlog", r"rule='robustlog': expected one of robust_log, .*fixed; the closest is robust_log"),
    ({"name": "z_score"}, r"rule='z_score': expected one of .*; the closest is zscore"),
    ({"name": None}, r"rule=None: expected one of"),
    ({"name": ["zscore"]}, r"rule=\['zscore'\]: expected one of"),
    ({"k": 5.0}, r"rule=\{'k': 5.0\}: expected a name \(robust_log, .*or a class_path"),
    (5.0, r"rule=5.0: expected a name"),
    (None, r"rule=None: expected a name"),
    (RobustLog, r"expected a name"),
    ({"name": "robust_log", "kk": 5.0}, r"robust_log: 'kk' is no argument; known are k, min_ratio.*; the closest is k"),
    ({"name": "zscore", "k": 5.0}, r"zscore: 'k' is no argument"),
    ({"name": "fixed"}, r"rule fixed needs threshold"),
    ({"name": "robust_log", "k": 0}, r"rule robust_log: k=0: expected a number above 0"),
    ({"name": "robust_log", "k": -1.0}, r"k=-1.0: expected a number above 0"),
    ({"name": "robust_log", "k": "5.0"}, r"k='5.0': expected a number above 0"),
    ({"name": "robust_log", "k": True}, r"k=True: expected a number above 0"),
    ({"name": "robust_log", "k": math.nan}, r"k=nan: expected a number above 0"),
    ({"name": "robust_log", "k": None}, r"k=None: expected a number above 0"),
    ({"name": "robust_log", "min_ratio": 1}, r"min_ratio=1: expected a number above 1"),
    ({"name": "robust_log", "sigma_min": 0}, r"sigma_min=0: expected a number above 0"),
    ({"name": "robust_log", "decay": 1.0}, r"decay=1.0: expected a number above 0 and below 1"),
    ({"name": "robust_log", "warmup_steps": 50.0}, r"warmup_steps=50.0: expected a whole number of at least 2"),
    ({"name": "robust_log", "warmup_steps": True}, r"warmup_steps=True: expected a whole number"),
    ({"name": "robust_log", "escape_after": 1}, r"escape_after=1: expected a whole number of at least 2"),
    ({"name": "mean_multiple", "k": 2.9}, r"k=2.9: expected a number at least 3 and at most 10"),
    ({"name": "mean_multiple", "k": 10.1}, r"k=10.1: expected a number at least 3 and at most 10"),
    ({"name": "mean_multiple", "warmup_steps": 0}, r"warmup_steps=0"),
    ({"name": "quantile", "q": 90}, r"q=90: expected a number at least 0 and at most 1"),
    ({"name": "quantile", "q": -0.1}, r"q=-0.1"),
    ({"name": "quantile", "window": 10}, r"warmup_steps=50: expected at most window, which is 10"),
    ({"name": "quantile", "include_current": "no"}, r"include_current='no': expected true or false"),
    ({"name": "zscore", "z": -2.5}, r"z=-2.5: expected a number above 0"),
    ({"name": "zscore", "clip_to": "means"}, r"clip_to='means': expected one of adaptive, mean, bound; .* is mean"),
    ({"name": "zscore", "skip_spikes": 1}, r"skip_spikes=1: expected true or false"),
    ({"name": "zscore", "clip_factor": 0.0}, r"clip_factor=0.0"),
    ({"name": "fixed", "threshold": -1.0}, r"threshold=-1.0: expected a number above 0"),
    ({"name": "fixed", "threshold": math.inf}, r"threshold=inf: expected a number above 0"),
    ({"name": "fixed", "threshold": "1.0"}, r"threshold='1.0': expected a number above 0"),
    ({"name": "fixed", "threshold": False}, r"threshold=False: expected a number above 0"),
    ({"name": "fixed", "threshold": 1, "schedule": {10: 0}}, r"schedule\[10\]=0: expected a number above 0"),
    ({"name": "fixed", "threshold": 1, "schedule": {"10": "2"}}, r"schedule\[10\]='2': expected a number"),
    ({"name": "fixed", "threshold": 1, "schedule": {-1: 1}}, r"schedule: -1 is no step"),
    ({"name": "fixed", "threshold": 1, "schedule": {"1.5": 1}}, r"schedule: '1.5' is no step"),
    ({"name": "fixed", "threshold": 1, "schedule": {True: 1}}, r"schedule: True is no step"),
    ({"name": "fixed", "threshold": 1, "schedule": {"10": 1, 10: 2}}, r"schedule: step 10 is given twice"),
    ({"name": "fixed", "threshold": 1, "schedule": [1, 2]}, r"schedule=\[1, 2\]: expected a mapping"),
    ({"name": "fixed", "threshold": 1, "schedule": {}}, r"schedule=\{\}: expected a mapping"),
    ({"name": "fixed", "threshold": 1, "calibrated_for": 512}, r"calibrated_for=512: expected a mapping"),
    ({"class_path": "Halfway"}, r"class_path='Halfway': expected the whole path"),
    ({"class_path": "tests.nowhere.Rule"}, r"class_path='tests.nowhere.Rule' cannot be imported \(No module"),
    ({"class_path": f"{OWN}.Nothing"}, r"cannot be imported \(module .* has no attribute 'Nothing'"),
    ({"class_path": "torch.nn.Linear"}, r"is no subclass of stabilizer.thresholds.ThresholdRule"),
    ({"class_path": f"{OWN}.Halfway"}, r"Halfway needs factor"),
    ({"class_path": f"{OWN}.Halfway", "init_args": {"factor": 0.5}}, r"Halfway: factor=0.5: expected more than 1"),
    ({"class_path": f"{OWN}.Halfway", "init_args": {"factr": 2}}, r"'factr' is no argument.*closest is factor"),
    ({"class_path": f"{OWN}.Halfway", "factor": 2.0}, r"'factor' beside class_path.*init_args"),
    ({"class_path": f"{OWN}.Halfway", "init_args": [2]}, r"init_args=\[2\]: expected a mapping"),
    ({"class_path": f"{OWN}.Unfinished"}, r"Unfinished does not implement enter, thresholds"),
]


@pytest.mark.parametrize(("spec", "message"), MISTAKES, ids=[str(spec)[:60] for spec, _ in MISTAKES])
def test_a_mistake_is_one_error_that_says_what_is_allowed(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rule(spec)
    with pytest.raises(ValueError, match=message):
        LayerThresholds(["total"], rule=spec, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rules": {"block.*": "zscore", r"blocks\.7": "zscore"}},
            r"rules='blocks\\\\.7' matches none of the 5 layers",
        ),
        ({"rules": {"(": "zscore"}}, r"rules='\(' is no layer name and no regular expression"),
        ({"rules": {0: "zscore"}}, r"rules: 0 is no pattern"),
        ({"rules": {"embed": "zcore"}}, r"rule='zcore'.*zscore"),
        ({"min_norm": -1}, r"min_norm=-1: expected a number at least 0"),
        ({"min_norm": "0.1"}, r"min_norm='0.1'"),
        ({"warmup_cap": 0}, r"warmup_cap=0: expected a number above 0"),
        ({"warmup_cap": True}, r"warmup_cap=True"),
        ({"max_threshold": math.inf}, r"max_threshold=inf"),
        ({"min_norm": 2.0, "max_threshold": 1.0}, r"min_norm=2.0: expected at most max_threshold, which is 1.0"),
    ],
)
def test_a_mistake_of_layers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerThresholds(NAMES, **{"rule": "robust_log", **options}, device="cpu")


def test_as_many_norms_as_layers() -> None:
    rule = MeanMultiple()
    rule.start(3, device="cpu")
    with pytest.raises(ValueError, match=re.escape("norms have shape (2,): expected (3,), one a layer")):
        rule.update(torch.ones(2))
