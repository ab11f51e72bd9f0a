"""What `observe` takes: how it is weighed, what is refused, and that nothing of it is kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from stabilizer.callbacks import RolloutMismatchCallback
from tests.mismatch_loops import healthy, take_steps
from tests.tiny_loops import Loop

#: No alarm: these log-probs are made up.
QUIET: dict[str, Any] = {"on_alarm": []}


def test_a_mean_weighs_by_the_mask() -> None:
    callback = RolloutMismatchCallback(**QUIET)
    first, second = torch.ones(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 0]])
    with Loop("plain", callback) as loop:
        loop.backward(1.0)
        loop.handle.observe(mask=first, entropy=1.0, reward=1.0)
        loop.handle.observe(mask=second, entropy=torch.tensor(5.0), reward=0.0)
        loop.optimizer.step()
        seen = callback.last()
    assert seen is not None
    # 6 and 2 tokens; 2 and 3 completions, whatever of them counts.
    assert float(seen.entropy) == pytest.approx((6 * 1.0 + 2 * 5.0) / 8)
    assert float(seen.reward) == pytest.approx(2 / 5)


def test_a_mean_of_each_sequence_weighs_by_its_tokens() -> None:
    callback = RolloutMismatchCallback(**QUIET)
    with Loop("plain", callback) as loop:
        loop.backward(1.0)
        loop.handle.observe(mask=torch.tensor([[1, 1, 1], [1, 0, 0]]), entropy=torch.tensor([1.0, 5.0]))
        loop.optimizer.step()
        seen = callback.last()
    assert seen is not None
    assert float(seen.entropy) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("num_passed", "is_mid"), [(0, False), (2, False), (3, True), (5, True), (7, True), (8, False), (10, False)]
)
def test_pass_rates(num_passed: int, is_mid: bool) -> None:
    callback = RolloutMismatchCallback(pass_reward=2.0)
    with Loop("plain", callback) as loop:
        loop.backward(1.0)
        rewards = [2.0] * num_passed + [1.5] * (10 - num_passed)
        loop.handle.observe(rewards=[*rewards, *[7.0] * 10], num_generations=10)
        loop.optimizer.step()
        seen = callback.last()
    assert seen is not None
    assert float(seen.mid_pass_groups) == is_mid / 2
    assert float(seen.zero_variance_groups) == (1.0 if num_passed in (0, 10) else 0.5)
    assert float(seen.reward) == pytest.approx((sum(rewards) + 70) / 20)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"entrpy": 1.0}, "'entrpy' cannot be observed; known are logp_train.*; the closest is entropy"),
    ({"logp_train": torch.zeros(1, 2)}, "logp_train and logp_rollout: expected both"),
    ({"logp_train": torch.zeros(1, 2), "logp_rollout": torch.zeros(2, 2)}, r"logp_rollout has shape \(2, 2\)"),
    ({"mask": torch.ones(3), "entropy": 1.0}, r"mask has shape \(3,\)"),
    ({"mask": torch.ones(2, 3), "entropy": torch.ones(2, 4)}, r"entropy has shape \(2, 4\): expected \(2, 3\)"),
    ({"mask": torch.ones(2, 3), "entropy": torch.ones(3)}, r"entropy has shape \(3,\): expected \(2,\)"),
    ({"reward": torch.ones(2, 3)}, r"reward has shape \(2, 3\): expected \(\) or \(B,\)"),
    ({"reward": "much"}, "reward='much': expected a number"),
    ({"rewards": [1.0, 2.0, 3.0], "num_generations": 2}, r"num_generations=2 with rewards of shape \(3,\)"),
    ({"rewards": [1.0], "num_generations": 1}, "expected at least 2"),
    ({"num_generations": 2}, "without rewards"),
]


@pytest.mark.parametrize(("observed", "message"), MISTAKES)
def test_mistakes_are_errors_at_the_call(observed: dict[str, Any], message: str) -> None:
    callback = RolloutMismatchCallback()
    with Loop("plain", callback) as loop:
        for observe in (loop.handle.observe, callback.observe):
            with pytest.raises(ValueError, match=message):
                observe(**observed)
        take_steps(loop, [healthy()])


def test_observations_keep_no_graph_and_no_tensor() -> None:
    callback = RolloutMismatchCallback(**QUIET)
    train = torch.zeros(2, 3, requires_grad=True)
    logp = train * 1.0
    kept = weakref.ref(logp)
    with Loop("plain", callback) as loop:
        loop.backward(1.0)
        loop.handle.observe(logp_train=logp, logp_rollout=torch.zeros(2, 3), entropy=logp)
        del logp
        assert kept() is None
        loop.optimizer.step()
