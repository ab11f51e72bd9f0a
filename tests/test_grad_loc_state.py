"""GradLoc's arguments from files and command lines, and what it is worth after a copy, a resume, or switched off."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from stabilizer.callbacks import GradLocCallback, StabilizerCallback
from stabilizer.errors import StabilizerWarning
from tests.lightning_models import PACKAGES
from tests.localize_loops import Fault, Plan, run
from tests.models import make_transformer
from tests.states import same
from tests.test_config import load
from tests.test_grad_loc_identity import expected, make_callback, summary
from tests.test_lightning_cli import make_cli, ours, write

FAULTS = (Fault(12, ((0, 0, 1, 3),)), Fault(18, ((0, 1, 1, 2),)))
PLAN = Plan(steps=22, faults=FAULTS, micro_batches=2, rows=2, length=6)
ARGUMENTS: dict[str, Any] = {
    "trigger_ratio": 4.5,
    "rule": {"name": "robust_log", "k": 4.0},
    "warmup_steps": 7,
    "max_probes": 9,
    "max_seconds": 2.5,
    "cooldown_steps": 3,
    "reproduce_tol": 0.02,
    "on_found": "drop_tokens",
    "position_map": "never",
    "tap": "head",
    "every_n_steps": 2,
}
BAD = {
    "on_found: drop": 'grad_loc.on_found=\'drop\': expected "report", "drop_tokens" or "skip_step"',
    "position_map: sometimes": 'grad_loc.position_map=\'sometimes\': expected "auto", "always" or "never"',
    "trigger_ratio: 1": "grad_loc.trigger_ratio=1.0: expected a number above 1",
    "max_probes: 1": "grad_loc.max_probes=1: expected a whole number of at least 2",
    "max_incidents: 0": "grad_loc.max_incidents=0: expected a whole number of at least 1",
    "max_seconds: 0": "grad_loc.max_seconds=0.0: expected a number above 0",
    "cooldown_steps: -1": "grad_loc.cooldown_steps=-1: expected a whole number of steps, at least 0",
    "tokenizer: gpt2": "grad_loc.tokenizer='gpt2': expected an object with decode(ids), as transformers' have",
    "redact: ids": "grad_loc.redact='ids': expected a list in which each item is text",
    "rule: robust": (
        "grad_loc.rule='robust': expected one of robust_log, mean_multiple, quantile, zscore, fixed; the closest is "
        "robust_log"
    ),
}


def train(*callbacks: StabilizerCallback, plan: Plan = PLAN) -> dict[str, torch.Tensor]:
    """A short run; its weights."""
    model = run(plan, callbacks, make_model=lambda: make_transformer(num_layers=2))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def half(first: int, last: int) -> Any:
    """The batches of some of the steps."""
    from tests.localize_loops import batches

    return lambda plan, rank: list(batches(plan, rank))[first:last]


@pytest.mark.parametrize("content", BAD)
def test_a_bad_value_in_a_file_is_told_what_is_allowed(content: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="grad_loc") as caught:
        load(tmp_path, f"grad_loc: {{{content}}}")
    assert str(caught.value) == f"{tmp_path / 'stabilizer.yaml'}: {BAD[content]}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"redact": "ids"}, r"redact='ids': expected a list, such as \['ids'\]"),
        ({"on_found": "drop"}, "on_found='drop': allowed are report, drop_tokens, skip_step"),
        ({"reproduce_tol": 0}, "reproduce_tol=0: expected a number above 0"),
        ({"tokenizer": object()}, "expected an object with decode"),
    ],
)
def test_a_bad_value_in_code(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradLocCallback(**options)


def assert_as_told(callback: StabilizerCallback) -> None:
    assert isinstance(callback, GradLocCallback)
    assert {name: getattr(callback, name) for name in ARGUMENTS} == ARGUMENTS


def test_a_file_gives_every_argument(tmp_path: Path) -> None:
    [callback] = load(tmp_path, yaml.safe_dump({"grad_loc": ARGUMENTS}))
    assert_as_told(callback)


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_cli_gives_every_argument(package: str, tmp_path: Path) -> None:
    entry = {"class_path": "stabilizer.callbacks.GradLocCallback", "init_args": ARGUMENTS}
    options = ["--trainer.callbacks=stabilizer.callbacks.GradLocCallback"]
    options += [
        f"--trainer.callbacks.{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in ARGUMENTS.items()
    ]
    for arguments in (write(tmp_path, a=yaml.safe_dump({"trainer": {"callbacks": [entry]}})), options):
        [callback] = ours(make_cli(package, arguments))
        assert_as_told(callback)
    with pytest.raises(SystemExit):
        make_cli(package, [options[0], "--trainer.callbacks.on_found=drop"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_used_one_goes_on(copied: Any, tmp_path: Path) -> None:
    """With the thresholds and the incidents of the first."""
    first = make_callback("triggered", tmp_path / "first")
    train(first)
    second = copied(first)
    assert same(second.state_dict(), first.state_dict())
    assert second.incidents == first.incidents
    assert second.incidents is not first.incidents
    for callback in (first, second):
        train(callback, plan=Plan(steps=3, faults=(Fault(2, FAULTS[0].bad),), micro_batches=2, rows=2, length=6))
    assert same(second.state_dict(), first.state_dict())
    assert summary(second) == summary(first)
    # The run goes on counting: its third step is the 25th.
    assert summary(first) == [*expected("triggered", FAULTS), (24, None, True, list(FAULTS[0].bad))]


def resumed(state: dict[str, Any], folder: Path, **options: Any) -> GradLocCallback:
    callback = make_callback("triggered", folder)
    for name, value in options.items():
        setattr(callback, name, value)
    callback.load_state_dict(state)
    return callback


def test_a_resume_has_the_same_thresholds(tmp_path: Path) -> None:
    """Those of the incident after it, too."""
    whole, first = make_callback("triggered", tmp_path), make_callback("triggered", tmp_path)
    train(whole)
    model: Any = None

    def make() -> Any:
        return make_transformer(num_layers=2) if model is None else model

    torch.manual_seed(0)
    model = run(PLAN, [first], make_model=make, make_batches=half(0, 15), make_optimizer=torch.optim.SGD)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = resumed(torch.load(tmp_path / "state.pt", weights_only=True), tmp_path)
    run(PLAN, [second], make_model=make, make_batches=half(15, 22), make_optimizer=torch.optim.SGD)
    uninterrupted = make_callback("triggered", tmp_path)
    model = None
    run(PLAN, [uninterrupted], make_model=make, make_optimizer=torch.optim.SGD)
    assert [one.step for one in second.incidents] == [18]
    assert second.incidents[0].threshold == uninterrupted.incidents[1].threshold
    assert second.incidents[0].observed_norm == uninterrupted.incidents[1].observed_norm
    assert same(second.state_dict(), uninterrupted.state_dict())


def test_a_resume_within_the_cooldown_does_not_search(tmp_path: Path) -> None:
    for cooldown, steps in ((5, [18]), (6, [])):
        first = make_callback("triggered", tmp_path)
        first.cooldown_steps = cooldown
        run(PLAN, [first], make_model=lambda: make_transformer(num_layers=2), make_batches=half(0, 15))
        second = resumed(first.state_dict(), tmp_path, cooldown_steps=cooldown)
        run(PLAN, [second], make_model=lambda: make_transformer(num_layers=2), make_batches=half(15, 22))
        assert [one.step for one in second.incidents] == steps


def test_a_resume_with_another_granularity_starts_its_layers_anew(tmp_path: Path) -> None:
    first = make_callback("triggered", tmp_path)
    run(PLAN, [first], make_model=lambda: make_transformer(num_layers=2), make_batches=half(0, 15))
    with pytest.warns(StabilizerWarning, match="granularity: 'block' -> 'module'"):
        second = resumed(first.state_dict(), tmp_path, granularity="module")
    run(PLAN, [second], make_model=lambda: make_transformer(num_layers=2), make_batches=half(15, 22))
    assert second.next_step() == 22
    # The total's threshold is still known.
    assert [one.step for one in second.incidents] == [18]


def test_two_runs_one_after_another(tmp_path: Path) -> None:
    """The second is a run of its own that knows what is usual."""
    callback = make_callback("triggered", tmp_path)
    train(callback)
    train(callback)
    assert summary(callback) == [
        entry
        for start in (0, PLAN.steps)
        for entry in expected("triggered", [Fault(start + fault.step, fault.bad) for fault in FAULTS])
    ]


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = make_callback("triggered", tmp_path)
    fresh, without = callback.state_dict(), train()
    monkeypatch.setenv("STABILIZER_DISABLE", "1")
    with pytest.warns(StabilizerWarning, match="STABILIZER_DISABLE is set: GradLocCallback do nothing"):
        assert same(train(callback), without)
    assert callback.incidents == []
    assert same(callback.state_dict(), fresh)
    assert list(tmp_path.iterdir()) == []
