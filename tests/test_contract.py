"""What every callback promises on every host. A new one is found here the day it is exported."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import stabilizer.callbacks
from stabilizer import tags
from stabilizer.callbacks import DrillCallback, GradLocCallback, StabilizerCallback
from stabilizer.errors import StabilizerWarning
from tests.contract_hosts import EPOCH, HOSTS, Host, OutOfDataError, make_host
from tests.launcher import run_distributed
from tests.lightning_models import make_module, make_trainer
from tests.states import Copier, same

CALLBACKS = [
    value
    for name in stabilizer.callbacks.__all__
    if inspect.isclass(value := getattr(stabilizer.callbacks, name)) and issubclass(value, StabilizerCallback)
]
COMMON = {"layers": None, "exclude": (), "granularity": "block", "name": "", "strict": False}
#: Every step is searched.
SEARCHING: dict[str, Any] = {
    "rule": {"name": "fixed", "threshold": 1e-6},
    "warmup_steps": 0,
    "cooldown_steps": 0,
    "tap": "model.lm_head",
    "position_map": "never",
}
#: Two ranks: what the launcher's process group serves.
SPREAD_HOSTS = ("lightning.pytorch", "accelerate", "plain")

pytestmark = pytest.mark.parametrize("kind", CALLBACKS, ids=lambda kind: kind.__name__)
on_every_host = pytest.mark.parametrize("host_name", HOSTS)
#: Both packages of Lightning are served by the same lines: the second one's long row of tests is among the slow ones.
_ROW = [pytest.param(name, marks=pytest.mark.slow) if name == "pytorch_lightning" else name for name in HOSTS]
on_hosts = pytest.mark.parametrize("host_name", _ROW)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These loggers have no folder: what goes to files goes to the current one."""
    monkeypatch.chdir(tmp_path)


def _is_known(tag: str) -> bool:
    """A tag, one with the name of a layer behind it, or one with the length of a window."""
    return any(re.fullmatch(rf"{re.escape(known)}(/.+|_\d+)?", tag) for known in tags.ALL_TAGS)


def _host(kind: Any, name: str, **options: Any) -> Host:
    """With two micro-batches a step for those that compare them."""
    return make_host(name, num_micro_batches=1 if kind().parts_every_n_steps is None else 2, **options)


def _busy(kind: Any, **options: Any) -> Any:
    """One that logs all it can at every step, or at every n-th."""
    every = options.pop("every_n_steps", 1)
    names = list(inspect.signature(kind).parameters)
    # Pictures take their time, and no number comes from them.
    intervals = {name: every for name in names if name.endswith("every_n_steps") and "heatmap" not in name}
    if issubclass(kind, GradLocCallback):
        return kind(**intervals, **{**SEARCHING, **options})
    if issubclass(kind, DrillCallback):
        return kind(**intervals, faults=[{"kind": "learning_rate_jump", "step": 10**6}], **options)
    return kind(**intervals, **{name: 1 for name in names if name == "warmup_steps"}, **options)


def _often(kind: Any) -> dict[str, int]:
    """Looks at every step, and logs what it logs then."""
    return {name: 1 for name in ("every_n_steps", "log_every_n_steps") if name in inspect.signature(kind).parameters}


def _observing(kind: Any) -> dict[str, Any]:
    """What lets it leave the training alone: nothing for those that measure, a mode of those that clip."""
    return {"mode": "observe"} if "mode" in inspect.signature(kind).parameters else {}


def _equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_arguments_are_keywords_with_the_common_ones(kind: Any) -> None:
    parameters = dict(inspect.signature(kind).parameters)
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert {name: parameters[name].default for name in COMMON} == COMMON
    assert "every_n_steps" in parameters
    for name in parameters:
        assert f"{name}: " in (kind.__doc__ or ""), f"{name} is not documented"


def test_is_a_callback_of_both_packages(kind: Any) -> None:
    import lightning.pytorch
    import pytorch_lightning

    assert issubclass(kind, lightning.pytorch.Callback)
    assert issubclass(kind, pytorch_lightning.Callback)


