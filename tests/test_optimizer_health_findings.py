"""What OptimizerHealth finds: each made by hand, and nothing where nothing is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import attach
from tests.health_loops import HealthCallback, TwinLoop
from tests.loggers import points_of


def _random(loop: TwinLoop, *, factors: dict[str, float] | None = None) -> None:
    loop.step(**{key: (factors or {}).get(key, 1.0) * torch.randn(1, loop.weight(key).numel()) for key in loop.model})


def _adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 1e-3, **options})


def test_healthy_gradients_find_nothing() -> None:
    callback = HealthCallback(every_n_steps=2, warmup_steps=20)
    with TwinLoop(callback, make=_adamw(), a=200, b=300, c=50) as loop:
        for step in range(300):
            # A level that falls, and one that rises for good.
            _random(loop, factors={"a": 1 / (1 + step / 20), "b": 1.0 if step < 150 else 10.0})
            loop.optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 2) / 20) * (1 - step / 400)
    assert [(finding.kind, finding.step) for finding in callback.findings if finding.step != 150] == []


def test_a_spike_is_announced_and_its_trace_followed() -> None:
    callback = HealthCallback(every_n_steps=1, warmup_steps=10, cooldown_steps=10**6)
    with TwinLoop(callback, make=_adamw(betas=(0.9, 0.95)), a=400, b=300) as loop:
        for step in range(80):
            factors = {"a": 100.0 if step == 60 else 1.0, "b": 1.0}
            loop.step(**{key: f * torch.randn(1, loop.weight(key).numel()).sign() for key, f in factors.items()})
        second = loop.optimizer.state[loop.weight("a")]["exp_avg_sq"]

    def second_at(step: int) -> float:
        """Of gradients of 1 and one of 100, divided by 1 - beta2^t."""
        squares = [100.0**2 if at == 60 else 1.0 for at in range(step + 1)]
        kept = sum(0.05 * 0.95 ** (step - at) * square for at, square in enumerate(squares))
        return float(kept / (1 - 0.95 ** (step + 1)))

    outdated, polluted = callback.findings
    assert (outdated.kind, outdated.step, outdated.layers) == ("second_moment_outdated", 60, ("a",))
    # Nearly all of v is this spike: g^2 / v is nearly 1 / (1 - beta2).
    assert outdated.evidence["rms"] == pytest.approx(math.sqrt(100**2 / second_at(60)), rel=1e-5)
    assert (polluted.kind, polluted.step, polluted.layers) == ("second_moment_polluted", 61, ("a",))
    assert polluted.evidence["ratio"] == pytest.approx(second_at(61), rel=1e-5)
    # Steps until it is twice as large as before, from the step after the spike.
    assert polluted.evidence["steps_left"] == math.ceil(math.log(second_at(61) - 1) / -math.log(0.95))
    assert float(second.mean()) == pytest.approx(second_at(79) * (1 - 0.95**80), rel=1e-4)
    assert "beta2" in polluted.remedy


@pytest.mark.parametrize(("beta2", "kinds"), [(0.999, []), (0.95, ["second_moment_outdated"])])
def test_a_second_moment_of_the_first_steps_announces_nothing(beta2: float, kinds: list[str]) -> None:
    callback = HealthCallback(warmup_steps=10)
    with TwinLoop(callback, make=_adamw(betas=(0.9, beta2)), a=400) as loop:
        for step in range(61):
            loop.step(a=(5.0 if step == 60 else 1.0) * torch.randn(1, 400).sign())
    # The figure is there all the same.
    assert loop.values("optimizer/rms_g2_v/a")[60] > 2.3
    assert callback.kinds == kinds


def test_a_rate_that_a_checkpoint_did_not_bring_back_is_a_jump() -> None:
    first, second = HealthCallback(every_n_steps=50), HealthCallback(every_n_steps=50)
    with TwinLoop(first, make=_adamw(lr=1e-5), a=20) as loop:
        for _ in range(4):
            _random(loop)
    second.load_state_dict(first.state_dict())
    with TwinLoop(second, make=_adamw(lr=1e-3), a=20) as loop:
        _random(loop)
    [finding] = second.findings
    assert (finding.kind, finding.step) == ("learning_rate_jump", 4)
    assert finding.evidence["factor"] == pytest.approx(100)


def test_a_second_moment_is_back_when_it_was_said_to_be() -> None:
    callback = HealthCallback(every_n_steps=1, warmup_steps=10, cooldown_steps=0)
    seconds = []
    with TwinLoop(callback, make=_adamw(betas=(0.9, 0.9)), a=2000) as loop:
        for step in range(120):
            _random(loop, factors={"a": 60.0 if step == 60 else 1.0})
            seconds.append(float(loop.optimizer.state[loop.weight("a")]["exp_avg_sq"].mean()))
    first = next(finding for finding in callback.findings if finding.kind == "second_moment_polluted")
    usual = np.median(seconds[40:60])
    back = next(step for step in range(61, 120) if seconds[step] <= 2 * usual)
    assert back - first.step == pytest.approx(first.evidence["steps_left"], abs=2)
    told = [finding.step for finding in callback.findings if finding.kind == "second_moment_polluted"]
    # It is found as long as it is ten times too large, and never becomes usual.
    assert told == list(range(61, next(step for step in range(61, 120) if seconds[step] < 10 * usual)))


def test_rows_that_have_fallen_silent_are_found_before_they_jump() -> None:
    # A beta2 of 0.98 forgets in a few hundred steps.
    model: Any = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 1, bias=False).requires_grad_(False))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01, betas=(0.5, 0.98), weight_decay=0.0)
    callback = HealthCallback(every_n_steps=10, warmup_steps=100, cooldown_steps=10**6, limits={"silent_share": 0.33})
    moved: dict[int, float] = {}
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: None):
        for step in range(700):
            optimizer.zero_grad()
            # Rows 20 to 29 are there for the first 100 steps only, and row 25 once more at the end.
            tokens = torch.arange(30 if step < 100 else 20)
            if step == 699:
                tokens = torch.cat([tokens, torch.tensor([25])])
            # Gradients of one size.
            (model(tokens) * torch.randn(len(tokens), 1).sign()).sum().backward()
            before = model[0].weight.detach().clone()
            optimizer.step()
            moved[step] = float((model[0].weight.detach() - before)[25].abs().max()) / 0.01
    [finding] = callback.findings
    assert (finding.kind, finding.layers) == ("silent_rows", ("0",))
    assert finding.evidence["num_silent"] == 10
    assert finding.evidence["share"] == pytest.approx(1 / 3)
    # When a usual gradient makes nine tenths of the step: v is (1 / 0.9^2 - 1) 0.02 / 0.98 of its square by then.
    expected = 99 + math.log((1 / 0.81 - 1) * 0.02 / 0.98 / (1 - 0.98**100)) / math.log(0.98)
    assert 0 <= finding.step - expected < 10
    assert finding.evidence["first_step"] == pytest.approx(0.5 / math.sqrt(0.02))
    assert moved[698] < 1e-3
    assert moved[699] == pytest.approx(finding.evidence["first_step"], rel=0.02)


def test_a_smaller_beta2_has_no_silent_rows() -> None:
    model: Any = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    callback, rows = HealthCallback(every_n_steps=50), []
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: rows.append(row)):
        for step in range(301):
            optimizer.zero_grad()
            tokens = torch.arange(10 if step < 20 else 5)
            (model(tokens) * torch.randn(len(tokens), 1)).sum().backward()
            optimizer.step()
    assert points_of(rows)["optimizer/rows_silent/0", 300] == 0.5
    assert callback.findings == []


@pytest.mark.parametrize("every_n_steps", [1, 7])
def test_a_jump_of_the_learning_rate_is_found_at_its_step(every_n_steps: int) -> None:
    callback = HealthCallback(every_n_steps=every_n_steps, warmup_steps=10)
    with TwinLoop(callback, make=_adamw(), a=200, b=100) as loop:
        for step in range(60):
            loop.optimizer.param_groups[0]["lr"] = 1e-2 if step == 40 else 1e-3
            _random(loop)
    [finding] = callback.findings
    assert (finding.kind, finding.step) == ("learning_rate_jump", 40)
    assert finding.evidence["factor"] == pytest.approx(10)
    assert finding.evidence["update_ratio"] == pytest.approx(10, rel=0.3)
    assert finding.evidence["norm_ratio"] == pytest.approx(1, rel=0.3)


def test_a_rate_that_we_lower_ourselves_is_no_jump() -> None:
    class Lowers(HealthCallback):
        lowers_lr = True

        def on_gradients(self, context: Any) -> None:
            """Halve twice, and a half of that."""
            super().on_gradients(context)
            if context.step == 30:
                context.plan.scale_lr(0.1)

    callback = Lowers(every_n_steps=5)
    with TwinLoop(callback, make=_adamw(), a=200, b=100) as loop:
        for _ in range(40):
            _random(loop)
    assert callback.findings == []


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_that_bfloat16_swallows(name: str) -> None:
    make = _adamw(lr=1e-3, weight_decay=0.0) if name == "adamw" else lambda p: torch.optim.SGD(p, lr=1e-3)
    callback = HealthCallback(every_n_steps=2)
    shares = {}
    with TwinLoop(callback, make=make, dtype=torch.bfloat16, a=64, b=64) as loop:
        with torch.no_grad():
            loop.weight("a").copy_(torch.linspace(0.01, 4, 64))
        for step in range(5):
            before = loop.weights
            gradients = {key: torch.randn(1, 64).bfloat16() for key in "ab"}
            gradients["b"][:, :40] = 0  # nothing to move these by
            loop.step(**gradients)
            still = [(loop.weights[key] == before[key])[gradients[key] != 0] for key in "ab"]
            shares[step] = float(torch.cat(still).double().mean())
    assert 0.3 < shares[0] < 1
    found = loop.values("optimizer/swallowed_updates")
    assert found == pytest.approx({step: shares[step] for step in (0, 2, 4)})
    assert callback.kinds == ["swallowed_updates"]
    assert callback.findings[0].evidence["share"] == pytest.approx(shares[0])


def test_float32_swallows_nothing_that_is_told() -> None:
    callback = HealthCallback()
    with TwinLoop(callback, make=_adamw(), a=64) as loop:
        _random(loop)
    assert loop.values("optimizer/swallowed_updates") == {}


def test_gradients_that_bfloat16_swallows_while_they_are_added_up() -> None:
    model = nn.Linear(32, 1, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    callback, rows = HealthCallback(every_n_steps=2), []
    expected = {}
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: rows.append(row)):
        for step in range(4):
            optimizer.zero_grad()
            parts: list[Tensor] = [10.0 ** (2 - number) * torch.randn(1, 32).bfloat16() for number in range(5)]
            total, num_lost = parts[0].clone(), 0
            for number, part in enumerate(parts):
                model(part).sum().backward()
                if number:
                    num_lost += int((total + part == total).sum())
                    total = total + part
            assert torch.equal(torch.as_tensor(model.weight.grad), total)
            expected[step] = num_lost / (4 * 32)
            optimizer.step()
    points = points_of(rows)
    found = {step: value for (tag, step), value in points.items() if tag == "optimizer/swallowed_gradients"}
    assert found == pytest.approx({step: expected[step] for step in (0, 2)})
    assert 0.1 < expected[0] < 1
    assert "swallowed_gradients" in callback.kinds
    assert not model.weight._backward_hooks


def test_other_optimizers_have_what_applies() -> None:
    callback = HealthCallback()
    with TwinLoop(callback, make=lambda p: torch.optim.Muon(p, lr=0.1), a=6, b=4) as loop:
        [text] = callback.health.limitations()
        assert text.startswith("Muon has no second moment")
        _random(loop)
    assert {tag.rsplit("/", 1)[0] for tag, _ in loop.points} == {"optimizer/update_norm", "optimizer/update_ratio"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_enters_nothing(value: float) -> None:
    states = []
    for is_bad in (False, True):
        torch.manual_seed(0)
        callback = HealthCallback(warmup_steps=5)
        with TwinLoop(callback, make=_adamw(), a=40, b=30) as loop:
            for _ in range(10):
                _random(loop)
            if is_bad:
                before = loop.weights
                moments: Sequence[Any] = list(loop.optimizer.state.values())
                kept = [{key: one.clone() for key, one in state.items()} for state in moments]
                loop.step(a=value, b=1.0)
                # As if nothing had been.
                with torch.no_grad():
                    for key, weight in before.items():
                        loop.weight(key).copy_(weight)
                    for state, old in zip(moments, kept, strict=True):
                        state.update(old)
            for _ in range(5):
                _random(loop)
            states.append(callback.health.state_dict())
    assert states[0]["optimizers"]["0"]["history"] == states[1]["optimizers"]["0"]["history"]
