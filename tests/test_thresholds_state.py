"""Threshold rules on a device: no wait, fixed storage, few operators; saved, restored and copied."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stabilizer.thresholds import LayerThresholds, ThresholdRule
from tests.counting import HostReadError, count_collectives, fake_cuda, host_may_wait
from tests.test_thresholds import SPECS, hard_norms, run, started

NAMES = ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
#: Several rules over one vector of norms, in an order of their own.
MIXED: dict[str, Any] = {
    "rule": "robust_log",
    "rules": {r"blocks\.[12]": "mean_multiple", "embed": "zscore", "head": {"name": "quantile", "window": 100}},
    "min_norm": 0.01,
    "warmup_cap": 1.0,
    "max_threshold": 1e6,
}


def layered(device: str = "cpu", **options: Any) -> LayerThresholds:
    return LayerThresholds(NAMES, **{**MIXED, **options}, device=device)


def run_layers(thresholds: LayerThresholds, norms: Tensor, start: int = 0) -> Tensor:
    rows = []
    for step, row in enumerate(norms, start):
        rows.append(thresholds.thresholds(row, step=step))
        thresholds.update(row, valid=torch.tensor(True))
    return torch.stack(rows)


# No wait for the device.


@pytest.mark.parametrize("label", SPECS)
def test_a_rule_never_makes_the_host_wait(label: str) -> None:
    with fake_cuda(), count_collectives() as collectives:
        rule = started(SPECS[label], 0)
        rule.start(3, device="cuda:0")
        with torch.device("cuda", 0):
            norms, valid = torch.ones(3), torch.ones(3, dtype=torch.bool)
        for _ in range(2):
            found = [rule.thresholds(norms), rule.typical, rule.is_warm, rule.num_accepted]
            rule.update(norms)
            rule.update(norms, valid=valid)
            rule.update(norms, valid=valid[0])
        assert {value.device.type for value in found} == {"cuda"}
        with pytest.raises(HostReadError):
            found[0].tolist()
    assert len(collectives) == 0


def test_layers_of_several_rules_never_make_the_host_wait() -> None:
    with fake_cuda():
        thresholds = layered("cuda:0", rules={**MIXED["rules"], "blocks.0": {"name": "fixed", "threshold": 1.0}})
        with torch.device("cuda", 0):
            norms, valid = torch.ones(5), torch.ones(5, dtype=torch.bool)
        for step in range(2):
            found = thresholds.thresholds(norms, step=step)
            thresholds.update(norms)
            thresholds.update(norms, valid=valid)
            found = torch.stack([found, thresholds.typical, thresholds.is_warm, thresholds.num_accepted])
        assert found.device.type == "cuda"
        with host_may_wait():
            thresholds.state_dict()


class _Operators(TorchDispatchMode):
    """Counts what would be a kernel on a device: everything but views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_layers", [1, 40, 400])
def test_a_step_of_the_default_rule_is_under_sixty_kernels(num_layers: int) -> None:
    rule = started("robust_log", num_layers)
    norms = torch.rand(num_layers) + 0.5
    run(rule, norms.expand(60, -1))
    with _Operators() as operators:
        rule.thresholds(norms)
        rule.update(norms)
    assert 20 < sum(operators.found.values()) < 60, operators.found


# Storage.


def _pointers(rule: ThresholdRule) -> dict[str, int]:
    return {name: getattr(rule, name).data_ptr() for name in rule.state_dict()}


@pytest.mark.parametrize("label", SPECS)
def test_the_state_stays_where_it_is(label: str) -> None:
    rule = started(SPECS[label], 8)
    pointers = _pointers(rule)
    run(rule, hard_norms(200))
    assert _pointers(rule) == pointers
    rule.load_state_dict(started(SPECS[label], 8).state_dict())
    run(rule, hard_norms(5))
    assert _pointers(rule) == pointers


@pytest.mark.parametrize("label", SPECS)
def test_a_rule_started_in_inference_mode_goes_on_outside(label: str) -> None:
    with torch.inference_mode():
        rule = started(SPECS[label], 8)
        run(rule, hard_norms(10))
    norms = hard_norms(10).requires_grad_()
    found = run(rule, norms)
    assert not any(value.requires_grad for value in rule.state_dict().values())
    assert found.shape == (10, 8)


# Saved, restored, copied.


def _reloaded(rule: ThresholdRule, label: str) -> ThresholdRule:
    state = rule.state_dict()
    assert all(value.device.type == "cpu" for value in state.values())
    fresh = started(SPECS[label], 8)
    run(fresh, hard_norms(30))
    fresh.load_state_dict(state)
    for value in state.values():
        value.fill_(7)
    return fresh


COPIES = {
    "state_dict": _reloaded,
    "deepcopy": lambda rule, label: copy.deepcopy(rule),
    "pickle": lambda rule, label: pickle.loads(pickle.dumps(rule)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("label", SPECS)
def test_resumed_runs_are_the_same_bit_for_bit(label: str, how: str) -> None:
    norms = hard_norms(300)
    for middle in (3, 60, 260) if how == "state_dict" else (260,):
        rule = started(SPECS[label], 8)
        run(rule, norms[:middle])
        other = COPIES[how](rule, label)
        assert torch.equal(run(rule, norms[middle:]), run(other, norms[middle:]))
        assert torch.equal(rule.num_accepted, other.num_accepted)
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in rule.state_dict().items())


def test_resumed_layers_are_the_same_bit_for_bit() -> None:
    norms = hard_norms(300)[:, 3:]
    whole = layered()
    expected = run_layers(whole, norms)
    for middle in (3, 30, 260):
        first, second = layered(), layered()
        found = run_layers(first, norms[:middle])
        run_layers(second, norms[:20].flip(0))
        pointers = [_pointers(rule) for rule, _ in second.parts]
        state = first.state_dict()
        before = copy.deepcopy(state)
        second.load_state_dict(state)
        assert [_pointers(rule) for rule, _ in second.parts] == pointers
        assert repr(state) == repr(before)
        found = torch.cat([found, run_layers(second, norms[middle:], middle)])
        assert torch.equal(found, expected)
    # What a checkpoint read with weights_only may hold.
    assert set(state) == {"layers", "rules"}
    assert {key: type(value) for key, value in state["rules"][0].items()} == {
        "describe": str,
        "warmup_steps": int,
        "positions": list,
        "state": dict,
    }


def test_a_state_that_does_not_fit_is_refused_as_a_whole() -> None:
    rule = started("mean_multiple", 3)
    run(rule, torch.rand(60, 3) + 0.1)
    before = rule.state_dict()
    fewer = started("mean_multiple", 2).state_dict()
    for state in ({}, fewer, started("zscore", 3).state_dict(), {**before, "extra": torch.ones(3)}):
        with pytest.raises(ValueError, match=r"mean_multiple\(k=5.0.*the saved state has .*expected"):
            rule.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in rule.state_dict().items())