@on_every_host
def test_trains_and_changes_nothing_while_it_observes(kind: Any, host_name: str) -> None:
    """The weights are those of a run without the callback, bit for bit."""
    host, weights = _host(kind, host_name), []
    for callbacks in ([], [kind(**_observing(kind))]):
        weights.append(host.train(callbacks, num_steps=6))
        assert [callback.next_step() for callback in callbacks] == [6] * len(callbacks)
    assert _equal_weights(*weights)


def test_logs_the_same_numbers_at_the_same_steps_on_every_host(kind: Any) -> None:
    logged = {}
    for name in HOSTS:
        host = _host(kind, name)
        host.train([_busy(kind, every_n_steps=2)], num_steps=6)
        logged[name] = host.points
    expected = logged.pop(HOSTS[0])
    assert bool(expected) == (kind is not StabilizerCallback), "nothing was logged: the test says nothing"
    for name, points in logged.items():
        assert points == expected, name


@on_hosts
def test_two_of_a_kind_live_side_by_side(kind: Any, host_name: str) -> None:
    host = _host(kind, host_name)
    options = _observing(kind)  # two that clip would see one another's gradients
    host.train([_busy(kind, **options), _busy(kind, name="again", **options)], num_steps=4)
    ours = {key: value for key, value in host.points.items() if not key[0].startswith("again/")}
    again = {(f"again/{tag}", step): value for (tag, step), value in ours.items()}
    assert {**ours, **again} == host.points
    assert [tag for tag, _ in ours if not _is_known(tag)] == [], "add it to tags.py"


@on_hosts
def test_state_goes_round(kind: Any, host_name: str, tmp_path: Path) -> None:
    callback = kind()
    fresh = callback.state_dict()
    _host(kind, host_name).train([callback])
    assert callback.next_step() == 3
    for state in (fresh, callback.state_dict()):
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        other = kind()
        other.load_state_dict(loaded)
        assert same(other.state_dict(), state)


@pytest.mark.parametrize("is_busy", [False, True])
@on_hosts
def test_a_resumed_run_is_the_uninterrupted_one(kind: Any, host_name: str, is_busy: bool, tmp_path: Path) -> None:
    """Bit for bit: weights, states and logged rows. A run that ends may log more at its end."""
    # What is counted in the first step of a run is not searched: the local norms of it are not known.
    every = 2 if kind.localizes else 1
    host, make = _host(kind, host_name), functools.partial(_busy, kind, every_n_steps=every) if is_busy else kind
    whole, first, second = make(), make(), make()
    weights = host.train([whole], num_steps=2 * EPOCH)
    expected = host.points
    host.train([first], num_steps=EPOCH, save=tmp_path)
    before = host.points
    assert _equal_weights(host.train([second], num_steps=2 * EPOCH, load=tmp_path), weights)
    assert same(second.state_dict(), whole.state_dict())
    assert second.next_step() == 2 * EPOCH
    assert not before.keys() & host.points.keys(), "a step was logged twice"
    points = {**before, **host.points}
    assert {key: points.get(key) for key in expected} == expected
    assert {step for _, step in points.keys() - expected.keys()} <= {EPOCH - 1}


@on_hosts
def test_can_be_copied_and_pickled_at_any_time(kind: Any, host_name: str) -> None:
    callback = kind(every_n_steps=1)
    during, after = Copier(callback), Copier(callback)
    _host(kind, host_name).train([callback, during])
    after.on_step_end(None)  # type: ignore[arg-type]
    assert len(during.states) == 3
    for state, *copies in (*during.states, *after.states):
        assert all(same(made, state) for made in copies)


@on_hosts
def test_ends_more_than_once(kind: Any, host_name: str) -> None:
    host, callback = _host(kind, host_name), kind()
    host.train([callback])
    state, points = callback.state_dict(), host.points
    host.end_again([callback])
    assert same(callback.state_dict(), state)
    assert host.points == points


