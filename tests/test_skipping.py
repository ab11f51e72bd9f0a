"""Leaving out an optimizer's step: what an optimizer and its gradients hold before, meanwhile and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, LayerClipCallback, attach
from stabilizer.callbacks.suite import Suite
from stabilizer.skipping import drop_gradients_, skip_on_device, skips_on_device, stop_skipping
from tests.counting import HostReadError, fake_cuda, host_may_wait
from tests.models import TinyTransformer
from tests.skip_tools import NAN, OPTIMIZERS, changed, snapshot, train
from tests.tiny_loops import OneLayer, loss_at, no_log, told

FUSED = [name for name in OPTIMIZERS if name.endswith("fused")]


def weights(*, size: int = 64) -> nn.Module:
    """Two matrices, with gradients."""
    model = nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5 + number)
    return model


def spoil_(model: nn.Module) -> None:
    """Make all gradients NaN."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, NAN)


def fill_memory() -> None:
    """Leave numbers in what the allocator hands out next."""
    garbage = [torch.full((64, 64), 777.0) for _ in range(64)]
    del garbage


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [True, False])
def test_a_left_out_step_is_as_if_it_had_never_been(name: str, first: bool) -> None:
    """Compared with an optimizer that is never asked; at the very first step the state is not made yet."""
    models, optimizers = [], []
    for skips in (True, False):
        torch.manual_seed(0)
        model = weights()
        optimizer = OPTIMIZERS[name](model.parameters())
        if not first:
            optimizer.step()
        if skips:
            before = snapshot(model, optimizer)
            spoil_(model)
            fill_memory()
            if skips_on_device(optimizer):
                skip_on_device(optimizer, torch.tensor(True))
                optimizer.step()
                stop_skipping(optimizer)
            else:
                drop_gradients_(optimizer)
                optimizer.step()
            assert changed(before, snapshot(model, optimizer), absent_is_zero=name in FUSED) == []
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.5 + number)
        if skips_on_device(optimizer):
            skip_on_device(optimizer, torch.tensor(False))
        optimizer.step()
        stop_skipping(optimizer)
        models.append(model)
        optimizers.append(optimizer)
    skipping, never = (snapshot(*pair) for pair in zip(models, optimizers, strict=True))
    assert changed(never, skipping) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_can_be_told_on_the_device(name: str) -> None:
    assert skips_on_device(OPTIMIZERS[name](weights().parameters())) == (name in FUSED)


def test_one_group_that_is_not_fused_is_enough() -> None:
    first, second = weights().parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "fused": False}]
    assert not skips_on_device(torch.optim.AdamW(groups, fused=True))
    assert skips_on_device(torch.optim.AdamW([groups[0], {"params": [second]}], fused=True))


def test_a_first_step_has_no_dampening() -> None:
    """Zeros would be a momentum there: such an optimizer is kept from its step by the host."""
    model = weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    assert not skips_on_device(optimizer)


def test_two_flags_are_merged_and_a_scaler_s_own_stays() -> None:
    model = weights()
    optimizer: Any = OPTIMIZERS["adamw_fused"](model.parameters())
    for theirs in (0.0, 1.0):
        for ours in (False, True):
            optimizer.found_inf = torch.tensor(theirs)
            skip_on_device(optimizer, torch.tensor(ours))
            assert float(optimizer.found_inf) == max(theirs, float(ours))
            stop_skipping(optimizer)
            assert hasattr(optimizer, "found_inf"), "it is for the scaler to take it away"
            del optimizer.found_inf
    skip_on_device(optimizer, torch.tensor(True))
    assert float(optimizer.found_inf) == 1.0
    stop_skipping(optimizer)
    assert not hasattr(optimizer, "found_inf")


