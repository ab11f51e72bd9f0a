"""Field reports, area loss-spike: what the loss detectors say, and what they must not."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from stabilizer.detectors import AlarmFolder, LossDetector
from tests.test_detectors import feed, noise, warm

NAN, INF = math.nan, math.inf


def test_B072_a_spike_of_five_steps_is_one_alarm_within_the_cooldown() -> None:
    detector, folder = warm(), AlarmFolder(cooldown_steps=20)
    events = []
    for step, loss in enumerate([*[3.5] * 5, *(2 + 0.1 * noise(200, 1))], 1500):
        events += folder.fold(detector.update(step, float(loss)))
    assert [(one.kind, one.step) for one in events] == [("jump", 1500)]
    assert folder.pending == {"jump": 4}


def test_B072_after_a_load_the_window_is_the_saved_one_and_a_new_spike_is_told() -> None:
    detector, folder = warm(), AlarmFolder(cooldown_steps=20)
    saved = json.dumps([detector.state_dict(), folder.state_dict()])
    expected = feed(warm(), [2.1, 3.5, 2.0], start=1500)
    # 15 bad steps, then back to the checkpoint before them.
    assert folder.fold(feed(detector, [3.5] * 15, start=1500))
    state, folder_state = json.loads(saved)
    detector.load_state_dict(state)
    folder.load_state_dict(folder_state)
    assert detector.state_dict() == state
    found = feed(detector, [2.1, 3.5, 2.0], start=1500)
    assert found == expected
    assert [one.step for one in folder.fold(found)] == [1501]


def test_B075_losses_that_are_not_finite_change_no_statistic_of_a_detector() -> None:
    losses = [1.0, 2.0, NAN, 4.0, INF, 6.0] * 60
    finite = [loss for loss in losses if math.isfinite(loss)]
    detector = LossDetector()
    feed(detector, losses)
    assert [loss for _, loss in detector.last] == finite[-32:]
    (found,) = feed(detector, [1e4], start=len(losses))
    assert found.median == np.median(finite[-100:])
    assert found.step == len(losses), "the count of steps goes on"


@pytest.mark.parametrize("size", [1.0, 100.0, 1e30])
def test_B086_a_falling_loss_never_fires(size: float) -> None:
    detector = LossDetector()
    losses = 2 + 0.1 * np.clip(noise(2000), -3, 3)
    losses[500:] -= 0.1 * size
    losses[1200] = -10 * size
    assert feed(detector, losses) == []


def test_B086_a_loss_that_is_not_finite_is_no_jump_whichever_way_it_goes() -> None:
    # Told as such, and apart: here it must be neither a jump nor silence about the next one.
    detector = warm()
    assert feed(detector, [NAN, INF, -INF], start=1500) == []
    assert [one.kind for one in feed(detector, [4.0], start=1503)] == ["jump"]


def test_B093_a_huge_first_loss_neither_fires_after_the_warm_up_nor_masks_the_spike() -> None:
    found = feed(LossDetector(), [1e6, *(2 + 0.1 * noise(100)), 8.0])
    assert [(one.kind, one.step) for one in found] == [("jump", 101)]
    assert found[0].median == pytest.approx(2, abs=0.05)
    assert found[0].sigma < 0.2
