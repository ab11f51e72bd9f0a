"""UpdateClipCallback in plain loops: against float64, after all kinds of optimizers, and what it leaves alone."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from stabilizer.callbacks import GradNormCallback, LayerClipCallback, StabilizerCallback, UpdateClipCallback, attach
from stabilizer.callbacks.replays import Replays
from stabilizer.callbacks.run_host import RunHost
from stabilizer.callbacks.update_hooks import AfterStep
from stabilizer.errors import StabilizerWarning
from tests.clip_loops import HandLoop
from tests.health_loops import OPTIMIZERS, HealthCallback, TwinLoop
from tests.reference_optimizer import clipped


def test_observing_measures_at_its_interval_only(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = stabilizer_copies()

    def counted(tensors: Any, **options: Any) -> Any:
        copied.append(len(tensors))
        return real(tensors, **options)

    monkeypatch.setattr("stabilizer.callbacks.update_meter.copies", counted)
    callback = UpdateClipCallback(max_rms=0.01, every_n_steps=3)
    other = GradNormCallback()
    with HandLoop(callback, learning_rate=0.5, a=4, b=9) as loop, HandLoop(other, learning_rate=0.5, a=4, b=9) as plain:
        for _ in range(7):
            loop.step(a=2.0, b=1.0)
            plain.step(a=2.0, b=1.0)
    assert copied == [2, 2, 2]
    assert all(torch.equal(value, plain.weights[key]) for key, value in loop.weights.items())
    assert list(loop.values("update_clip/rms/a")) == [0, 3, 6]
    assert loop.values("update_clip/coefficient/a")[3] == pytest.approx(0.01)


def stabilizer_copies() -> Any:
    """What the callback copies parameters with."""
    from stabilizer.optimizer_health import copies

    return copies


@pytest.mark.parametrize("name", ["adamw_fused", "adamw_foreach"])
def test_a_skipped_step_is_none(name: str) -> None:
    callback = UpdateClipCallback(max_rms=0.5, mode="act", every_n_steps=1)
    clip = LayerClipCallback(every_n_steps=1)
    with HandLoop(callback, clip, make=OPTIMIZERS[name], a=4, b=9) as loop:
        loop.step(a=1.0, b=1.0)
        before, state = loop.weights, copy.deepcopy(loop.optimizer.state_dict()["state"])
        loop.step(a=math.nan, b=1.0)
        assert all(torch.equal(value, before[key]) for key, value in loop.weights.items())
        for number, values in loop.optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, state[number][key]) for key, value in values.items())
        loop.step(a=1.0, b=1.0)
    assert list(loop.values("update_clip/rms/a")) == [0, 2]
    # The skipped step counts as one that was not clipped: adaptive steps of an RMS of 1 were, all of them.
    assert loop.values("update_clip/rate") == pytest.approx({0: 1.0, 1: 0.5, 2: 2 / 3})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_left_and_told_once(value: float) -> None:
    callback = UpdateClipCallback(max_rms=0.5, mode="act", every_n_steps=2)
    with warnings.catch_warnings(record=True) as told, TwinLoop(callback, make=OPTIMIZERS["sgd"], a=4, b=9) as loop:
        warnings.simplefilter("always")
        loop.step(a=1.0, b=1.0)
        for _ in range(6):
            before, free, now = loop.twin_step(a=value, b=10.0)
            assert torch.equal(now["a"].nan_to_num(-1.0), free["a"].nan_to_num(-1.0))
            assert not free["a"].isfinite().any()
            expected = clipped(before, free, lambda key: key, max_rms=0.5, rates={"a": 0.05, "b": 0.05})
            assert now["b"].double().numpy() == pytest.approx(expected["b"], rel=2e-7)
            assert not torch.equal(now["b"], free["b"])
    [message] = [str(one.message) for one in told if issubclass(one.category, StabilizerWarning)]
    assert "has moved ['a'] (1 layers in all) by an update that is not finite" in message
    assert list(loop.values("update_clip/rms/a")) == [0]
    assert list(loop.values("update_clip/rms/b")) == [0, 2, 4, 6]


def test_a_huge_update_leaves_digits_of_the_parameter() -> None:
    callback = UpdateClipCallback(max_rms=1.0, mode="act", every_n_steps=1)
    with TwinLoop(callback, learning_rate=1e-3, a=6) as loop:
        before, free, now = loop.twin_step(a=1e15)
        assert float((free["a"] - before["a"]).abs().min()) > 1e11
        expected = clipped(before, free, lambda key: key, max_rms=1.0, rates={"a": 1e-3})
        assert now["a"].double().numpy() == pytest.approx(expected["a"], rel=2e-7)


def test_a_rate_that_jumps_behind_our_back_is_held() -> None:
    """The unit is the rate when the gradients were complete."""
    callback = UpdateClipCallback(max_rms=1.0, mode="act", every_n_steps=1)
    with HandLoop(callback, make=OPTIMIZERS["adamw_foreach"], a=6) as loop:
        for step in range(6):
            if step == 4:

                def jump(optimizer: Any, *_: Any) -> None:
                    optimizer.param_groups[0]["lr"] = 1.0

                loop.optimizer.register_step_pre_hook(jump)
            before = loop.weights["a"]
            loop.step(a=1.0)
            moved = float((loop.weights["a"] - before).double().square().mean().sqrt())
            if step == 4:
                assert moved == pytest.approx(0.01, rel=1e-5)
    assert loop.values("update_clip/rms/a")[4] == pytest.approx(100, rel=0.01)
    assert loop.values("update_clip/rms/a")[5] == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_rate_of_zero_is_no_step(rate: Any) -> None:
    callback = UpdateClipCallback(mode="act", every_n_steps=1)
    make = lambda p: torch.optim.AdamW(p, lr=rate, foreach=False)  # noqa: E731
    with HandLoop(callback, make=make, a=6) as loop:
        loop.step(a=1.0)
    assert loop.values("update_clip/rms/a") == {0: 0.0}
    assert loop.values("update_clip/coefficient/a") == {0: 1.0}


def test_parameters_of_half_precision_are_rounded_once() -> None:
    callback = UpdateClipCallback(max_rms=0.5, mode="act", every_n_steps=1)
    make = lambda p: torch.optim.SGD(p, lr=1.0)  # noqa: E731
    with TwinLoop(callback, make=make, dtype=torch.bfloat16, a=64) as loop:
        before, free, now = loop.twin_step(a=100.0)
    expected = clipped(before, free, lambda key: key, max_rms=0.5, rates={"a": 1.0})["a"]
    assert now["a"].dtype == torch.bfloat16
    assert torch.equal(now["a"], torch.from_numpy(expected).to(torch.bfloat16))


def test_only_the_layers_that_were_asked_for() -> None:
    callback = UpdateClipCallback(max_rms=0.1, mode="act", every_n_steps=1, layers=["b"])
    with TwinLoop(callback, learning_rate=0.1, a=4, b=9) as loop:
        _, free, now = loop.twin_step(a=100.0, b=100.0)
    assert torch.equal(now["a"], free["a"])
    assert not torch.equal(now["b"], free["b"])
    assert {tag for tag, _ in loop.points if "rms" in tag} == {"update_clip/rms/b"}


def test_an_optimizer_without_the_layers_that_were_asked_for() -> None:
    model: Any = nn.ModuleDict({name: nn.Linear(4, 1, bias=False) for name in "ab"})
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"]
    clip = UpdateClipCallback(max_rms=0.5, mode="act", every_n_steps=1, layers=["b"], strict=True)
    health, rows = HealthCallback(layers=["b"]), []
    with attach(None, model=model, optimizer=optimizers, callbacks=[clip, health], log=lambda *row: rows.append(row)):
        for optimizer in optimizers:
            for layer in model.values():
                layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
    tags = {tag for values, _ in rows for tag in values}
    assert "opt1/update_clip/rms/b" in tags
    assert "opt1/optimizer/update_norm/b" in tags
    assert not any("/a" in tag or not tag.startswith("opt1/") for tag in tags)


def test_the_outermost_step_is_the_step() -> None:
    class Projected(torch.optim.SGD):
        """Does more after the step of its base, within the same call."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            """SGD, and then all elements are 8."""
            found = super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    p.fill_(8.0)
            return found

    class Owner:
        """Notes where the parameter is when it is called."""

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def moved(self, number: int, optimizer: torch.optim.Optimizer) -> None:
            """Called by the hook."""
            self.seen.append((number, module.weight.tolist()))

    module, owner = nn.Linear(2, 1, bias=False), Owner()
    # From the first optimizer of a class on, torch calls the hooks in its `step`: in that of the base here too.
    torch.optim.SGD(module.parameters())
    optimizer = Projected(module.parameters(), lr=1.0)
    undo: list[Any] = []
    host = RunHost("plain", None, module, [optimizer], Replays([]), undo)
    hooks = AfterStep(owner, "moved")
    for _ in range(2):
        assert hooks.watch(host, 0) is optimizer
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
    assert owner.seen == [(0, [[8.0, 8.0]])] * 2
    while undo:
        undo.pop()()
    optimizer.step()
    assert len(owner.seen) == 2
    hooks.watch(host, 0)  # of another run
    optimizer.step()
    assert len(owner.seen) == 3


@pytest.mark.parametrize(
    ("argument", "value"),
    [("max_rms", 0.0), ("max_rms", "1"), ("max_rms", math.inf), ("relative_to", "loss"), ("mode", "on")],
)
def test_bad_arguments_are_one_error(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{argument}="):
        UpdateClipCallback(**{argument: value})


def test_limitations_say_what_it_costs_and_what_sgd_means() -> None:
    acting, other = UpdateClipCallback(mode="act"), UpdateClipCallback(name="b", relative_to="parameter")
    with HandLoop(acting, other, learning_rate=0.1, a=4):
        assert ["copy" in text for text in acting.limitations(None)] == [True, False]
        assert 'relative_to="parameter"' in acting.limitations(None)[1]
        assert other.limitations(None) == []


def test_it_is_off_the_optimizer_when_the_run_is_over() -> None:
    callback: StabilizerCallback = UpdateClipCallback(mode="act")
    with HandLoop(callback, learning_rate=0.1, a=4) as loop:
        loop.step(a=1.0)
        assert len(loop.optimizer._optimizer_step_post_hooks) == 2
    assert len(loop.optimizer._optimizer_step_post_hooks) == 0
