"""The alarms of LossMeanVarCallback in loops: when they come, what is told, what is left alone, and what is resumed."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import LossMeanVarCallback
from stabilizer.callbacks.loss_alarms import LossAlarm
from stabilizer.detectors import AlarmFolder, LossDetector
from stabilizer.errors import StabilizerWarning
from tests.loss_alarm_loops import BURST, NAN, Writer, healthy, play, summary, watcher, with_spikes
from tests.states import Copier, same
from tests.tiny_loops import Loop, told


def numbers_in(state: Any) -> list[float]:
    """All numbers in a state, however deep."""
    if isinstance(state, dict | list | tuple):
        return [n for value in (state.values() if isinstance(state, dict) else state) for n in numbers_in(value)]
    if isinstance(state, torch.Tensor):
        return [float(value) for value in state.flatten()]
    return [float(state)] if isinstance(state, int | float) else []


@pytest.mark.parametrize("host", ["plain", "accelerate"])
def test_a_burst_is_told_once_and_what_follows_is_folded(host: str) -> None:
    callback, writer = watcher("log"), Writer()
    with told() as messages:
        play(BURST, callback, log=writer, host=host)
    # The alarm at 110 stands for itself and for those at 81, 82 and 84.
    assert summary(callback) == [("jump", 80, 1), ("jump", 110, 4)]
    messages = [message for message in messages if "the loss jumped to 9" in message]
    assert [message.split(" (")[0] for message in messages] == [f"LossMeanVarCallback: step {n}" for n in (80, 110)]
    assert "stands for 4 such steps" in messages[-1]
    assert "it began at step 81" in messages[-1]
    assert [step for tag, step in writer.texts if tag == "alarm/text"] == [80, 110]
    assert "the loss jumped to 9" in writer.texts["alarm/text", 80]
    assert {step: round(value) for (tag, step), value in writer.scalars.items() if tag == "alarm/jump"} == {
        alarm.step: round(alarm.score) for alarm in callback.alarms
    }


def test_alarms_are_those_of_the_detectors_on_the_same_numbers() -> None:
    losses = with_spikes(healthy(400, seed=3), {70: 5.0, 200: 4.0, 201: 4.0}) + healthy(200, seed=4, level=3.5)
    callback = watcher(warmup_steps=60)
    play(losses, callback)
    detector, folder = LossDetector(window=60, short_window=20, warmup_steps=60), AlarmFolder(cooldown_steps=20)
    # A loss is a mean in float32.
    seen = [float(torch.tensor(loss)) for loss in losses]
    expected = [event for step, loss in enumerate(seen) for event in folder.fold(detector.update(step, loss))]
    assert len(expected) >= 3
    for alarm, event in zip(callback.alarms, expected, strict=True):
        assert (alarm.kind, alarm.step, alarm.count, alarm.first_step) == (
            event.kind,
            event.step,
            event.count,
            event.first_step,
        )
        assert (alarm.value, alarm.median, alarm.sigma) == pytest.approx((event.value, event.median, event.sigma))
        assert alarm.recent[-1] == (alarm.step, alarm.value)


def test_a_loss_that_is_not_finite_alarms_and_enters_nothing() -> None:
    losses = with_spikes(healthy(120), {3: NAN, 60: NAN, 61: math.inf, 90: -math.inf, 100: 9.0})
    callback = watcher(weight="samples")
    play(losses, callback)
    # During the warm-up too; infinity comes out as what it is: no number.
    assert summary(callback) == [("nonfinite", 3, 1), ("nonfinite", 60, 1), ("nonfinite", 90, 2), ("jump", 100, 1)]
    [first, *_] = callback.alarms
    assert math.isnan(first.value)
    assert math.isnan(first.recent[-1][1])
    state = callback.state_dict()["extra"]
    assert all(map(math.isfinite, numbers_in(state)))
    # All that is learned is what is learned without them.
    clean = [loss for loss in losses if math.isfinite(loss)]
    other = watcher(weight="samples")
    play(clean, other)
    mine, its = (one.state_dict()["extra"]["alerts"]["watches"]["0"]["detector"] for one in (callback, other))
    assert same(mine["baseline"], its["baseline"])
    assert same(mine["jump"]["tail"], its["jump"]["tail"])


def test_a_lasting_shift_is_accepted_and_a_spike_on_top_of_it_is_seen() -> None:
    losses = healthy(200) + with_spikes(healthy(300, seed=1, level=3.0), {200: 4.5})
    callback = watcher(cooldown_steps=0, warmup_steps=100, windows=(100, 1000))
    play(losses, callback)
    # One told as a jump at its first step, at each step until it is accepted, within 64; none after but the spike.
    steps = [alarm.step for alarm in callback.alarms if alarm.kind == "jump"]
    assert steps[0] == 200
    assert 230 <= max(step for step in steps if step < 400) < 264
    assert [step for step in steps if step >= 264] == [400]


def test_a_falling_loss_and_warm_up_alarm_nobody() -> None:
    callback = watcher(warmup_steps=100)
    play([1e9, 30.0, 3e4] + [8.0 * 0.97**step + 1 + 0.01 * (step % 7) for step in range(200)], callback)
    assert callback.alarms == ()


@pytest.mark.parametrize("cut", [20, 57, 80, 82, 90, 112])
def test_a_run_resumes_in_the_middle_of_everything(cut: int) -> None:
    """Windows, detectors, folding and lowered rates: bit for bit, with an optimizer that moves."""

    def run(values: list[float], state: Any = None) -> tuple[Any, list[LossAlarm]]:
        seen: list[LossAlarm] = []
        callback = watcher({"name": "lower_lr", "factor": 0.25, "num_steps": 12}, seen.append, name="a")
        loop = Loop(
            "plain", callback, optimizer=lambda weights: [torch.optim.SGD(weights, lr=1e-6, momentum=0.9)], log=Writer()
        )
        with loop:
            if state is not None:
                loop.model.load_state_dict(state[0])
                loop.optimizer.load_state_dict(state[1])
                loop.handle.load_state_dict(state[2])
            for value in values:
                loop.step(value)
            found = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict(), loop.handle.state_dict()))
        return found, seen

    whole, all_seen = run(BURST)
    first, seen = run(BURST[:cut])
    second, later = run(BURST[cut:], first)
    assert len(all_seen) == 2
    # The same events, and nothing else; a plain loop does not tell which batch it goes on with.
    plain = [[dataclasses.replace(alarm, batch_index=-1) for alarm in alarms] for alarms in (seen + later, all_seen)]
    assert plain[0] == plain[1]
    for one, other in zip(whole, second, strict=True):
        assert same(dict(one), dict(other))


def test_a_checkpoint_from_an_alarm_can_be_loaded_where_rates_are_not_lowered() -> None:
    lowering = watcher({"name": "lower_lr", "num_steps": 50})
    play(BURST[:90], lowering, log=Writer())
    callback = watcher("record", strict=True)
    with pytest.warns(StabilizerWarning, match="on_alarm: .* -> "):
        callback.load_state_dict(lowering.state_dict())
    play(healthy(5), callback)
    assert callback.next_step() == 95


def test_states_of_old_checkpoints_and_of_other_windows_are_taken() -> None:
    callback = watcher()
    play(BURST[:100], callback)
    state = callback.state_dict()
    old = copy.deepcopy(state)
    for key in ("alerts", "extremes"):
        del old["extra"][key]
    for saved, windows in ((old, (20, 60)), (state, (10, 30)), (state, (30, 200))):
        other = watcher(windows=windows)
        if windows == (20, 60):
            other.load_state_dict(saved)
        else:
            with pytest.warns(StabilizerWarning, match="windows"):
                other.load_state_dict(saved)
        play(with_spikes(healthy(120, seed=5), {115: 9.0}), other)
        assert ("jump", 215) in [(kind, step) for kind, step, _ in summary(other)], windows


def test_copies_hold_the_detectors_at_any_time() -> None:
    callback = watcher("log", {"name": "lower_lr", "num_steps": 30}, print)
    copier = Copier(callback)
    with told():
        play(BURST[:100], callback, copier)
    assert len(copier.states) == 100
    for state, *copies in copier.states[::9] + copier.states[78:86]:
        assert all(same(made, state) for made in copies)
    other = pickle.loads(pickle.dumps(callback))
    assert other.alarms == callback.alarms
    assert summary(other) == [("jump", 80, 1)]
    with told():
        play(BURST[100:], callback)
        play(BURST[100:], other)
    assert same(callback.state_dict(), other.state_dict())
    assert summary(other)[-1] == ("jump", 110, 4)


def test_two_callbacks_and_two_optimizers_watch_apart() -> None:
    slow, fast = watcher(cooldown_steps=200), watcher(cooldown_steps=5, name="fast")
    writer = Writer()
    losses = BURST

    def two(weights: Any) -> list[torch.optim.Optimizer]:
        [weight] = weights
        return [torch.optim.SGD([weight], lr=0.0), torch.optim.Adam([weight], lr=0.0)]

    loop = Loop("plain", slow, fast, optimizer=two, log=writer)
    with loop:
        for number, loss in enumerate(losses):
            loop.backward(loss)
            loop.optimizers[0].step()
            if number % 2 == 0:  # sees every second loss, and counts its own steps
                loop.optimizers[1].step()
            loop.optimizer.zero_grad()
    by_optimizer = {index: [a for a in fast.alarms if a.optimizer_index == index] for index in (0, 1)}
    assert [alarm.step for alarm in by_optimizer[0]] == [80, 110]
    assert [alarm.step for alarm in by_optimizer[1]] == [55]
    assert [alarm.step for alarm in slow.alarms if not alarm.optimizer_index] == [80]
    tags = {tag for tag, _ in writer.scalars if "alarm" in tag}
    assert tags == {"alarm/jump", "fast/alarm/jump", "opt1/alarm/jump", "fast/opt1/alarm/jump"}


def test_record_writes_a_valid_line_an_event(tmp_path: Path) -> None:
    own = tmp_path / "deep" / "own.jsonl"
    default, named = watcher("record"), watcher({"name": "record", "path": own}, name="named")
    play(with_spikes(BURST, {130: NAN}), default, named, log=Writer(tmp_path))
    for path, callback in ((tmp_path / "loss_alarms.jsonl", default), (own, named)):
        lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
        assert [(line["kind"], line["step"], line["count"]) for line in lines] == summary(callback)
        assert [line["value"] for line in lines[:2]] == [pytest.approx(9.0), pytest.approx(9.0)]
        assert (lines[2]["value"], lines[2]["median"], lines[2]["recent"][-1]) == ("nan", "nan", [130, "nan"])
        assert {line["rank"] for line in lines} == {0}
    assert isinstance(named.hyperparameters()["on_alarm"][0]["path"], str)  # checkpoints hold plain types


def test_extremes_are_those_since_they_were_logged_although_every_step_is_asked_for() -> None:
    writer = Writer()
    play([5.0, 1.0, 9.0, 4.0, 3.0, 2.0, 8.0], watcher("record", every_n_steps=3), log=writer)
    assert {key: value for key, value in writer.scalars.items() if key[0] in ("loss/min", "loss/max")} == {
        ("loss/min", 0): 5.0,
        ("loss/max", 0): 5.0,
        ("loss/min", 3): 1.0,
        ("loss/max", 3): 9.0,
        ("loss/min", 6): 2.0,
        ("loss/max", 6): 8.0,
    }


def test_what_cannot_be_written_or_called_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    def fails(alarm: LossAlarm) -> None:
        raise RuntimeError("no network")

    seen: list[LossAlarm] = []
    callback = watcher({"name": "record", "path": str(tmp_path / "file" / "a")}, fails, seen.append)
    with told() as messages, caplog.at_level(logging.ERROR, "stabilizer"):
        play(BURST, callback)
    assert sum("could not be written" in message for message in messages) == 2
    assert [alarm.step for alarm in seen] == [80, 110]
    assert caplog.text.count("call failed at step") == 2
    assert "no network" in caplog.text
    assert not callback.has_failed
    with pytest.raises(RuntimeError, match="no network"):
        play(BURST, watcher(fails, strict=True))


def test_nothing_is_watched_where_nothing_is_to_be_done() -> None:
    callback = LossMeanVarCallback(on_alarm=[], windows=(20, 60), warmup_steps=50)
    play(BURST, callback)
    assert callback.alarms == ()
    assert callback.state_dict()["extra"]["alerts"]["watches"] == {}
