"""RolloutMismatchCallback: what it logs is what an oracle says of all tokens of all micro-batches and ranks."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from stabilizer import tags
from stabilizer.callbacks import GradNormCallback, RolloutMismatchCallback, StabilizerCallback, StepContext
from stabilizer.callbacks.base import Order
from stabilizer.callbacks.policy_windows import PolicyStep
from stabilizer.rollout import MismatchStatistics
from tests.environments import ROOT
from tests.launcher import run_distributed
from tests.loggers import Points, points_of
from tests.mismatch_loops import constant, healthy, micro_batch, run_observing, take_steps
from tests.reference_policy import policy_signals
from tests.reference_rollout import mismatch, pairs
from tests.tiny_loops import Loop, told

#: No alarm: these log-probs are made up.
QUIET: dict[str, Any] = {"on_alarm": []}


def expected(parts: list[dict[str, Any]]) -> dict[str, float]:
    """Of one step, over all tokens at once."""
    sequences = [one for part in parts for one in pairs(part["logp_train"], part["logp_rollout"], part["mask"])]
    found = {f"rollout/{name}": float(value) for name, value in mismatch(sequences, (0.5, 5.0)).items()}
    return found | {f"policy/{name}": value for name, value in policy_signals(parts).items()}


def compared(points: Points, step: int) -> dict[str, float]:
    """What was logged of a step, without slopes and counts that the oracle does not have."""
    return {
        tag: value
        for (tag, at), value in points.items()
        if at == step and "slope" not in tag and tag != "policy/num_nonfinite"
    }


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_one_process(num_micro_batches: int) -> None:
    loop = Loop("plain", RolloutMismatchCallback(**QUIET))
    with loop:
        for step in range(3):
            for number in range(num_micro_batches):
                loop.backward(1.0)
                loop.handle.observe(**micro_batch(0, number, step))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    points = points_of(loop.rows)
    for step in range(3):
        parts = [micro_batch(0, number, step) for number in range(num_micro_batches)]
        assert compared(points, step) == pytest.approx(expected(parts), rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_are_one_with_all_tokens(strategy: str) -> None:
    (rows, state, _), (silence, other, _) = run_distributed(
        run_observing, RolloutMismatchCallback, strategy, options=QUIET
    )
    assert silence == []
    points = points_of(rows)
    for step in range(3):
        parts = [micro_batch(rank, number, step) for rank in range(2) for number in range(2)]
        assert compared(points, step) == pytest.approx(expected(parts), rel=2e-6, abs=1e-6)
    assert str(state) == str(other)


def test_a_rank_that_observes_nothing_takes_part() -> None:
    (rows, state, _), (_, other, _) = run_distributed(run_observing, RolloutMismatchCallback, silent=[0], options=QUIET)
    points = points_of(rows)
    for step in range(3):
        parts = [micro_batch(1, number, step) for number in range(2)]
        assert compared(points, step) == pytest.approx(expected(parts), rel=2e-6, abs=1e-6)
    assert str(state) == str(other)


def test_slopes_and_the_gap_to_the_heldout_reward() -> None:
    callback = RolloutMismatchCallback(window=4, every_n_steps=1)
    loop = Loop("plain", callback)
    entropies = [1.0, 0.8, 0.7, 0.65, 0.2, 0.1]
    with loop:
        for step, entropy in enumerate(entropies):
            loop.backward(1.0)
            heldout = {"heldout_reward": 0.5} if step == 5 else {}
            loop.handle.observe(entropy=entropy, kl_ref=0.01 * step, reward=float(step), **heldout)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    points = points_of(loop.rows)
    x, y = torch.arange(2.0, 6.0, dtype=torch.float64), torch.tensor(entropies[2:], dtype=torch.float64)
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert points["policy/entropy_slope_4", 5] == pytest.approx(slope, rel=1e-6)
    residuals = y - y.mean() - slope * (x - x.mean())
    error = float((residuals.square().sum() / 2 / (x - x.mean()).square().sum()).sqrt())
    assert points["policy/entropy_slope_error_4", 5] == pytest.approx(error, rel=1e-6)
    assert points["policy/kl_ref_slope_4", 5] == pytest.approx(0.01, rel=1e-5)
    assert points["policy/reward_gap", 5] == pytest.approx((2 + 3 + 4 + 5) / 4 - 0.5)
    # Two values have no slope with an error, and a step without a held-out reward no gap.
    assert {step for tag, step in points if tag == "policy/entropy_slope_4"} == {2, 3, 4, 5}
    assert {step for tag, step in points if tag == "policy/reward_gap"} == {5}


def test_steps_without_observations_log_nothing() -> None:
    loop = Loop("plain", RolloutMismatchCallback(every_n_steps=2, **QUIET))
    with loop:
        take_steps(loop, [healthy(), healthy(), None, healthy(), {"entropy": 1.0}])
    points = points_of(loop.rows)
    assert {step for _, step in points} == {0, 4}
    assert {tag for tag, step in points if step == 4} == {"policy/entropy", "policy/num_nonfinite"}


def test_what_is_never_observed_is_told_once() -> None:
    loop = Loop("plain", RolloutMismatchCallback())
    with told() as messages, loop:
        take_steps(loop, [None] * 8)
    [message] = messages
    assert "nothing was observed in 3 steps" in message
    assert "handle.observe(" in message
    assert loop.rows == []


def test_a_late_first_observation_is_told_nothing_of() -> None:
    with told() as messages, Loop("plain", RolloutMismatchCallback()) as loop:
        take_steps(loop, [None, None, healthy(), *[None] * 6])
    assert messages == []


def test_nobody_to_tell() -> None:
    with told() as messages, Loop("plain", GradNormCallback()) as loop:
        take_steps(loop, [healthy(), healthy()])
    assert messages == ["observe() has nobody to tell: add RolloutMismatchCallback to the callbacks"]


def test_the_callback_itself_takes_observations_in_a_run_only() -> None:
    callback = RolloutMismatchCallback(**QUIET)
    callback.observe(entropy=7.0)
    with Loop("plain", callback) as loop:
        loop.backward(1.0)
        callback.observe(entropy=1.0)
        loop.optimizer.step()
        assert float(callback.last().entropy) == 1.0  # type: ignore[union-attr]
        loop.optimizer.zero_grad()
    callback.observe(entropy=7.0)
    with Loop("plain", callback) as loop:
        take_steps(loop, [{"entropy": 2.0}])
        assert float(callback.last().entropy) == 2.0  # type: ignore[union-attr]


def test_gradients_that_are_thrown_away_take_nothing_with_them() -> None:
    """Rewards are told before an update that begins with clearing the old gradients."""
    callback = RolloutMismatchCallback(**QUIET)
    with Loop("plain", callback) as loop:
        for step in range(2):
            loop.handle.observe(reward=float(step))
            loop.optimizer.zero_grad()
            loop.backward(1.0)
            loop.handle.observe(entropy=1.0)
            loop.optimizer.step()
            seen = callback.last()
            assert seen is not None
            assert (float(seen.reward), float(seen.entropy)) == (step, 1.0)


def test_a_measured_step_that_is_measured_again_has_its_observations() -> None:
    callback = RolloutMismatchCallback(**QUIET)
    with Loop("plain", callback) as loop:
        loop.backward(1.0)
        loop.handle.observe(entropy=1.0)
        loop.handle.measure()
        loop.handle.measure()
        loop.optimizer.step()
        seen = callback.last()
    assert seen is not None
    assert float(seen.entropy) == 1.0


def test_a_monitor_of_one_s_own_observes_for_the_next_step() -> None:
    class Monitor(StabilizerCallback):
        def on_gradients(self, context: StepContext) -> None:
            context.observe(entropy=float(context.step))

    loop = Loop("plain", Monitor(), RolloutMismatchCallback())
    with loop:
        take_steps(loop, [None] * 4)
    entropies = {step: value for (tag, step), value in points_of(loop.rows).items() if tag == "policy/entropy"}
    assert entropies == {1: 0.0, 2: 1.0, 3: 2.0}


def test_another_callback_reads_the_same_step() -> None:
    class Triage(StabilizerCallback):
        order = Order.WARN

        def on_step_end(self, context: StepContext) -> None:
            [mismatch] = [one for one in self.driver.callbacks if isinstance(one, RolloutMismatchCallback)]
            seen = mismatch.last(context.optimizer_index)
            assert seen is not None
            assert seen.step == context.step
            context.log("triage", seen.entropy + seen.mismatch.kl_k3)

    loop = Loop("plain", Triage(strict=True), RolloutMismatchCallback(**QUIET))
    with loop:
        take_steps(loop, [{"entropy": 0.5, **constant(0.0)}] * 2)
    assert {step: value for (tag, step), value in points_of(loop.rows).items() if tag == "triage"} == {0: 0.5, 1: 0.5}


def test_two_of_them_have_limits_of_their_own() -> None:
    first, second = (
        RolloutMismatchCallback(**QUIET),
        RolloutMismatchCallback(ratio_bounds=(0.9, 1.1), name="b", **QUIET),
    )
    with Loop("plain", first, second) as loop:
        take_steps(loop, [constant(0.2)])
        assert float(first.last().mismatch.share_outside) == 0.0  # type: ignore[union-attr]
        assert float(second.last().mismatch.share_outside) == 1.0  # type: ignore[union-attr]


def test_tags_are_the_fields_and_the_docs_table() -> None:
    assert tuple(field.name for field in dataclasses.fields(MismatchStatistics)) == tags.ROLLOUT_STATISTICS
    fields = {field.name for field in dataclasses.fields(PolicyStep)} - {"step", "mismatch"}
    assert fields == {*tags.POLICY_SIGNALS, *tags.POLICY_SLOPES}
    text = (ROOT / "docs/callbacks/rollout_mismatch.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `((?:rollout|policy)/\w+?)(?:_<window>)?` \|", text, re.MULTILINE))
    assert documented == {tag for tag in tags.ALL_TAGS if tag.startswith(("rollout/", "policy/"))}


def test_all_that_can_be_logged_is_logged_under_known_tags() -> None:
    loop = Loop("plain", RolloutMismatchCallback(window=3, **QUIET))
    with loop:
        for step in range(4):
            take_steps(loop, [{**micro_batch(0, 0, step), "heldout_reward": 1.0, "behaviour_is_old": True}])
    logged = {tag for tag, _ in points_of(loop.rows)}
    slopes = {f"policy/{name}_3" for name in tags.POLICY_SLOPES}
    others = {f"rollout/{name}" for name in tags.ROLLOUT_STATISTICS} | {
        f"policy/{name}" for name in tags.POLICY_SIGNALS
    }
    assert logged == slopes | others
