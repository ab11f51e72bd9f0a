"""Clips at their edges: layers that come and go, proposals that are wrong, steps that fail."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer import tags
from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, StabilizerCallback, StepContext, attach
from tests.clip_loops import HandLoop, fixed, norms_of
from tests.lightning_models import make_module, make_trainer
from tests.models import loss_of
from tests.skip_tools import NAN, OPTIMIZERS, spoiled
from tests.tiny_loops import HOSTS, Loop, loss_at, no_log, told

# Layers that are frozen and unfrozen.


def freeze(loop: HandLoop, frozen: str, others: float) -> dict[str, float | None]:
    """Freeze one layer and no other; the norms of a step then."""
    for name, layer in loop.model.items():
        layer.requires_grad_(name != frozen)
    return {name: None if name == frozen else others for name in loop.model}


def test_limits_of_elements_stay_with_their_layers() -> None:
    """The number of layers is the same before and after."""
    with told(), HandLoop(LayerClipCallback(clip_value={"a": 1e-3}, strict=True), a=3, b=2, c=4) as loop:
        received = loop.step(**freeze(loop, "c", 1.0))
        assert norms_of(received) == pytest.approx({"a": 1e-3 * math.sqrt(3), "b": 1.0, "c": 0.0})
        received = loop.step(**freeze(loop, "a", 1.0))
        assert norms_of(received) == pytest.approx({"a": 0.0, "b": 1.0, "c": 1.0})
        received = loop.step(**freeze(loop, "b", 1.0))
        assert norms_of(received) == pytest.approx({"a": 1e-3 * math.sqrt(3), "b": 0.0, "c": 1.0})


def test_layers_frozen_in_turn_keep_their_history() -> None:
    rule = {"name": "robust_log", "warmup_steps": 12}
    callback = LayerClipCallback(rule=rule, strict=True)
    with HandLoop(callback, a=3, b=2, c=4) as loop:
        for step in range(36):
            loop.step(**freeze(loop, "abc"[step // 6 % 3], 1.0))
        # No layer has had more than 12 steps in a row; each has had 24.
        before = callback.thresholds()
        assert all(math.isfinite(before[name]) for name in "ab")
        state = callback.state_dict()
        loop.step(**freeze(loop, "a", 1.0))
        assert math.isfinite(callback.thresholds()["c"])
    other = LayerClipCallback(rule=rule, strict=True)
    other.load_state_dict(state)  # saved while "c" was frozen
    with HandLoop(other, a=3, b=2, c=4) as loop:
        received = loop.step(**freeze(loop, "a", 1e3))
        assert other.thresholds()["b"] == pytest.approx(before["b"], rel=0.3)
    assert norms_of(received) == pytest.approx({"a": 0.0, "b": before["b"], "c": before["b"]}, rel=1e-3)


def test_a_share_is_of_the_layer_s_own_steps() -> None:
    callback = LayerClipCallback(rule=fixed(1e-3), every_n_steps=1, strict=True)
    with told(), HandLoop(callback, a=3, b=2) as loop:
        for _ in range(30):
            loop.step(**freeze(loop, "b", 1.0))
        loop.steps(10, **freeze(loop, "", 1.0))
    shares = loop.values(f"{tags.CLIP_LAYER_RATE}/b")
    assert [shares[step] for step in range(30, 40)] == [1.0] * 10


@pytest.mark.parametrize("rule", ["mean_multiple", "robust_log", "quantile", "zscore"])
@pytest.mark.parametrize(("saved", "now"), [(20, 10), (10, 20)])
def test_another_length_of_the_warm_up_starts_it_anew(rule: str, saved: int, now: int) -> None:
    """What a state means before and after the warm-up may differ."""
    first = LayerClipCallback(rule={"name": rule, "warmup_steps": saved}, strict=True)
    with HandLoop(first, a=3) as loop:
        loop.steps(15, a=100.0)
    other = LayerClipCallback(rule={"name": rule, "warmup_steps": now}, strict=True)
    with told() as messages, HandLoop(other, a=3) as loop:
        loop.handle.load_state_dict({other.state_key: first.state_dict()})
        loop.steps(now - 1, a=1.0)
        assert other.thresholds() == {"a": math.inf}
        loop.steps(2, a=1.0)
        assert 0.99 < other.thresholds()["a"] < 10.0, "nothing is left of the 100"
    [message] = [text for text in messages if "new warm-up" in text]
    assert "thresholds of a " in message


# What a monitor of somebody else proposes.


def monitor(propose: Callable[[StepContext], None], **rights: bool) -> StabilizerCallback:
    """A monitor that proposes something at every step.

    Args:
        propose: Its hook.
        **rights: Attributes of its class.
    """
    hook = lambda self, context: propose(context)  # noqa: E731
    made: StabilizerCallback = type("Monitor", (StabilizerCallback,), {"on_gradients": hook, **rights})()
    return made


WRONG: list[tuple[Callable[[StepContext], None], dict[str, bool], str]] = [
    (lambda c: c.plan.skip(c.store.norms > 5), {"may_skip": True}, "a proposal of shape (2,): expected ()"),
    (lambda c: c.plan.stop(c.store.norms > 5, str), {"may_stop": True}, "a proposal of shape (2,): expected ()"),
    (lambda c: c.plan.clip_layers(torch.ones(3)), {"acts": True}, "a proposal of shape (3,): expected (2,)"),
    (lambda c: c.plan.zero_layers(torch.ones(3) > 0), {"acts": True}, "a proposal of shape (3,): expected (2,)"),
    (lambda c: c.plan.clip_total(torch.ones(1)), {"acts": True}, "a proposal of shape (1,): expected ()"),
    (lambda c: c.plan.skip(c.store.total_norm > 0), {}, "may_skip = True"),
    (lambda c: c.plan.stop(c.store.total_norm > 0, str), {"may_skip": True}, "may_stop = True"),
    (lambda c: c.plan.clip_total(torch.tensor(0.5)), {"may_skip": True}, "acts = True"),
    (lambda c: c.plan.zero_layers(c.store.norms > 0), {}, "acts = True"),
    (lambda c: c.plan.clip_values({"a": 1e-3}), {}, "acts = True"),
]


@pytest.mark.parametrize(("propose", "rights", "text"), WRONG)
def test_a_wrong_proposal_is_the_proposer_s_error_alone(
    propose: Any, rights: dict[str, bool], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    clip = LayerClipCallback(rule=fixed(2.0), every_n_steps=1)
    with told(), HandLoop(monitor(propose, **rights), clip, a=3, b=2) as loop:
        received = [norms_of(loop.step(a=4.0, b=1.0)) for _ in range(3)]
    # Who acts and fails may have proposed a part already: at that step nobody clips.
    assert received[0]["a"] == pytest.approx(4.0 if "acts" in rights else 2.0)
    assert received[1:] == [pytest.approx({"a": 2.0, "b": 1.0})] * 2
    [record] = [record for record in caplog.records if record.name == "stabilizer"]
    assert "Monitor.on_gradients failed at step 0" in record.getMessage()
    assert record.exc_info is not None
    assert text in str(record.exc_info[1])


@pytest.mark.parametrize("flag", [True, False, 1.0])
def test_a_plain_flag_will_do(flag: Any) -> None:
    with told(), HandLoop(monitor(lambda c: c.plan.skip(flag), may_skip=True), learning_rate=1.0, a=3) as loop:
        before = loop.weights["a"]
        loop.step(a=1.0)
        assert torch.equal(loop.weights["a"], before) == bool(flag)


# Optimizers and gradients of other kinds.


def test_a_fused_optimizer_may_have_an_empty_group() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": []}, {"params": list(parameters)}], lr=1.0, fused=True)

    with told(), HandLoop(AdaptiveClipThreshold(strict=True), make=make, a=3) as loop:
        before = loop.weights["a"]
        loop.step(a=NAN)
        assert torch.equal(loop.weights["a"], before)
        loop.step(a=1.0)
        assert not torch.equal(loop.weights["a"], before)


@pytest.mark.parametrize("limit", [None, 0.01])
def test_a_conjugate_view_is_clipped(limit: float | None) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4, dtype=torch.cfloat))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    whole = torch.tensor([3 + 4j, 0 + 1j, -6 - 2j, 5], dtype=torch.cfloat)
    options: dict[str, Any] = {} if limit is None else {"clip_value": {"weight": limit}}
    callback = LayerClipCallback(rule=fixed(2.0), strict=True, **options)
    with told(), attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=no_log):
        model.weight.grad = whole.clone().conj()
        assert model.weight.grad.is_conj()
        optimizer.step()
    expected = whole.conj().resolve_conj() * (2.0 / whole.abs().square().sum().sqrt())
    if limit is not None:
        expected = torch.complex(expected.real.clamp(-limit, limit), expected.imag.clamp(-limit, limit))
    torch.testing.assert_close(model.weight.grad.resolve_conj(), expected)


def check_freed(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    """An optimizer that is no longer ours moves as ever."""
    assert not hasattr(optimizer, "found_inf")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def failing_kernel(monkeypatch: pytest.MonkeyPatch, *, call: int) -> None:
    """A fused step fails after all hooks."""
    module, calls = importlib.import_module("torch.optim.adam"), []
    original = module.adam

    def adam(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs["found_inf"])
        if len(calls) == call:
            assert float(calls[-1]) == 1.0
            raise ArithmeticError("in the kernel")
        original(*args, **kwargs)

    monkeypatch.setattr(module, "adam", adam)


@pytest.mark.parametrize("host", HOSTS)
def test_an_exception_in_a_loop_s_step_leaves_no_flag(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(host, AdaptiveClipThreshold(), optimizer=lambda parameters: [OPTIMIZERS["adam_fused"](parameters)])
    failing_kernel(monkeypatch, call=2)
    with told(), loop:
        loop.step(1.0)
        with pytest.raises(ArithmeticError):
            loop.step(NAN)
    check_freed(loop.model, loop.inner[0], lambda: loss_at(loop.model, 1.0))


@pytest.mark.parametrize("is_manual", [False, True])
def test_an_exception_in_a_trainer_s_step_leaves_no_flag(is_manual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module("transformer")
    optimizer = OPTIMIZERS["adam_fused"](module.model.parameters())
    module.configure_optimizers = lambda: optimizer
    module.automatic_optimization = not is_manual

    def training_step(batch: Any, batch_idx: int) -> Tensor | None:
        loss = spoiled(loss_of(module.model, batch), {(1, None): NAN}, step=batch_idx, rank=0)
        if not is_manual:
            return loss
        module.optimizers().zero_grad()
        module.manual_backward(loss)
        module.optimizers().step()
        return None

    module.training_step = training_step
    failing_kernel(monkeypatch, call=2)
    with told(), pytest.raises(ArithmeticError):
        make_trainer(callbacks=[AdaptiveClipThreshold()]).fit(module)
    check_freed(module.model, optimizer, lambda: sum(p.square().sum() for p in module.model.parameters()))


@pytest.mark.parametrize("leaves", ["close", "measure", "zero_grad"])
def test_a_loop_that_stops_after_measuring_is_free(leaves: str) -> None:
    """The plan of a step that is not done is nobody's."""
    optimizer = lambda parameters: [OPTIMIZERS["adam_fused"](parameters)]  # noqa: E731
    with told(), Loop("plain", AdaptiveClipThreshold(), optimizer=optimizer) as loop:
        loop.step(1.0)
        loop.backward(NAN)
        loop.handle.measure()
        if leaves == "close":
            loop.handle.close()
        elif leaves == "measure":
            loop.model.weight.grad.fill_(1.0)
            loop.handle.measure()
        else:
            loop.optimizer.zero_grad()
        before = loop.model.weight.detach().clone()
        if leaves != "measure":
            loop.optimizer.zero_grad()
            loop.backward(1.0)
        loop.optimizer.step()
        assert not torch.equal(loop.model.weight, before)
        check_freed(loop.model, loop.inner[0], lambda: loss_at(loop.model, 1.0))
