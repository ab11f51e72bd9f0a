"""Alarms of RolloutMismatchCallback: at their limits and not under them, once a cooldown, and what is done then."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import RolloutMismatchCallback
from stabilizer.callbacks.mismatch_alarms import MismatchAlarm, MismatchLimits
from stabilizer.errors import StabilizerWarning, TrainingStoppedError
from stabilizer.rollout import rollout_mismatch
from tests.launcher import run_distributed
from tests.loggers import points_of
from tests.mismatch_loops import constant, healthy, row_of, run_observing, take_steps
from tests.states import same
from tests.tiny_loops import Loop, told


def figures(train: Any, rollout: Any) -> Any:
    """Of log-probs, shape (B, T)."""
    return row_of(rollout_mismatch(train, logp_rollout=rollout, mask=torch.ones_like(train)))


def judged(row: Any, **limits: Any) -> dict[str, str]:
    """Kind -> severity."""
    return {one.kind: one.severity for one in MismatchLimits(**limits).judge(row)}


SOUND = figures(*healthy().values())


@pytest.mark.parametrize(
    ("field", "kind", "under", "warning", "alarm"),
    [
        ("k3", "k3", 0.00999, 0.01, 0.05),
        ("ess", "ess", 0.50001, 0.5, 0.3),
        ("largest", "max", 11.49, None, 11.5),
        ("share", "ln2", 0.00999, None, 0.01),
        ("mean", "shift", -0.0499, -0.05, -0.1),
        ("mean", "shift", 0.0499, 0.05, 0.1),
    ],
)
def test_each_alarms_at_its_limit_and_not_under_it(
    field: str, kind: str, under: float, warning: float | None, alarm: float
) -> None:
    assert judged(SOUND) == {}
    assert judged(SOUND._replace(**{field: under})) == {}
    if warning is not None:
        assert judged(SOUND._replace(**{field: warning})) == {kind: "warning"}
        assert judged(SOUND._replace(**{field: alarm * 1.001 if kind == "ess" else alarm * 0.999})) == {kind: "warning"}
    assert judged(SOUND._replace(**{field: alarm})) == {kind: "alarm"}
    name = {"max": "largest", "ln2": "share"}.get(kind, kind)
    assert judged(SOUND._replace(**{field: alarm}), **{name: None}) == {}, "None is off"


def test_a_uniform_shift_is_alarmed_and_no_other_limit_of_an_alarm_sees_it() -> None:
    """A constant -0.19, by which all tokens are 17 % less likely in training.

    K3 of it is exp(-0.19) - 1 + 0.19 = 0.017: over the limit of its warning, 0.01, and far under that of its alarm.
    """
    train, rollout = constant(-0.19).values()
    row = figures(train, rollout)
    assert row.k3 == pytest.approx(math.exp(-0.19) - 1 + 0.19)
    assert row.ess == pytest.approx(1.0)
    assert (row.share, row.largest) == (0.0, pytest.approx(0.19))
    assert judged(row) == {"shift": "alarm", "k3": "warning"}
    assert judged(row, shift=None) == {"k3": "warning"}
    # With the noise of two engines on top of it too.
    noise = 0.05 * torch.randn(train.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert judged(figures(train + noise, rollout)) == {"shift": "alarm", "k3": "warning"}


@pytest.mark.parametrize("shape", ["normal", "laplace", "rare", "sequences"])
def test_noise_without_a_shift_is_none(shape: str) -> None:
    """No shift in 1,000 batches of 256 to 4,096 tokens in which the mean ratio is 1, whatever shape the noise has."""
    generator = torch.Generator().manual_seed(1)
    for trial in range(1000):
        num = int(2 ** torch.randint(8, 13, (), generator=generator))
        std = float(torch.rand((), generator=generator)) * 0.6
        z = torch.randn(num, generator=generator, dtype=torch.float64)
        if shape == "laplace":
            z = z.sign() * torch.empty_like(z).exponential_(generator=generator) / math.sqrt(2)
        elif shape == "rare":
            z = 10 * z * (torch.rand(num, generator=generator) < 0.01)
        elif shape == "sequences":
            z = z.reshape(-1, 16)[:, :1].expand(-1, 16).reshape(-1)  # all tokens of a sequence alike
        noise = std * z
        centre = {"normal": std**2 / 2, "sequences": std**2 / 2, "laplace": -math.log(1 - std**2 / 2)}
        # Of the mixture the mean of exp is 0.99 + 0.01 exp(50 std^2).
        centre["rare"] = math.log(0.99 + 0.01 * math.exp(min(50 * std**2, 100)))
        train = (noise - centre[shape]).reshape(-1, 16)
        if shape == "rare" and centre["rare"] > 0.05:
            continue  # far apart in earnest: k3 is over its alarm
        found = judged(figures(train, torch.zeros_like(train)))
        assert "shift" not in found, (trial, num, std)


def test_few_tokens_are_no_evidence() -> None:
    generator = torch.Generator().manual_seed(2)
    shifts = sides = 0
    for _ in range(2000):
        train = 0.3 * torch.randn(1, 4, generator=generator, dtype=torch.float64)
        row = figures(train, torch.zeros_like(train))
        shifts += "shift" in judged(row)
        sides += abs(row.mean) >= max(row.std, 0.1)
    assert shifts <= 10
    assert sides > 100, "without the standard errors four tokens would often do"


def test_one_packed_row_of_many_sequences_is_evidence() -> None:
    train, rollout = (logp.reshape(1, -1) for logp in constant(-0.19, 4096).values())
    noise = 0.1 * torch.randn(train.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert judged(figures(train + noise, rollout))["shift"] == "alarm"


def test_an_alarm_in_a_run() -> None:
    loop = Loop("plain", callback := RolloutMismatchCallback())
    with told() as messages, loop:
        take_steps(loop, [healthy(), constant(-0.19), healthy()])
    shift, k3 = (next(one for one in messages if kind in one) for kind in ("rollout_shift", "rollout_k3"))
    assert len(messages) == 2
    assert (
        "step 1 (batch 1): rollout_shift (alarm): the mean log-ratio of 400 tokens is -0.19 (17 % less likely" in shift
    )
    assert "step 1 (batch 1): rollout_k3 (warning): K3 of rollout and training policy is 0.017" in k3
    points = points_of(loop.rows)
    assert points["alarm/rollout_shift", 1] == pytest.approx(-0.19)
    assert points["alarm/rollout_k3", 1] == pytest.approx(0.01696, rel=1e-3)
    assert {tag for tag, _ in points if tag.startswith("alarm/")} == {"alarm/rollout_shift", "alarm/rollout_k3"}
    assert [(one.kind, one.step) for one in callback.alarms] == [("rollout_k3", 1), ("rollout_shift", 1)]


def test_a_cooldown_folds_and_what_gets_worse_is_told() -> None:
    callback = RolloutMismatchCallback(cooldown_steps=5, k3_limits=None, on_alarm=[lambda alarm: None])
    with Loop("plain", callback) as loop:
        take_steps(loop, [constant(0.06)] * 3 + [constant(0.2)] + [constant(0.06)] * 6 + [constant(0.3)])
    told_of = [(one.step, one.severity, one.count, one.first_step) for one in callback.alarms]
    # A warning; what is worse, which stands for those between; a warning after five steps; and worse again.
    assert told_of == [(0, "warning", 1, 0), (3, "alarm", 3, 1), (8, "warning", 5, 4), (10, "alarm", 2, 9)]
    assert [value for _, value in callback.alarms[1].recent] == pytest.approx([0.06, 0.06, 0.06, 0.2])


def test_what_comes_within_the_last_cooldown_is_counted() -> None:
    callback = RolloutMismatchCallback(cooldown_steps=5, k3_limits=None, on_alarm=[lambda alarm: None])
    with Loop("plain", callback) as loop:
        take_steps(loop, [constant(0.06)] * 7 + [healthy()])
        console = callback.console
    [counted] = [found for kind, found in console.kinds.items() if "shift" in kind]
    assert (counted.num, counted.first_step, counted.last_step) == (7, 0, 6)


def test_what_is_not_finite_is_told_and_left_out() -> None:
    bad = healthy()
    train = bad["logp_train"].clone()
    train[0, 0], train[1, 1] = torch.nan, -torch.inf
    loop = Loop("plain", callback := RolloutMismatchCallback(window=10))
    with told() as messages, loop:
        take_steps(loop, [{**healthy(), "entropy": 1.0}, {**bad, "logp_train": train, "entropy": torch.nan}])
        take_steps(loop, [{**healthy(), "entropy": 3.0}, {**healthy(), "entropy": 3.0}])
    [message] = messages
    assert "step 1 (batch 1): rollout_nonfinite (alarm): 3 log-probs or signals are not finite" in message
    points = points_of(loop.rows)
    assert points["rollout/num_nonfinite", 1] == 2
    assert points["policy/num_nonfinite", 1] == 1
    assert points["rollout/num_tokens", 1] == 398
    assert all(math.isfinite(value) for value in points.values())
    assert ("policy/entropy", 1) not in points
    # Slope of 1, 3, 3 at 0, 2, 3.
    assert points["policy/entropy_slope_10", 3] == pytest.approx(5 / 7)

    def check(value: Any) -> None:
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                check(item)
        elif isinstance(value, float | torch.Tensor):
            assert bool(torch.as_tensor(value).isfinite().all())

    check(callback.state_dict()["extra"])


def test_signals_that_are_not_finite_here_and_there_are_left_out() -> None:
    callback = RolloutMismatchCallback(on_alarm=[])
    entropy = torch.tensor([[1.0, torch.nan, 3.0], [torch.inf, torch.nan, 5.0]])
    with Loop("plain", callback) as loop:
        mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
        rewards = {"rewards": [1.0, 1.0, 0.0, torch.nan], "num_generations": 2}
        take_steps(loop, [{"mask": mask, "entropy": entropy, **rewards}])
        seen = callback.last()
    assert seen is not None
    assert float(seen.entropy) == pytest.approx(3.0)
    assert float(seen.reward) == pytest.approx(2 / 3)
    assert float(seen.num_nonfinite) == 3
    assert float(seen.zero_variance_groups) == 1.0, "the second group is not known"


def test_log_probs_that_are_all_bad_are_told_as_that() -> None:
    nothing = torch.full((2, 3), torch.nan)
    loop = Loop("plain", RolloutMismatchCallback())
    with pytest.warns(StabilizerWarning, match="6 log-probs or signals are not finite"), loop:
        take_steps(loop, [{"logp_train": nothing, "logp_rollout": nothing}])
    points = points_of(loop.rows)
    assert points["rollout/num_nonfinite", 0] == 6
    assert ("rollout/kl_k3", 0) not in points


def test_log_probs_of_the_old_policy_are_told_as_such() -> None:
    with told() as messages, Loop("plain", RolloutMismatchCallback(k3_limits=None)) as loop:
        take_steps(loop, [{**constant(-0.19), "behaviour_is_old": True}, constant(0.0)])
    [message] = messages
    assert "nothing is known of the engine" in message


def test_a_warning_is_only_told_and_an_alarm_is_acted_on(tmp_path: Path) -> None:
    seen: list[MismatchAlarm] = []
    actions: list[Any] = ["stop", {"name": "record", "path": str(tmp_path / "alarms.jsonl")}, seen.append]
    callback = RolloutMismatchCallback(on_alarm=actions, k3_limits=None, cooldown_steps=0)
    match = r"step 2 .*: rollout_shift \(alarm\).*The last values: 0.06, 0.06, 0.2"
    with pytest.raises(TrainingStoppedError, match=match), Loop("plain", callback) as loop:
        take_steps(loop, [constant(0.06), constant(0.06), constant(0.2), constant(0.0)])
    assert [one.severity for one in seen] == ["warning", "warning", "alarm"]
    lines = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in lines] == [(n, "rollout_shift") for n in range(3)]


def test_learning_rates_are_lowered_for_a_while() -> None:
    lower = {"name": "lower_lr", "factor": 0.5, "num_steps": 2}
    callback = RolloutMismatchCallback(on_alarm=[lower], k3_limits=None)
    weights = []
    loop = Loop("plain", callback, optimizer=lambda parameters: [torch.optim.SGD(parameters, lr=0.1)])
    with loop:
        for observed in [constant(0.2), *[constant(0.0)] * 4]:
            take_steps(loop, [observed])
            weights.append(loop.model.weight.item())
    moves = [round(a - b, 6) for a, b in zip([1.0, *weights], weights, strict=False)]
    assert moves == pytest.approx([0.1, 0.05, 0.05, 0.1, 0.1], abs=1e-6)


def test_all_ranks_alarm_alike() -> None:
    options = {"on_alarm": [{"name": "lower_lr"}], "cooldown_steps": 2}
    first, second = run_distributed(run_observing, RolloutMismatchCallback, steps=4, options=options)
    assert first[2] == second[2]
    assert {alarm["kind"] for alarm in first[2]} == {"rollout_k3", "rollout_ln2"}
    assert same(first[1], second[1])


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"k3_limits": [0.05, 0.01]}, r"k3_limits=\[0.05, 0.01\]: expected the limit of the warning first"),
    ({"ess_limits": (0.3, 0.5)}, "ess_limits=.*warning first"),
    ({"shift_limits": (0.1,)}, "shift_limits=.*expected two numbers"),
    ({"k3_limits": "high"}, "k3_limits='high': expected two numbers"),
    ({"max_log_ratio": 0.0}, "max_log_ratio=0.0: expected a number above 0"),
    ({"ln2_share": 2.0}, "ln2_share=2.0: expected"),
    ({"ratio_bounds": (2.0, 5.0)}, "ratio_bounds=2.0"),
    ({"ratio_bounds": 5.0}, "ratio_bounds=5.0: expected two ratios"),
    ({"window": 2}, "window=2"),
    ({"cooldown_steps": -1}, "cooldown_steps=-1"),
    ({"on_alarm": ["shout"]}, "on_alarm: 'shout'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutMismatchCallback(**arguments)