class SeesFlag:
    """Between the stabilizer's hook and the step itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.flags: list[float | None] = []
        optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: Any, *_: Any) -> None:
        flag = getattr(optimizer, "found_inf", None)
        self.flags.append(None if flag is None else float(flag))


@pytest.mark.parametrize("name", FUSED)
def test_the_flag_is_there_during_the_step_only(name: str) -> None:
    model = OneLayer()
    optimizer = OPTIMIZERS[name](model.parameters())
    with told(), attach(None, model=model, optimizer=optimizer, callbacks=[LayerClipCallback()], log=no_log):
        seen = SeesFlag(optimizer)
        for value in (1.0, NAN, 1.0):
            loss_at(model, value).backward()
            optimizer.step()
            assert not hasattr(optimizer, "found_inf")
            optimizer.zero_grad()
    # A CPU is read at no cost: nothing is said where nothing is skipped.
    assert seen.flags == [None, 1.0, None]


@pytest.mark.parametrize("max_norm", [None, 1e9])
def test_a_step_that_raises_leaves_no_flag(max_norm: float | None) -> None:
    model = OneLayer()
    optimizer: Any = OPTIMIZERS["adamw_fused"](model.parameters())

    def fail(*_: Any) -> None:
        raise ArithmeticError("not mine")

    with told(), attach(None, model=model, optimizer=optimizer, callbacks=[LayerClipCallback()], log=no_log) as handle:
        hook = optimizer.register_step_pre_hook(fail)
        loss_at(model, NAN).backward()
        with pytest.raises(ArithmeticError):
            optimizer.step()
        hook.remove()
        optimizer.zero_grad()
        assert not hasattr(optimizer, "found_inf")
        before = snapshot(model, optimizer)
        loss_at(model, 1.0).backward()
        if max_norm is not None:
            handle.measure()
        optimizer.step()
        assert "weight" in changed(before, snapshot(model, optimizer))


def matrices() -> nn.Module:
    """What Muon takes: matrices alone."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    return model


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_muon_skips_without_a_trace() -> None:
    results = []
    for faults in ({0: NAN, 2: NAN}, {}):
        torch.manual_seed(0)
        model = matrices()
        optimizer = torch.optim.Muon(model.parameters(), lr=0.05, weight_decay=0.1)
        with told(), attach(None, model=model, optimizer=optimizer, callbacks=[LayerClipCallback()], log=no_log):
            for step in range(4):
                if not faults and step in (0, 2):
                    continue
                before = snapshot(model, optimizer)
                inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
                (model(inputs).square().mean() * faults.get(step, 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert bool(changed(before, snapshot(model, optimizer))) == (step not in faults)
        results.append(snapshot(model, optimizer))
    assert changed(*results) == []


def fake_suite(*callbacks: Any, fused: bool) -> Suite:
    """A suite on a device that has no values, after its first step."""
    with host_may_wait():
        with torch.device("cuda"):
            model = TinyTransformer(num_layers=1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        sink: Any = type("Sink", (), {"is_logging": False})()
        suite = Suite(callbacks, model=model, optimizer=optimizer, sink=sink)
        step(suite)
        # Not earlier: what is not fused has to read, and there is nothing to be read here.
        optimizer.param_groups[0]["fused"] = fused
    return suite


def step(suite: Suite, *, is_scaled: bool = False) -> Tensor | None:
    """One step of a suite; the flag that the optimizer would see."""
    suite.run(is_scaled=is_scaled)
    suite.before_step()
    flag = getattr(suite.optimizer, "found_inf", None)
    suite.finish()
    return flag


ZERO: list[dict[str, Any]] = [
    {"on_spike": "clip", "on_nonfinite": "zero_layer"},
    {"on_spike": "zero_layer", "on_nonfinite": "ignore"},
]


@pytest.mark.parametrize("options", [{}, {"on_spike": "skip_step"}, *ZERO])
@pytest.mark.parametrize("fused", [True, False])
def test_on_a_device_nothing_waits_but_the_skip_of_what_is_not_fused(options: dict[str, Any], fused: bool) -> None:
    """Reads of a fake device raise."""
    skips = "skip_step" in {"on_spike": "clip", "on_nonfinite": "skip_step", **options}.values()
    with fake_cuda(), told():
        suite = fake_suite(LayerClipCallback(strict=True, **options), GradNormCallback(), fused=fused)
        # At every 16th step a count that was copied 16 steps ago is fetched.
        for number in range(1, 16):
            if skips and not fused:
                with pytest.raises(HostReadError):
                    step(suite, is_scaled=number % 2 == 0)
                return
            flag = step(suite, is_scaled=number % 2 == 0)
            assert (flag is not None) == skips
            assert flag is None or flag.device.type == "cuda"
            assert not hasattr(suite.optimizer, "found_inf")


@pytest.mark.parametrize(("fused", "num_warnings"), [(True, 0), (False, 1)])
def test_waiting_is_said_once_with_the_way_out(fused: bool, num_warnings: int) -> None:
    with fake_cuda(), told() as messages:
        suite = fake_suite(AdaptiveClipThreshold(strict=True), fused=fused)
        for _ in range(3):
            if fused:
                step(suite)
                continue
            with pytest.raises(HostReadError):
                step(suite)
            suite.abandon()
    assert len(messages) == num_warnings
    assert all("AdamW cannot be told on the device" in text and "fused=True" in text for text in messages)


@pytest.mark.filterwarnings("error")
def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    run = train("plain", [LayerClipCallback()], num_steps=3, optimizer="adamw")
    assert run.warnings == []
