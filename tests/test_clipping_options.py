"""The arguments of the clips: which layers, how finely cut, between which limits, and rules of a user's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, attach, load_callbacks
from stabilizer.names import layer_names
from stabilizer.thresholds import ThresholdRule
from tests.clip_loops import HandLoop, fixed, norms_of
from tests.clip_reference import clip, worst_error
from tests.lightning_models import PACKAGES
from tests.models import loss_of, make_transformer, reference_gradients, token_batch
from tests.spread import whole_gradients
from tests.test_lightning_cli import make_cli, ours, write
from tests.tiny_loops import no_log

SIZES = {"a": 3, "b": 5, "ab": 2}


def clipped(callback: LayerClipCallback | AdaptiveClipThreshold, *steps: dict[str, float]) -> dict[str, float]:
    """Norms that the last of some steps leaves."""
    with HandLoop(callback, **SIZES) as loop:
        for step in steps:
            received = loop.step(**step)
    return {name: round(norm, 5) for name, norm in norms_of(received).items()}


TEN = {"a": 10.0, "b": 10.0, "ab": 10.0}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (None, {"a": 1.0, "b": 1.0, "ab": 1.0}),
        ({"b": fixed(2.0)}, {"a": 1.0, "b": 2.0, "ab": 1.0}),
        # An expression fits the whole name, and the first that fits counts.
        ({"a.*": fixed(3.0)}, {"a": 3.0, "b": 1.0, "ab": 3.0}),
        ({"a": fixed(2.0), "a.*": fixed(3.0), ".*": fixed(4.0)}, {"a": 2.0, "b": 4.0, "ab": 3.0}),
        ({"a.*": fixed(3.0), "a": fixed(2.0)}, {"a": 3.0, "b": 1.0, "ab": 3.0}),
    ],
)
def test_rules(rules: Any, expected: dict[str, float]) -> None:
    assert clipped(LayerClipCallback(rule=fixed(1.0), rules=rules, strict=True), TEN) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"layers": ["a"]}, {"a": 1.0, "b": 10.0, "ab": 10.0}),
        ({"layers": [".*b"]}, {"a": 10.0, "b": 1.0, "ab": 1.0}),
        ({"exclude": ["a"]}, {"a": 10.0, "b": 1.0, "ab": 1.0}),
        ({"layers": ["a.*"], "exclude": ["ab"]}, {"a": 1.0, "b": 10.0, "ab": 10.0}),
        ({"exclude": ["ab"], "rules": {"b": fixed(2.0)}}, {"a": 1.0, "b": 2.0, "ab": 10.0}),
        ({"min_norm": 2.5}, {"a": 2.5, "b": 2.5, "ab": 2.5}),
        ({"min_norm": 0.5}, {"a": 1.0, "b": 1.0, "ab": 1.0}),
    ],
)
def test_which_layers_and_from_where_on(options: dict[str, Any], expected: dict[str, float]) -> None:
    callback = LayerClipCallback(rule=fixed(1.0), strict=True, **options)
    assert clipped(callback, TEN) == expected


MULTIPLE = {"name": "mean_multiple", "k": 3.0, "warmup_steps": 2}
ONE = dict.fromkeys(SIZES, 1.0)


def test_a_layer_without_a_threshold_is_left_alone_or_capped() -> None:
    free, capped = [LayerClipCallback(rule=MULTIPLE, warmup_cap=cap, strict=True) for cap in (None, 4.0)]
    assert clipped(free, TEN) == TEN
    assert clipped(capped, TEN) == dict.fromkeys(SIZES, 4.0)
    # What was capped has entered as it was.
    assert clipped(capped, TEN, dict.fromkeys(SIZES, 100.0)) == pytest.approx(dict.fromkeys(SIZES, 30.0))


def test_cap_and_largest_threshold_of_the_total() -> None:
    total = math.sqrt(3.0)
    for options, first, later in (({}, 1.0, 3 * total), ({"warmup_cap": None}, math.inf, 3 * total)):
        callback = AdaptiveClipThreshold(rule=MULTIPLE, strict=True, **options)
        found = clipped(callback, TEN)
        assert math.hypot(*found.values()) == pytest.approx(min(first, 10 * total), rel=1e-4)
        callback = AdaptiveClipThreshold(rule=MULTIPLE, strict=True, **options)
        assert math.hypot(*clipped(callback, ONE, ONE, TEN).values()) == pytest.approx(later, rel=1e-4)
    callback = AdaptiveClipThreshold(rule=MULTIPLE, max_threshold=2.0, strict=True)
    assert math.hypot(*clipped(callback, ONE, ONE, TEN).values()) == pytest.approx(2.0, rel=1e-4)


def _transformer_gradients(callback: LayerClipCallback) -> dict[str, Tensor | None]:
    model = make_transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=no_log):
        loss_of(model, token_batch()).backward()
        optimizer.step()
    return whole_gradients(model)


@pytest.mark.parametrize("granularity", ["block", "module", "parameter", {r"layers\.(\d+)\.attention\.": r"attn.\1"}])
def test_granularity(granularity: Any) -> None:
    limit = 0.3
    found = _transformer_gradients(LayerClipCallback(rule=fixed(limit), granularity=granularity, strict=True))
    raw = reference_gradients(make_transformer(), [token_batch()])
    layers = dict(zip(raw, layer_names(list(raw), granularity), strict=True))
    expected = clip(raw, layers.__getitem__, layer_limits=dict.fromkeys(layers.values(), limit))
    assert min(expected.coefficients.values()) < 1
    assert worst_error(found, expected.gradients) < 1e-5


def test_numbers_of_blocks() -> None:
    """Only the first block and the last one."""
    found = _transformer_gradients(LayerClipCallback(rule=fixed(0.1), layers=[0, -1], strict=True))
    raw = reference_gradients(make_transformer(), [token_batch()])
    layers = dict(zip(raw, layer_names(list(raw)), strict=True))
    expected = clip(raw, layers.__getitem__, layer_limits={"layers.0": 0.1, "layers.3": 0.1})
    assert worst_error(found, expected.gradients) < 1e-5


class Doubled(ThresholdRule):
    """A rule of one's own: so many times the largest norm so far."""

    warmup_steps = 1
    largest: Tensor

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def allocate(self, num_layers: int) -> None:
        """One number a layer."""
        self.add_state("largest", torch.zeros(num_layers, dtype=self.dtype))

    def thresholds(self, norms: Tensor) -> Tensor:
        """Of layers that have been seen."""
        return torch.where(self.is_warm, self.factor * self.largest, torch.inf).float()

    def enter(self, norms: Tensor, accepted: Tensor) -> None:
        """Keep the largest."""
        self.largest.copy_(torch.where(accepted, torch.maximum(self.largest, norms), self.largest))


