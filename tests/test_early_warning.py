"""The chain from noise scale to loss: what counts as a rise, and a run whose data become noisier and then bad."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import EarlyWarningCallback, GradNoiseScaleCallback, LossMeanVarCallback, attach
from stabilizer.early_warning import DEFAULT_THRESHOLDS, EarlyWarning
from tests.stateful import differences
from tests.tiny_loops import told

NOISY_AT, BAD_AT = 500, 800


def feed(warning: EarlyWarning, steps: range, **values: float) -> Any:
    """The last sign of a series of equal values."""
    sign = None
    for step in steps:
        sign = warning.update(step, values)
    return sign


def test_levels_count_what_is_up_and_the_loss_outranks_all() -> None:
    warning = EarlyWarning(horizon_steps=50)
    usual = {"noise_scale": 10.0, "variance": 0.1}
    assert feed(warning, range(50), **usual).level == 0
    assert feed(warning, range(50, 53), **{**usual, "noise_scale": 40.0}).level == 1
    sign = feed(warning, range(53, 56), **{**usual, "noise_scale": 40.0, "variance": 0.5})
    assert sign.level == 2
    assert [(rise.channel, rise.step) for rise in sign.rises] == [("noise_scale", 51), ("variance", 54)]
    sign = warning.update(56, usual, alarm_step=56)
    assert sign.level == 3
    assert sign.text == "the loss alarmed at step 56"  # what came back to its usual value is not up any more
    assert feed(warning, range(57, 107), **usual).level == 3
    assert feed(warning, range(107, 108), **usual).level == 0


def test_the_sentence_names_the_first_and_the_steps_to_the_others() -> None:
    warning = EarlyWarning()
    feed(warning, range(50), noise_scale=10.0, variance=0.1)
    feed(warning, range(50, 60), noise_scale=50.0, variance=0.1)
    sign = warning.update(70, {"noise_scale": 50.0, "variance": 0.1}, alarm_step=68)
    assert sign.text == "the noise scale rose at step 51 (5 times its usual value); the loss alarmed 17 steps later"


def test_a_single_value_is_no_rise_and_a_slow_change_of_level_ends() -> None:
    warning = EarlyWarning()
    feed(warning, range(50), variance=1.0)
    assert feed(warning, range(50, 51), variance=100.0).level == 0
    assert feed(warning, range(51, 60), variance=1.0).level == 0
    assert feed(warning, range(60, 64), variance=4.0).level == 1
    # The new level is what is usual after a while.
    assert feed(warning, range(64, 140), variance=4.0).level == 0


def test_the_farthest_layer_counts() -> None:
    warning = EarlyWarning()
    for step in range(60):
        last = 8.0 if step >= 50 else 2.0
        sign = warning.update(step, {}, layers={"a": 1.0, "b": last, "c": 0.0})
    assert [(rise.channel, rise.step, rise.ratio) for rise in sign.rises] == [("layers", 51, pytest.approx(4.0))]


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_value_changes_nothing(value: float) -> None:
    warning, other = EarlyWarning(), EarlyWarning()
    for step in range(100):
        warning.update(step, {"noise_scale": 1.0 + step % 3})
        other.update(step, {"noise_scale": 1.0 + step % 3})
        other.update(step, {"noise_scale": value})
    assert warning.state_dict() == other.state_dict()


def test_a_resumed_one_goes_on_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(300, generator=generator) * 0.6).exp().tolist()
    whole, first = EarlyWarning(), EarlyWarning()
    for step, value in enumerate(values[:150]):
        whole.update(step, {"noise_scale": value}, alarm_step=100 if step >= 100 else None)
        first.update(step, {"noise_scale": value}, alarm_step=100 if step >= 100 else None)
    second = EarlyWarning()
    second.load_state_dict(first.state_dict())
    for step, value in enumerate(values[150:], start=150):
        assert whole.update(step, {"noise_scale": value}) == second.update(step, {"noise_scale": value})
    with pytest.raises(ValueError, match="version 9"):
        second.load_state_dict({"version": 9})


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [({"loss": 1.0}, "thresholds: 'loss': allowed are noise_scale"), ({"layers": 0.0}, r"layers=0.0: expected ln of")],
)
def test_a_threshold_that_cannot_be_is_refused(thresholds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EarlyWarningCallback(thresholds=thresholds)


def _batch(step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 4, generator=generator)
    noise = torch.randn(8, 1, generator=generator)
    # Nearly nothing is left to learn: the gradient gets smaller, and its noise stays. The loss itself falls.
    signal = (1.0 if step < NOISY_AT else 0.72) * inputs.sum(1, keepdim=True)
    return inputs, signal + noise + (1000.0 if step >= BAD_AT else 0.0)


def make_callbacks() -> list[Any]:
    """The chain."""
    return [
        EarlyWarningCallback(every_n_steps=5, thresholds={"noise_scale": 1.5, "layers": 3.0}),
        GradNoiseScaleCallback(decay=0.9, min_samples=20),
        LossMeanVarCallback(windows=(20, 200), every_n_steps=5),
    ]


def train(
    callbacks: list[Any], *, steps: range, model: nn.Module | None = None, states: Any = None, rows: Any = None
) -> tuple[nn.Module, dict[str, Any]]:
    """A linear model that has learned what there is, and stays as it is."""
    if model is None:
        model = nn.Linear(4, 1)
        with torch.no_grad():
            model.weight.fill_(0.7)
            model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    log = (lambda values, step: None) if rows is None else lambda values, step: rows.append((step, values))
    with attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=log) as handle:
        if states is not None:
            handle.load_state_dict(states)
        for step in steps:
            for micro_batch in range(4):
                inputs, targets = _batch(step, torch.Generator().manual_seed(10 * step + micro_batch))
                loss = (model(inputs) - targets).square().mean() / 4
                handle.record_loss(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states = handle.state_dict()
    return model, states


def test_data_that_become_noisy_are_told_before_the_loss_alarm() -> None:
    callbacks, rows = make_callbacks(), []
    with told() as messages:
        train(callbacks, steps=range(BAD_AT + 50), rows=rows)
    levels = {step: values["warning/level"] for step, values in rows if "warning/level" in values}
    assert set(levels) == set(range(0, BAD_AT + 50, 5))
    assert max(level for step, level in levels.items() if step < NOISY_AT) == 0
    first = min(step for step, level in levels.items() if level >= 1)
    assert NOISY_AT < first <= NOISY_AT + 60
    assert levels[BAD_AT + 45] == 3
    first_level = [message for message in messages if "level 1: " in message]
    assert "rose at step" in first_level[0]


@pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")
def test_a_resumed_run_warns_alike() -> None:
    whole = make_callbacks()
    train(whole, steps=range(NOISY_AT + 60))
    first, second = make_callbacks(), make_callbacks()
    model, states = train(first, steps=range(NOISY_AT + 7))
    train(second, steps=range(NOISY_AT + 7, NOISY_AT + 60), model=model, states=states)
    # The first step after a start has no local norms, so that the noise scale is not the same to the last digit.
    one, other = whole[0].signs[0], second[0].signs[0]
    assert [(rise.channel, rise.step) for rise in one.rises] == [(rise.channel, rise.step) for rise in other.rises]
    assert one.level == 1
    for callback in (whole[0], second[0]):
        callback._warnings[0]._series.pop("noise_scale")
        callback._warnings[0]._channels.pop("noise_scale")
    assert differences(whole[0].state_dict(), second[0].state_dict()) == []


def test_channels_that_nobody_measures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    callback = EarlyWarningCallback()
    train([callback], steps=range(80))
    table = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "add GradNoiseScaleCallback" in table
    assert "add LossMeanVarCallback" in table
    assert callback.signs[0].level == 0
    assert set(callback.excesses()) == set(DEFAULT_THRESHOLDS)
    assert math.isnan(callback.excesses()["noise_scale"])
