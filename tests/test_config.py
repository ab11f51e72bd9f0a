"""Callbacks from YAML: what a good file gives, and the whole message of every bad one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradLocCallback,
    GradNormCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    load_callbacks,
    recommended,
)
from stabilizer.config import FEATURES, PRESETS
from stabilizer.errors import StabilizerWarning
from tests.environments import ROOT

FEATURE_NAMES = ", ".join(FEATURES)
GRAD_NORM_ARGUMENTS = (
    "enabled, every_n_steps, layer_every_n_steps, norm_type, max_abs_every_n_steps, heatmap_every_n_steps, history, "
    "progress_bar, layers, exclude, granularity, name, strict"
)

BY_PATH = "and functions by their import path"
ACTIONS = '"log", "record", "call", "save_checkpoint", "localize", "lower_lr", "stop"'


def settings(callback: StabilizerCallback) -> dict[str, Any]:
    """What a callback does, as far as its arguments say."""
    own = {"progress_bar": callback.progress_bar} if isinstance(callback, GradNormCallback) else {}
    return {**callback.hyperparameters(), "name": callback.name, "strict": callback.strict, **own}


def load(folder: Path, content: str | bytes) -> list[StabilizerCallback]:
    path = folder / "stabilizer.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_callbacks(path)


def same(found: list[StabilizerCallback], expected: list[StabilizerCallback]) -> bool:
    pairs = [[(type(one), settings(one)) for one in callbacks] for callbacks in (found, expected)]
    return pairs[0] == pairs[1]


GOOD: list[tuple[str, list[StabilizerCallback]]] = [
    ("grad_norm: true", [GradNormCallback()]),
    ("grad_norm: {}", [GradNormCallback()]),
    ("\ufeffgrad_norm: true\r\n", [GradNormCallback()]),
    ("--- \ngrad_norm: true\n...\n", [GradNormCallback()]),
    ("grad_norm: {enabled: true, every_n_steps: 3}", [GradNormCallback(every_n_steps=3)]),
    ("grad_norm: {every_n_steps: 3}\nloss_mean_var: false", [GradNormCallback(every_n_steps=3)]),
    ("grad_norm: {enabled: false}\nloss_mean_var: true", [LossMeanVarCallback()]),
    ("loss_mean_var: true\ngrad_norm: null\n", [LossMeanVarCallback()]),
    ("loss_mean_var: true\ngrad_norm: true\n", [GradNormCallback(), LossMeanVarCallback()]),
    ("grad_norm: {layers: [0, '0', -1, head]}", [GradNormCallback(layers=[0, "0", -1, "head"])]),
    ("grad_norm: {exclude: ['5', yes-no, 'off', '[a]']}", [GradNormCallback(exclude=["5", "yes-no", "off", "[a]"])]),
    (
        "grad_norm: {granularity: {attn: attention, '5': '7'}}",
        [GradNormCallback(granularity={"attn": "attention", "5": "7"})],
    ),
    ("grad_norm: {norm_type: inf}", [GradNormCallback(norm_type="inf")]),
    ("grad_norm: {norm_type: .inf}", [GradNormCallback(norm_type="inf")]),
    ("grad_norm: {layer_every_n_steps: null}", [GradNormCallback(layer_every_n_steps=None)]),
    ("grad_norm: {name: '12', strict: yes}", [GradNormCallback(name="12", strict=True)]),
    ("grad_norm: {name: 'text:1'}", [GradNormCallback(name="text:1")]),
    ("grad_norm: {name: 2020-01-01}", [GradNormCallback(name="2020-01-01")]),
    ("grad_norm: {name: '${HOME}'}", [GradNormCallback(name="${HOME}")]),
    ("loss_mean_var: {windows: [5, 50], on_alarm: []}", [LossMeanVarCallback(windows=(5, 50), on_alarm=())]),
    (
        "loss_mean_var: {on_alarm: [stop, record, {name: lower_lr, factor: 0.1}, builtins.print]}",
        [LossMeanVarCallback(on_alarm=["record", print, {"name": "lower_lr", "factor": 0.1}, "stop"])],
    ),
    (
        "loss_mean_var: {on_alarm: [{name: call, function: builtins.print}, {name: record, path: '5'}]}",
        [LossMeanVarCallback(on_alarm=[print, {"name": "record", "path": "5"}])],
    ),
    ("preset: safe", recommended()),
    ("preset: safe\ngrad_norm: true", recommended()),
    (
        "grad_norm: {every_n_steps: 7}\npreset: safe",
        [GradNormCallback(every_n_steps=7), LossMeanVarCallback(), AdaptiveClipThreshold(), GradLocCallback()],
    ),
    ("preset: safe\nloss_mean_var: false", [GradNormCallback(), AdaptiveClipThreshold(), GradLocCallback()]),
    (
        "preset: safe\ngrad_norm: {enabled: false}\ngrad_loc: {cooldown_steps: 5}",
        [LossMeanVarCallback(), AdaptiveClipThreshold(), GradLocCallback(cooldown_steps=5)],
    ),
    ("preset: safe\ngrad_loc: {enabled: false}", [GradNormCallback(), LossMeanVarCallback(), AdaptiveClipThreshold()]),
]


@pytest.mark.parametrize(("content", "expected"), GOOD, ids=[content for content, _ in GOOD])
def test_good_files(content: str, expected: list[StabilizerCallback], tmp_path: Path) -> None:
    assert same(load(tmp_path, content), expected)


BAD: list[tuple[str | bytes, str]] = [
    ("", f"the file is empty: expected features, such as grad_norm: true ({FEATURE_NAMES})"),
    ("# nothing\n", f"the file is empty: expected features, such as grad_norm: true ({FEATURE_NAMES})"),
    ("---\n", f"the file is empty: expected features, such as grad_norm: true ({FEATURE_NAMES})"),
    ("- grad_norm", "a list (['grad_norm']): expected a mapping, such as grad_norm: true"),
    ("grad_norm", "a single value ('grad_norm'): expected a mapping, such as grad_norm: true"),
    ("5", "a single value (5): expected a mapping, such as grad_norm: true"),
    ("a: [", "line 1, column 5: not YAML: expected the node content, but found '<stream end>'"),
    ("grad_norm: {\n  a: 1\nb: 2", "line 3, column 2: not YAML: expected ',' or '}', but got ':'"),
    ("grad_norm:\n\ta: 1", "line 2, column 1: not YAML: found character '\\t' that cannot start any token"),
    (b"\xff\xfe\x00", "byte 0xff at 0 is not UTF-8: expected a text file"),
    (b"grad_norm: \x00", "character 0x0 at 11: expected a text file"),
    ("[" * 21 + "]" * 21, "nested too deeply: expected features and their arguments"),
    ("a: 1\n---\nb: 1", "2 documents: expected one; remove the line of --- between them"),
    ("a: &x 1\nb: *x", "line 2, column 4: alias *x: expected the value itself, written out"),
    ("grad_norm:\n  <<: {a: 1}", "line 2: grad_norm: merge key <<: expected the keys themselves, written out"),
    (
        "grad_norm: !!python/object/apply:os.mkdir [made]",
        "line 1, column 12: tag 'tag:yaml.org,2002:python/object/apply:os.mkdir': expected plain values without tags",
    ),
    ("grad_norm: !!int '5'", "line 1, column 12: tag 'tag:yaml.org,2002:int': expected plain values without tags"),
    ("1: true", "line 1: key 1 is no text: expected a name, or quotes around it"),
    ("on: true", "line 1: key True is no text: expected a name, or quotes around it"),
    ("? [a]\n: 1", "line 1: key 'sequence' is no text: expected a name, or quotes around it"),
    (
        "grad_norm:\n  granularity: {a: b, 7: c}",
        "line 2: grad_norm.granularity: key 7 is no text: expected a name, or quotes around it",
    ),
    ("grad_norm: true\ngrad_norm: false", "line 2: key 'grad_norm' is there twice: expected it once"),
    (
        "grad_norm:\n  every_n_steps: 1\n  every_n_steps: 2",
        "line 3: grad_norm: key 'every_n_steps' is there twice: expected it once",
    ),
    (
        "grad_norm: {granularity: {a: b, a: c}}",
        "line 1: grad_norm.granularity: key 'a' is there twice: expected it once",
    ),
    ("preset: save", "preset='save': expected one of safe; the closest is safe"),
    ("preset: true", "preset=True: expected one of safe; the closest is safe"),
    ("gradnorm: true", f"gradnorm: unknown feature; known are {FEATURE_NAMES}, preset; the closest is grad_norm"),
    ("Preset: safe", f"Preset: unknown feature; known are {FEATURE_NAMES}, preset; the closest is preset"),
    ("grad_norm: 5", "grad_norm=5: expected true, false or a mapping of arguments"),
    ("grad_norm: [a]", "grad_norm=['a']: expected true, false or a mapping of arguments"),
    ("grad_norm: ${HOME}", "grad_norm='${HOME}': expected true, false or a mapping of arguments"),
    ("grad_norm: {enabled: maybe}", "grad_norm.enabled='maybe': expected true or false"),
    ("grad_norm: {enabled: null}", "grad_norm.enabled=None: expected true or false"),
    (
        "grad_norm: {every_n_step: 5}",
        f"grad_norm.every_n_step=5: unknown argument; known are {GRAD_NORM_ARGUMENTS}; the closest is every_n_steps",
    ),
    (
        "grad_norm: {self: 5}",
        f"grad_norm.self=5: unknown argument; known are {GRAD_NORM_ARGUMENTS}; the closest is exclude",
    ),
    ("grad_norm: {every_n_steps: often}", "grad_norm.every_n_steps='often': expected a whole number"),
    ("grad_norm: {every_n_steps: '5'}", "grad_norm.every_n_steps='5': expected a whole number"),
    ("grad_norm: {every_n_steps: 010}", "grad_norm.every_n_steps='010': expected a whole number"),
    ("grad_norm: {every_n_steps: 1.5}", "grad_norm.every_n_steps=1.5: expected a whole number"),
    ("grad_norm: {every_n_steps: true}", "grad_norm.every_n_steps=True: expected a whole number"),
    ("grad_norm: {every_n_steps: null}", "grad_norm.every_n_steps=None: expected a whole number"),
    ("grad_norm: {every_n_steps: {a: 1}}", "grad_norm.every_n_steps={'a': 1}: expected a whole number"),
    ("grad_norm: {every_n_steps: [1]}", "grad_norm.every_n_steps=[1]: expected a whole number"),
    ("grad_norm: {history: 1e3}", "grad_norm.history=1000.0: expected a whole number"),
    ("grad_norm: {layer_every_n_steps: x}", "grad_norm.layer_every_n_steps='x': expected null or a whole number"),
    ("grad_norm: {name: null}", "grad_norm.name=None: expected text"),
    ("grad_norm: {name: 5}", "grad_norm.name=5: expected text"),
    ("grad_norm: {progress_bar: 'yes'}", "grad_norm.progress_bar='yes': expected true or false"),
    ("grad_norm: {progress_bar: 1}", "grad_norm.progress_bar=1: expected true or false"),
    ("grad_norm: {exclude: head}", "grad_norm.exclude='head': expected a list in which each item is text"),
    (
        "grad_norm: {layers: [0, 1.5]}",
        "grad_norm.layers=[0, 1.5]: expected null or a list in which each item is a whole number or text",
    ),
    (
        "grad_norm: {granularity: blok}",
        'grad_norm.granularity=\'blok\': expected "block", "module", "parameter" or a mapping of text to text',
    ),
    (
        "grad_norm: {granularity: {a: 1}}",
        'grad_norm.granularity={\'a\': 1}: expected "block", "module", "parameter" or a mapping of text to text',
    ),
    (
        "loss_mean_var: {windows: [5, '6']}",
        "loss_mean_var.windows=[5, '6']: expected a list in which each item is a whole number",
    ),
    ("loss_mean_var: {weight: token}", 'loss_mean_var.weight=\'token\': expected "auto", "tokens" or "samples"'),
    (
        "loss_mean_var: {on_alarm: [lower_rl]}",
        f"loss_mean_var.on_alarm: 'lower_rl': allowed are {ACTIONS}, {BY_PATH}; the closest is lower_lr",
    ),
    (
        "loss_mean_var: {on_alarm: [{factor: 0.5}]}",
        f"loss_mean_var.on_alarm: {{'factor': 0.5}}: expected one of {ACTIONS}, a mapping with its name, or a function",
    ),
    (
        "loss_mean_var: {on_alarm: [{name: lower_lr, by: 0.5}]}",
        "loss_mean_var.on_alarm: lower_lr: 'by' is no argument; known are factor, num_steps",
    ),
    (
        "loss_mean_var: {on_alarm: [{name: lower_lr, factor: 2}]}",
        "loss_mean_var.on_alarm: lower_lr: factor=2: expected a number above 0 and below 1",
    ),
    ("grad_norm: {every_n_steps: 0}", "grad_norm.every_n_steps=0: expected a whole number of steps, at least 1"),
    (
        "grad_norm: {enabled: false, history: -1}",
        "grad_norm.history=-1: expected a whole number of steps, at least 1",
    ),
    ("grad_norm: {norm_type: 3}", 'grad_norm.norm_type=3: allowed are 2 and "inf"'),
    (
        "grad_norm: {granularity: {'(': a}}",
        "grad_norm.granularity: '(' is no regular expression (missing ), unterminated subpattern at position 0)",
    ),
    ("preset: safe\nloss_mean_var: {every_n_steps: x}", "loss_mean_var.every_n_steps='x': expected a whole number"),
    (f"grad_norm: {'x' * 500}", f"grad_norm='{'x' * 96}...: expected true, false or a mapping of arguments"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=[repr(content)[:50] for content, _ in BAD])
def test_bad_files(content: str | bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAD_NORM__EVERY_N_STEPS", "3")
    with pytest.raises(ValueError, match=r"stabilizer\.yaml: ") as caught:
        load(tmp_path, content)
    assert str(caught.value) == f"{tmp_path / 'stabilizer.yaml'}: {message}"
    assert [path.name for path in tmp_path.iterdir()] == ["stabilizer.yaml"]


@pytest.mark.parametrize(
    "content",
    [
        "grad_norm: false",
        "{}",
        "preset: safe\ngrad_norm: false\nloss_mean_var: null\nadaptive_clip: false\ngrad_loc: false",
    ],
)
def test_nothing_left_is_told_once(content: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load(tmp_path, content) == []
    told = [str(one.message) for one in caught if issubclass(one.category, StabilizerWarning)]
    path = tmp_path / "stabilizer.yaml"
    assert told == [f"{path}: every feature is off, so there are no callbacks; known features: {FEATURE_NAMES}"]


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        load_callbacks(tmp_path / "none.yaml")
    with pytest.raises(OSError, match=tmp_path.name):
        load_callbacks(str(tmp_path))


def test_environment_variables_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    for name in ("EVERY_N_STEPS", "GRAD_NORM__EVERY_N_STEPS", "PYTEST_EVERY_N_STEPS", "JSONARGPARSE_EVERY_N_STEPS"):
        monkeypatch.setenv(name, "9")
    assert same(load(tmp_path, "grad_norm: true"), [GradNormCallback()])


def test_every_call_makes_new_callbacks() -> None:
    first, second = recommended(), recommended()
    assert same(first, second)
    assert not {id(one) for one in first} & {id(one) for one in second}
    assert [type(one) for one in first] == [
        GradNormCallback,
        LossMeanVarCallback,
        AdaptiveClipThreshold,
        GradLocCallback,
    ]
    assert {name for preset in PRESETS.values() for name in preset} <= set(FEATURES)


@pytest.mark.parametrize("order", [("config", "callbacks"), ("callbacks", "config")])
def test_either_module_comes_first_and_loads_no_parser(order: tuple[str, str]) -> None:
    program = (
        f"import sys, stabilizer.{order[0]}, stabilizer.{order[1]}\n"
        "assert stabilizer.callbacks.load_callbacks is stabilizer.config.load_callbacks\n"
        "assert len(stabilizer.config.recommended()) == 4\n"
    )
    alone = f"import sys\nbefore = 'lightning' in sys.modules\nimport stabilizer.{order[0]}\n"
    # Lightning loads both itself, so it is hidden here; torchmetrics loads transformers, which loads one.
    hidden = (
        "import sys\nfor name in ('lightning', 'pytorch_lightning'): sys.modules[name] = None\n"
        "import torchmetrics\nfor name in ('yaml', 'jsonargparse'): sys.modules.pop(name, None)\n"
    )
    check = "assert not {'yaml', 'jsonargparse'} & sys.modules.keys(), sys.modules.keys()\n"
    for source in (program, hidden + alone + check):
        done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