OWN = {"class_path": f"{__name__}.Doubled", "init_args": {"factor": 1.5}}
OWN_YAML = f"{{class_path: {__name__}.Doubled, init_args: {{factor: 1.5}}}}"


def _check_own(callbacks: list[Any]) -> None:
    layers, total = callbacks
    assert clipped(layers, ONE, TEN) == dict.fromkeys(SIZES, 1.5)
    assert math.hypot(*clipped(total, ONE, TEN).values()) == pytest.approx(1.5 * math.sqrt(3.0), rel=1e-4)
    assert "Doubled(factor=1.5)" in layers.hyperparameters()["rule"]


@pytest.mark.parametrize("rule", [OWN, Doubled(1.5)], ids=["path", "object"])
def test_a_rule_of_one_s_own_from_code(rule: Any) -> None:
    _check_own([kind(rule=rule, strict=True, warmup_cap=None) for kind in (LayerClipCallback, AdaptiveClipThreshold)])


def test_a_rule_of_one_s_own_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stabilizer.yaml"
    arguments = f"{{rule: {OWN_YAML}, warmup_cap: null, strict: true}}"
    path.write_text(f"layer_clip: {arguments}\nadaptive_clip: {arguments}\n")
    _check_own(load_callbacks(path))


def test_rules_of_layers_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stabilizer.yaml"
    path.write_text(
        "layer_clip:\n  rule: {name: fixed, threshold: 1.0}\n"
        f"  rules: {{'a.+': {{name: fixed, threshold: 2}}, b: {OWN_YAML}}}\n  min_norm: 0\n  strict: true\n"
    )
    [callback] = load_callbacks(path)
    assert isinstance(callback, LayerClipCallback)
    assert clipped(callback, ONE, TEN) == {"a": 1.0, "b": 1.5, "ab": 2.0}


CLI = f"""
trainer:
  callbacks:
    - class_path: stabilizer.callbacks.LayerClipCallback
      init_args:
        rule: {OWN_YAML}
        rules: {{a: {{name: fixed, threshold: 0.5}}, ab: mean_multiple}}
        warmup_cap: null
    - class_path: stabilizer.callbacks.AdaptiveClipThreshold
      init_args: {{rule: {OWN_YAML}, warmup_cap: 7, on_spike: clip}}
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_rules_through_lightning_s_command_line(package: str, tmp_path: Path) -> None:
    layers, total = ours(make_cli(package, write(tmp_path, a=CLI)))
    assert isinstance(layers, LayerClipCallback)
    assert isinstance(total, AdaptiveClipThreshold)
    found = clipped(layers, ONE, TEN)
    assert found == {"a": 0.5, "b": 1.5, "ab": 10.0}
    assert math.hypot(*clipped(total, TEN).values()) == pytest.approx(7.0, rel=1e-4)
    name = "--trainer.callbacks=stabilizer.callbacks.LayerClipCallback"
    [short] = ours(make_cli(package, [name, "--trainer.callbacks.rule=quantile"]))
    assert isinstance(short, LayerClipCallback)
    assert short.rule == "quantile"
