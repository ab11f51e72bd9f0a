"""Bad arguments of the clips: one error before the first step, that says what is wrong and what is allowed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, load_callbacks
from tests.clip_loops import HandLoop, fixed
from tests.lightning_models import make_module, make_trainer

NO_NUMBERS: list[Any] = [-1.0, math.nan, math.inf, "1.0", True]
VERBS = "ignore, clip, zero_layer, skip_step, raise"

BOTH: list[tuple[dict[str, Any], str]] = [
    *(({"warmup_cap": value}, f"warmup_cap={value!r}: expected a number above 0") for value in [0, *NO_NUMBERS]),
    *(({"rule": fixed(value)}, f"threshold={value!r}: expected a number above 0") for value in [0, *NO_NUMBERS]),
    *(
        ({"max_consecutive_skips": value}, f"max_consecutive_skips={value!r}: expected a whole number")
        for value in (0, -1, 1.5, "5", True)
    ),
    *(({"every_n_steps": value}, f"every_n_steps={value!r}: expected a whole number") for value in (0, -1, 0.5, True)),
    ({"mode": "watch"}, "mode='watch': allowed are act, observe"),
    ({"mode": True}, "mode=True: allowed are act, observe"),
    ({"on_spike": "skip"}, f"on_spike='skip': allowed are {VERBS}"),
    ({"on_spike": None}, f"on_spike=None: allowed are {VERBS}"),
    ({"on_nonfinite": "clip"}, "on_nonfinite='clip': allowed are ignore, zero_layer, skip_step, raise"),
    ({"rule": "robustlog"}, "rule='robustlog': expected one of robust_log"),
    ({"rule": "robustlog"}, "the closest is robust_log"),
    ({"rule": 1.0}, "rule=1.0: expected a name"),
    ({"rule": {"name": "robust_log", "kk": 4.0}}, "'kk' is no argument; known are k"),
    ({"rule": {"name": "robust_log", "k": "4"}}, "k='4': expected a number above 0"),
    ({"rule": {"name": "mean_multiple", "k": 50}}, "k=50: expected a number at least 3 and at most 10"),
    ({"rule": {"class_path": "no.such.Rule"}}, "class_path='no.such.Rule' cannot be imported"),
    ({"rule": {"class_path": "torch.nn.Linear"}}, "class_path='torch.nn.Linear' is no subclass"),
]
LAYERS: list[tuple[dict[str, Any], str]] = [
    *(({"min_norm": value}, f"min_norm={value!r}: expected a number at least 0") for value in NO_NUMBERS),
    *(
        ({"clip_value": {"a": value}}, f"clip_value['a']={value!r}: expected a number above 0")
        for value in [0, *NO_NUMBERS]
    ),
    *(({"clip_value": value}, f"clip_value={value!r}: expected a mapping") for value in ({}, 0.1, ["a"], True)),
    ({"rules": {"a": "fixd"}}, "the closest is fixed"),
    ({"rules": {"a": "fixed"}}, "rule fixed needs threshold"),
]
TOTAL: list[tuple[dict[str, Any], str]] = [
    *(({"max_threshold": value}, f"max_threshold={value!r}: expected a number above 0") for value in [0, *NO_NUMBERS]),
    ({"on_spike": "zero_layer"}, "the total belongs to no layer; allowed are clip, skip_step, raise and ignore"),
]
CASES = [
    *((kind, options, message) for kind in (LayerClipCallback, AdaptiveClipThreshold) for options, message in BOTH),
    *((LayerClipCallback, options, message) for options, message in LAYERS),
    *((AdaptiveClipThreshold, options, message) for options, message in TOTAL),
]


@pytest.mark.parametrize(("kind", "options", "message"), CASES, ids=lambda value: str(value)[:60])
def test_where_it_is_made(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**options)


PATTERNS: list[tuple[dict[str, Any], str]] = [
    ({"rules": {"layer_1": fixed(1.0)}}, "rules='layer_1' matches none of the 2 layers"),
    ({"rules": {"layer": fixed(1.0)}}, "rules='layer' matches none"),  # not a whole name
    ({"rules": {"(": fixed(1.0)}}, "rules='(' is no layer name and no regular expression"),
    ({"clip_value": {"c": 1.0}}, "clip_value='c' matches none of the 2 layers"),
    ({"layers": ["c"]}, "layers='c' matches none of the 2 layers"),
    ({"exclude": ["a", "b"]}, "matches none of the 2 layers"),
    # Of a layer that is excluded.
    ({"exclude": ["layer_b"], "rules": {"layer_b": fixed(1.0)}}, "rules='layer_b' matches none of the 1 layers"),
]


@pytest.mark.parametrize(("options", "message"), PATTERNS, ids=[message for _, message in PATTERNS])
def test_patterns_that_match_nothing_before_the_first_step(options: dict[str, Any], message: str) -> None:
    loop = HandLoop(LayerClipCallback(rule=fixed(1.0), **options), layer_a=2, layer_b=3)
    with pytest.raises(ValueError, match=re.escape(message)):
        loop.__enter__()


def test_patterns_that_match_nothing_in_a_trainer() -> None:
    module = make_module("transformer")
    callback = LayerClipCallback(rules={"model.head": fixed(1.0)})
    with pytest.raises(ValueError, match=r"rules='model.head' matches none .* the closest: \['model.lm_head'"):
        make_trainer(callbacks=[callback]).fit(module)
    assert module.losses == []


FILES: list[tuple[str, str]] = [
    ("layer_clip: {rule: {name: robust_log, k: '4'}}", "layer_clip"),
    ("layer_clip: {rule: robustlog}", "layer_clip"),
    ("layer_clip: {min_norm: -1}", "layer_clip"),
    ("layer_clip: {min_norm: .nan}", "layer_clip"),
    ("layer_clip: {warmup_cap: 0}", "layer_clip"),
    ("layer_clip: {warmup_cap: '1.0'}", "layer_clip.warmup_cap"),
    ("layer_clip: {warmup_cap: true}", "layer_clip.warmup_cap"),
    ("layer_clip: {mode: watch}", "layer_clip.mode"),
    ("layer_clip: {on_spike: skip}", "layer_clip.on_spike"),
    ("layer_clip: {on_nonfinite: clip}", "layer_clip.on_nonfinite"),
    ("layer_clip: {clip_value: {}}", "layer_clip"),
    ("layer_clip: {clip_value: 0.1}", "layer_clip.clip_value"),
    ("layer_clip: {max_consecutive_skips: 0}", "layer_clip"),
    ("layer_clip: {every_n_steps: true}", "layer_clip.every_n_steps"),
    ("layer_clip: {warm_cap: 1.0}", "layer_clip.warm_cap"),
    ("adaptive_clip: {on_spike: zero_layer}", "adaptive_clip"),
    ("adaptive_clip: {max_threshold: -1.0}", "adaptive_clip"),
    ("adaptive_clip: {rules: {a: fixed}}", "adaptive_clip.rules"),
    ("adaptive_clip: {rule: {name: fixed, threshold: 0}}", "adaptive_clip"),
]


@pytest.mark.parametrize(("content", "where"), FILES, ids=[content for content, _ in FILES])
def test_in_a_file_with_its_name_and_the_key(content: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "stabilizer.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: {re.escape(where)}\b") as caught:
        load_callbacks(path)
    assert "\n" not in str(caught.value)
