"""When a run is in trouble, which rung is next, and which data steps had: against slow ones written once more."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from stabilizer.callbacks import StabilizerCallback
from stabilizer.callbacks.recovery import Recovery
from stabilizer.recovery import (
    Ladder,
    LossCondition,
    NonfiniteCondition,
    StepPositions,
    Trouble,
    parsed_conditions,
    parsed_ladder,
)
from stabilizer.recovery.specs import plain_specs
from tests.recovery_reference import loss_troubles, nonfinite_troubles


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num", "window"), [(1, 1), (3, 10), (4, 4), (2, 30)])
def test_nonfinite_steps_are_counted_as_by_hand(seed: int, num: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    bad = (rng.random(300) < rng.choice([0.03, 0.2], 300)).tolist()
    condition = NonfiniteCondition(num=num, window=window)
    found = [condition.update(step, is_bad=is_bad) for step, is_bad in enumerate(bad)]
    assert [(one.step, one.first_step) for one in found if one] == nonfinite_troubles(bad, num=num, window=window)


def curve(seed: int) -> list[float]:
    """A falling loss with noise, single spikes, lasting ones, slow ones, and some that are not finite."""
    rng = np.random.default_rng(seed)
    steps = np.arange(900)
    losses = 2 + 3 * np.exp(-steps / 150) + 0.1 * rng.standard_normal(900)
    losses[rng.integers(100, 900, 8)] += 5
    for start in rng.integers(150, 850, 3):
        length = rng.integers(3, 60)
        losses[start : start + length] += np.linspace(0.2, rng.uniform(1, 20), len(losses[start : start + length]))
    losses[rng.integers(0, 900, 6)] = math.nan
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("k", "num_steps", "window"), [(4.0, 20, 100), (3.0, 5, 40), (6.0, 1, 100)])
def test_losses_are_judged_as_by_hand(seed: int, k: float, num_steps: int, window: int) -> None:
    losses, condition = curve(seed), LossCondition(k=k, num_steps=num_steps, window=window)
    found = [condition.update(step, loss) for step, loss in enumerate(losses)]
    expected = loss_troubles(losses, k=k, num_steps=num_steps, window=window)
    assert [(one.step, one.first_step) for one in found if one] == expected


def test_the_curves_have_trouble_of_every_kind() -> None:
    found = [loss_troubles(curve(seed), k=4.0, num_steps=20, window=100) for seed in range(8)]
    assert sum(map(len, found)) >= 8
    assert any(first < step - 25 for one in found for step, first in one)  # a spike that came back after two losses


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_healthy_noise_is_no_trouble(scale: float) -> None:
    rng = np.random.default_rng(0)
    for noise in (rng.standard_normal(4000), rng.standard_t(3, 4000)):
        condition = LossCondition(k=4.0, num_steps=20, window=100)
        losses = scale * (2 + 0.1 * noise)
        assert not [one for step, loss in enumerate(losses) if (one := condition.update(step, float(loss)))]


def test_what_is_not_finite_enters_no_state() -> None:
    condition = LossCondition(k=4.0, num_steps=3, window=50)
    for step, loss in enumerate([math.nan, math.inf, *[2.0, 2.1] * 20, math.nan, math.inf, 9.0, math.nan]):
        condition.update(step, loss)
    state = condition.state_dict()
    assert all(math.isfinite(value) for key in ("usual", "over") for value in state[key])
    assert (state["over"], state["num_over"]) == ([9.0], 1)


def test_a_level_that_nobody_can_do_anything_about_is_accepted() -> None:
    condition = LossCondition(k=4.0, num_steps=20, window=100)
    losses = [2.0 + 0.01 * (step % 7) for step in range(100)] + [5.0 + 0.01 * (step % 7) for step in range(100)]
    for step, loss in enumerate(losses):
        if condition.update(step, loss):
            assert step == 119
            condition.accept()
    assert condition.limit == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("cut", [120, 333, 512])
def test_conditions_resume_bit_for_bit(cut: int) -> None:
    losses = curve(3)
    whole, first, second = (LossCondition(k=3.0, num_steps=5, window=40) for _ in range(3))
    expected = [whole.update(step, loss) for step, loss in enumerate(losses)]
    found = [first.update(step, loss) for step, loss in enumerate(losses[:cut])]
    second.load_state_dict(first.state_dict())
    found += [second.update(step, losses[step]) for step in range(cut, len(losses))]
    assert found == expected
    assert second.state_dict() == whole.state_dict()


def climbed(ladder: Ladder, events: list[tuple[int, int]]) -> list[tuple[str, int]]:
    """Rung and first bad step of events at a step, each with its own first bad step."""
    entries = []
    for step, first in events:
        entry = ladder.climb(Trouble("loss", step, first, "high"), step=step)
        entries.append((entry.rung, entry.first_step))
        if entry.rung == "roll_back":
            ladder.rolled_back(step=step, target=first)
    return entries


def test_the_ladder_is_climbed_and_left_after_a_calm() -> None:
    ladder = Ladder(["alarm", "skip", "lower_lr", "stop"], calm_steps=50, quiet_steps=20)
    events = [(10, 8), (20, 19), (30, 29), (81, 80), (131, 130), (182, 181)]
    # The suspicion reaches back over troubles that are close together, and no further; so does the ladder, later.
    expected = [("alarm", 8), ("skip", 8), ("lower_lr", 8), ("alarm", 80), ("skip", 130), ("alarm", 181)]
    assert climbed(ladder, events) == expected


def test_rollbacks_have_a_cooldown_and_an_end() -> None:
    ladder = Ladder([{"name": "roll_back", "max_rollbacks": 2, "cooldown_steps": 30}], calm_steps=1000, quiet_steps=40)
    events = [(10, 8), (20, 19), (40, 39), (41, 41), (45, 44), (72, 71), (80, 80)]
    expected = [
        ("roll_back", 8),
        ("wait", 19),
        ("wait", 19),
        ("roll_back", 19),
        ("wait", 44),
        ("stop", 44),
        ("stop", 44),
    ]
    assert climbed(ladder, events) == expected
    assert ladder.history[1].count == 2


def test_a_checkpoint_that_did_not_help_is_not_taken_again() -> None:
    ladder = Ladder([{"name": "roll_back", "cooldown_steps": 0}], calm_steps=50, quiet_steps=20)
    events = [("loss", 12), ("loss", 40), ("nonfinite", 60), ("loss", 130)]
    found = []
    for condition, step in events:
        found.append(ladder.climb(Trouble(condition, step, step - 2, "high"), step=step).before_step)
        ladder.rolled_back(step=step, target=found[-1] - 4)
    assert found == [10, 5, 58, 128]


def test_the_ladder_resumes_between_rungs() -> None:
    rungs = ["alarm", "skip", {"name": "roll_back", "max_rollbacks": 1, "cooldown_steps": 5}, "stop"]
    events = [(10, 8), (20, 19), (30, 29), (33, 32), (40, 39)]
    whole = Ladder(rungs, calm_steps=50, quiet_steps=20)
    expected = climbed(whole, events)
    assert [rung for rung, _ in expected] == ["alarm", "skip", "roll_back", "wait", "stop"]
    for cut in range(len(events)):
        first, second = (Ladder(rungs, calm_steps=50, quiet_steps=20) for _ in range(2))
        found = climbed(first, events[:cut])
        second.load_state_dict(first.state_dict())
        assert found + climbed(second, events[cut:]) == expected
        assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("seed", range(6))
def test_positions_are_remembered_in_little_memory(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions, last = StepPositions(), []
    for epoch in range(4):
        batch = -1
        for _ in range(rng.integers(3, 30)):
            batch += int(rng.choice([2, 2, 2, 2, 1, 3]))
            last.append((epoch, batch))
    for step, (epoch, batch) in enumerate(last):
        positions.push(step, epoch=epoch, batch=batch)
    for _ in range(40):
        low, high = sorted(int(step) for step in rng.integers(0, len(last), 2))
        expected = {}
        for step in range(low, high + 1):
            epoch, batch = last[step]
            before = last[step - 1] if step else (epoch, -1)
            first = before[1] + 1 if before[0] == epoch else 0
            expected.setdefault(epoch, [first, batch, step])[1] = batch
        found = {
            span.epoch: [span.first_batch, span.last_batch, span.first_step] for span in positions.spans(low, high)
        }
        assert found == expected
    again = StepPositions()
    again.load_state_dict(positions.state_dict())
    assert again.spans(0, len(last)) == positions.spans(0, len(last))


def test_steps_of_one_length_are_one_entry() -> None:
    positions = StepPositions()
    for step in range(10_000):
        positions.push(step, epoch=step // 2500, batch=4 * (step % 2500) + 3)
    assert len(positions.state_dict()["runs"]) == 4


def is_lost(context: Any) -> bool:
    """A condition of one's own."""
    return bool(context.step == 7)