def test_other_stages_than_fit_are_none_of_its_business(kind: Any) -> None:
    callback = kind(layers=[99])  # would be refused in a fit
    trainer = make_trainer(callbacks=[callback], limit_val_batches=1)
    trainer.validate(make_module("transformer"), verbose=False)
    assert callback.next_step() == 0


@on_hosts
def test_an_exception_in_the_loop_leaves_all_rows_written(kind: Any, host_name: str) -> None:
    host, whole, callback = _host(kind, host_name), _busy(kind), _busy(kind)
    host.train([whole], num_steps=2)
    expected = host.points
    with pytest.raises(OutOfDataError):
        host.train([callback], breaks_at=2)
    assert host.points == expected
    assert callback.next_step() == 2
    assert same(callback.state_dict(), whole.state_dict())
    host.train([callback])
    assert callback.next_step() == 5, "it does not go on"


def _failing(kind: Any, **options: Any) -> Any:
    def on_gradients(self: Any, context: Any) -> None:
        kind.on_gradients(self, context)
        if context.step == 1:
            raise RuntimeError("a fault of ours")

    failing = type("Failing", (kind,), {"on_gradients": on_gradients})
    return failing(**_often(kind), **_observing(kind), **options)


@on_hosts
def test_its_failure_does_not_end_the_run(kind: Any, host_name: str, caplog: pytest.LogCaptureFixture) -> None:
    host = _host(kind, host_name)
    weights = host.train([])
    callback, sound = _failing(kind), kind(name="sound", **_often(kind), **_observing(kind))
    with caplog.at_level(logging.ERROR, "stabilizer"):
        assert _equal_weights(host.train([callback, sound]), weights)
    [record] = [record for record in caplog.records if record.name.startswith("stabilizer")]
    assert record.getMessage().startswith("Failing.on_gradients failed at step 1")
    assert callback.has_failed
    assert not sound.has_failed
    assert sound.next_step() == 3
    own = {step for tag, step in host.points if not tag.startswith("sound/")}
    assert own <= {0, 1}
    assert {step for tag, step in host.points if tag.startswith("sound/")} == ({0, 1, 2} if own else set())


@on_hosts
def test_its_failure_ends_the_run_if_it_is_strict(kind: Any, host_name: str) -> None:
    host = _host(kind, host_name)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        host.train([_failing(kind, strict=True)])
    assert {step for _, step in host.points} <= {0, 1}


@on_hosts
def test_the_environment_turns_it_off(kind: Any, host_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, callback = _host(kind, host_name), kind(every_n_steps=1)
    weights = host.train([])
    fresh = callback.state_dict()
    monkeypatch.setenv("STABILIZER_DISABLE", "1")
    with pytest.warns(StabilizerWarning, match=f"STABILIZER_DISABLE is set: {kind.__name__} do nothing"):
        assert _equal_weights(host.train([callback]), weights)
    assert host.points == {}
    assert same(callback.state_dict(), fresh)


def _spread(rank: int, world_size: int, kind: Any, host_name: str) -> tuple[Any, Any, Any]:
    host = _host(kind, host_name, rank=rank, num_ranks=world_size)
    callback = _busy(kind, **_observing(kind))
    plain, weights = host.train([]), host.train([callback])
    assert _equal_weights(plain, weights), "the callback changed the weights"
    return weights, callback.state_dict(), host.points


def test_two_processes_decide_alike_and_one_of_them_logs(kind: Any) -> None:
    logged = {}
    for name in SPREAD_HOSTS:
        (weights, state, logged[name]), (others, other, silence) = run_distributed(_spread, kind, name)
        assert _equal_weights(weights, others)
        assert same(state, other)
        assert state["steps"] == {"0": 3}
        assert silence == {}
    expected = logged.pop(SPREAD_HOSTS[0])
    assert {step for _, step in expected} == (set() if kind is StabilizerCallback else {0, 1, 2})
    for name, points in logged.items():
        assert points == pytest.approx(expected, rel=1e-6), name
