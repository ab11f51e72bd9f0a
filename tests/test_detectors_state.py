"""Loss detectors and folded alarms: saved and restored, and what their arguments may be."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from stabilizer.detectors import AlarmFolder, Detection, LossDetector
from tests.test_detectors import feed, noise, warm


def _eventful() -> list[float]:
    """A jump that lasts, a ramp, more scatter and single spikes; every part of the state is in use."""
    steps = np.arange(2200)
    losses = noise(2200) * np.where(steps > 1700, 3, 1)
    losses += np.where(steps > 600, 6, 0) + np.clip((steps - 1100) / 20, 0, 5)
    losses[[300, 301, 900, 1600, 1950]] += 30
    result: list[float] = (2 + 0.1 * losses).tolist()
    return result


def test_a_resume_is_bit_identical_wherever_it_happens() -> None:
    losses = _eventful()
    detector, saved = LossDetector(), {}
    found: list[list[Detection]] = []
    points = {0, 10, 30, 50, 99, 150, 301, 603, 615, 640, 905, 1145, 1165, 1300, 1745, 1800, 2000}
    for step, loss in enumerate(losses):
        if step in points:
            # As a checkpoint of plain types would.
            saved[step] = json.loads(json.dumps(detector.state_dict(), allow_nan=False))
        found.append(detector.update(step, loss))
    assert {one.kind for many in found for one in many} == {"jump", "drift", "variance"}
    for point, state in saved.items():
        untouched = copy.deepcopy(state)
        other = warm(300)
        other.load_state_dict(state)
        assert [other.update(step, loss) for step, loss in enumerate(losses[point:], point)] == found[point:], point
        assert other.state_dict() == detector.state_dict(), point
        assert state == untouched


def test_the_state_of_one_is_no_part_of_another() -> None:
    detector = warm()
    state = detector.state_dict()
    before = copy.deepcopy(state)
    other = LossDetector()
    other.load_state_dict(state)
    feed(other, [3.0] * 50, start=1500)
    assert state == before == detector.state_dict()


def test_other_windows_take_what_fits() -> None:
    detector = warm(2000)
    state = detector.state_dict()
    for window, short_window in ((300, 50), (5000, 500)):
        other = LossDetector(window=window, short_window=short_window)
        other.load_state_dict(state)
        kept = other.state_dict()
        for part, name in (("baseline", "levels"), ("baseline", "residuals"), ("variance", "differences")):
            assert kept[part][name] == state[part][name][-window:], name
        assert other.is_warm
        (found,) = feed(other, [2.8], start=2000)
        assert (found.kind, found.step) == ("jump", 2000)
        assert found.median == pytest.approx(2, abs=0.04)
        assert found.sigma == pytest.approx(0.1, rel=0.15)
        assert feed(other, 2 + 0.1 * noise(1000, 5), start=2001) == []


def test_what_is_no_state_is_an_error() -> None:
    state = LossDetector().state_dict()
    with pytest.raises(ValueError, match=r"version 9: expected 1"):
        LossDetector().load_state_dict(state | {"version": 9})
    with pytest.raises(ValueError, match=r"lacks \['drift'\]"):
        LossDetector().load_state_dict({key: value for key, value in state.items() if key != "drift"})
    with pytest.raises(ValueError, match="version None: expected 1"):
        AlarmFolder().load_state_dict({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"short_window": 19}, "short_window=19: expected a whole number of at least 20"),
        ({"window": 199}, "window=199: expected a whole number of at least 200"),
        ({"warmup_steps": 49}, "warmup_steps=49: .* at least 50"),
        ({"accept_after": 7}, "accept_after=7: .* at least 8"),
        ({"jump_target": 0}, "jump_target=0: expected a number above 0 and at most 100"),
        ({"jump_limits": 4.0}, r"jump_limits=4.0: expected a smallest and a largest limit"),
        ({"jump_limits": (0, 4)}, r"jump_limits\[0\]=0: expected a number above 0"),
        ({"jump_limits": (5, 4)}, r"jump_limits\[1\]=4: expected a number at least 5"),
        ({"drift_slack": 3}, "drift_slack=3: expected a number at least 0 and below 3"),
        ({"drift_limit": 0}, "drift_limit=0: expected a number above 0"),
        ({"variance_limit": 1.0}, "variance_limit=1.0: expected a number above 1"),
    ],
)
def test_arguments_out_of_range_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossDetector(**options)


# Folding.


def _jump(step: int, kind: Any = "jump", first_step: int | None = None) -> Detection:
    return Detection(kind, step, 8.0, 2.0, 0.1, 60.0, 4.5, step if first_step is None else first_step)


def test_a_storm_is_one_event_a_cooldown_with_a_count() -> None:
    folder = AlarmFolder(cooldown_steps=100)
    events = [event for step in range(1000, 1250) for event in folder.fold([_jump(step)])]
    assert [(one.step, one.count, one.first_step) for one in events] == [
        (1000, 1, 1000),
        (1100, 100, 1001),
        (1200, 100, 1101),
    ]
    assert folder.pending == {"jump": 49}
    assert sum(one.count for one in events) + 49 == 250


def test_each_kind_is_folded_on_its_own() -> None:
    folder = AlarmFolder(cooldown_steps=10)
    assert [one.kind for one in folder.fold([_jump(5), _jump(5, "drift", first_step=2)])] == ["jump", "drift"]
    assert folder.fold([_jump(6), _jump(7, "drift", first_step=6)]) == []
    (event,) = folder.fold([_jump(17, "drift", first_step=16)])
    assert (event.kind, event.count, event.first_step) == ("drift", 2, 6)
    assert folder.pending == {"jump": 1}


def test_no_cooldown_folds_nothing() -> None:
    folder = AlarmFolder(cooldown_steps=0)
    assert [len(folder.fold([_jump(step)])) for step in (1, 2, 3)] == [1, 1, 1]


def test_folding_goes_on_after_a_resume_and_tells_anew_after_going_back() -> None:
    folder = AlarmFolder(cooldown_steps=100)
    for step in (1000, 1001, 1050):
        folder.fold([_jump(step)])
    state = json.loads(json.dumps(folder.state_dict()))
    other = AlarmFolder(cooldown_steps=100)
    other.load_state_dict(state)
    assert other.pending == {"jump": 2}
    assert other.fold([_jump(1099)]) == []
    assert [one.count for one in other.fold([_jump(1100)])] == [4]
    # From an older checkpoint, with a folder that has not been told.
    assert [one.step for one in folder.fold([_jump(400)])] == [400]


def test_a_cooldown_below_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="cooldown_steps=-1: expected a whole number of at least 0"):
        AlarmFolder(cooldown_steps=-1)
