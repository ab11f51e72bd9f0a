"""A run of 47,000 quiet steps and one gradient of 250 times their norm, which cost 2.4 nats: every rule cuts it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference_thresholds import second_moment
from tests.test_thresholds import started

SPIKE = 53.7
#: Rule -> at most what the norm of the spike is cut to.
CUT_TO: dict[str, tuple[Any, float]] = {
    "robust_log": ("robust_log", 0.45),
    "robust_log of a total": ({"name": "robust_log", "min_ratio": 3.0}, 0.67),
    "mean_multiple": ("mean_multiple", 1.1),
    "quantile": ("quantile", 0.3),
    "zscore": ("zscore", 0.3),
    "fixed": ({"name": "fixed", "threshold": 1.0}, 1.0),
}


def _quiet(num_steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(47)
    return (0.21 + 0.03 * torch.randn(num_steps, 1, generator=generator)).clamp(min=0.05)


def _steps_until_twice(ratio: float, beta2: float) -> int:
    """Steps of the usual norm until v, which the spike has made `ratio` times as large, is twice what it was."""
    num_steps = 0
    while ratio > 2:
        ratio, num_steps = beta2 * ratio + 1 - beta2, num_steps + 1
    return num_steps


def _check(label: str, num_steps: int) -> None:
    spec, most = CUT_TO[label]
    norms, spike = _quiet(num_steps), torch.tensor([SPIKE])
    rule = started(spec, 1)
    for row in norms:
        rule.update(row)
    usual = norms[-1]
    before = rule.thresholds(usual).item()
    clipped = torch.minimum(rule.thresholds(spike), spike).item()
    assert 0.15 < clipped <= most
    rule.update(spike)
    assert rule.thresholds(usual).item() == pytest.approx(before, rel=0.03)
    # The next one, ten steps later, too.
    for row in norms[:10]:
        rule.update(row)
    assert rule.thresholds(spike).item() <= most
    _check_adam(norms.flatten().tolist(), clipped)


def _check_adam(norms: list[float], clipped: float) -> None:
    usual = sum(norm**2 for norm in norms) / len(norms)
    for beta2, pollution, lasts in ((0.95, 3000, 150), (0.999, 60, 4000)):
        without = second_moment([*norms, SPIKE], beta2=beta2)
        within = second_moment([*norms, clipped], beta2=beta2)
        assert without[-1] / without[-2] > pollution * 0.9
        assert within[-1] / within[-2] < 2.4
        assert _steps_until_twice(without[-1] / usual, beta2) > lasts
        assert _steps_until_twice(within[-1] / usual, beta2) <= 5
        assert within[-1] / within[-2] < 1 + (1 - beta2) * (clipped**2 / usual) * 1.5 + 0.01


@pytest.mark.parametrize("label", CUT_TO)
def test_the_spike_is_cut(label: str) -> None:
    _check(label, 1500)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("label", CUT_TO)
def test_the_spike_is_cut_after_47_000_steps(label: str) -> None:
    _check(label, 47_000)


def test_what_the_default_rule_spares_adam() -> None:
    norms, rule = _quiet(2000), started("robust_log", 1)
    for row in norms:
        rule.update(row)
    clipped = rule.thresholds(torch.tensor([SPIKE])).item()
    history = norms.flatten().tolist()
    usual = sum(norm**2 for norm in history) / len(history)
    found = {
        beta2: [second_moment([*history, norm], beta2=beta2)[-1] / usual for norm in (clipped, SPIKE)]
        for beta2 in (0.95, 0.999)
    }
    assert found[0.95] == pytest.approx([1.15, 3200], rel=0.05)
    assert found[0.999] == pytest.approx([1.003, 65], rel=0.05)
    assert [_steps_until_twice(ratio, 0.95) for ratio in found[0.95]] == [0, 158]
    lasting = _steps_until_twice(found[0.999][1], 0.999)
    assert lasting == pytest.approx(math.log(64) / 0.001, rel=0.02)