def test_arguments_have_all_of_their_defaults() -> None:
    own = {"name": "call", "function": "tests.test_recovery_conditions.is_lost"}
    conditions = parsed_conditions(["nonfinite", {"name": "loss", "k": 6}, is_lost, own])
    assert plain_specs(conditions) == [
        {"name": "nonfinite", "num": 3, "window": 10},
        {"name": "loss", "k": 6, "num_steps": 20, "window": 100},
        own,
        own,
    ]
    assert parsed_ladder(["alarm", "roll_back"])[1]["max_rollbacks"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conditions": "nonfinite"}, r"conditions='nonfinite': expected a list, such as \['nonfinite'\]"),
        ({"conditions": ["nonfinit"]}, "conditions: 'nonfinit': allowed are .* the closest is nonfinite"),
        ({"conditions": ["loss", "loss"]}, "conditions: 'loss' is there 2 times"),
        ({"conditions": [{"name": "loss", "sigma": 3}]}, "conditions: loss: 'sigma' is no argument; known are k,"),
        ({"conditions": [{"name": "loss", "k": 0}]}, "conditions: loss: k=0: expected a number above 0"),
        ({"conditions": [{"name": "loss", "k": math.nan}]}, "conditions: loss: k=nan: expected a number above 0"),
        ({"conditions": [{"name": "nonfinite", "window": 2}]}, "nonfinite: window=2: expected .* at least 3"),
        ({"conditions": [{"name": "nonfinite", "num": True}]}, "nonfinite: num=True: expected a whole number"),
        (
            {"conditions": [{"name": "call", "function": "no.such.thing"}]},
            "function='no.such.thing': expected a function",
        ),
        (
            {"conditions": [{"name": "call", "function": "math.pi"}]},
            "function='math.pi': it is 3.14.*, and no function",
        ),
        ({"conditions": [3]}, "conditions: 3: expected one of"),
        ({"ladder": "alarm"}, r"ladder='alarm': expected a list, such as \['alarm'\]"),
        ({"ladder": ["stop", "alarm"]}, "ladder=.*: expected them from the mildest to the last"),
        ({"ladder": ["rollback"]}, "ladder: 'rollback': allowed are .* the closest is roll_back"),
        ({"ladder": [is_lost]}, "ladder: .*: a function is no rung"),
        ({"ladder": [{"name": "lower_lr", "factor": 1.0}]}, "lower_lr: factor=1.0: expected a number .*below 1"),
        ({"ladder": [{"name": "roll_back", "max_rollbacks": 0}]}, "max_rollbacks=0: expected .* at least 1"),
        ({"ladder": [{"name": "roll_back", "lr_factor": 0}]}, "lr_factor=0: expected a number above 0"),
        ({"calm_steps": 0}, "calm_steps=0: expected a whole number of at least 1"),
        ({"max_skips": 0}, "max_skips=0: expected a whole number of at least 1"),
        ({"skip_list": 3}, "skip_list=3: expected the name of a file"),
    ],
)
def test_a_wrong_argument_is_one_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recovery(StabilizerCallback(), **options)
