"""The facts of preflight, one by one, on one process."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, LayerClipCallback, StabilizerCallback
from stabilizer.callbacks.preflight import Fact, facts
from tests.counting import fake_cuda
from tests.models import make_mlp, make_transformer
from tests.preflight_settings import make_setting, rows_of


class Limited(StabilizerCallback):
    """Cannot do all it promises."""

    def limitations(self, setting: Any) -> list[str]:
        return [f"sees no tokens in a {setting.host}", "nor ranks"]


class Faulty(StabilizerCallback):
    """A user's own, with a fault."""

    def limitations(self, setting: Any) -> list[str]:
        raise KeyError("tokens")


def test_nobody_clips() -> None:
    fact = rows_of(make_setting())["gradient clipping"]
    assert fact.value == "nobody clips"
    assert "AdaptiveClipThreshold()" in fact.advice


@pytest.mark.parametrize(
    ("clipping", "is_marked"),
    [("the Trainer, by total norm at 1", False), ("the Trainer, by value at 0.5", True), ("your loop, if", False)],
)
def test_who_clips(clipping: str, is_marked: bool) -> None:
    fact = rows_of(make_setting(clipping=clipping))["gradient clipping"]
    assert fact.value == clipping
    assert bool(fact.advice) == is_marked
    assert "direction" in fact.advice or not is_marked


def test_a_callback_of_ours_clips_unless_it_only_observes() -> None:
    fact = rows_of(make_setting(callbacks=[AdaptiveClipThreshold(name="all")]))["gradient clipping"]
    assert fact == Fact("gradient clipping", "AdaptiveClipThreshold[all]")
    observing = [AdaptiveClipThreshold(mode="observe"), LayerClipCallback(mode="observe")]
    assert rows_of(make_setting(callbacks=observing))["gradient clipping"].advice


def test_precision_and_one_process() -> None:
    rows = rows_of(make_setting(make_mlp(dtype=torch.bfloat16), precision="bf16-true"))
    assert rows["precision"] == Fact("precision", "bf16-true; trainable parameters are bfloat16")
    assert rows["gradient reduction"] == Fact("gradient reduction", "none: one process")


def _scheduled(rule: Any, **changes: Any) -> Fact:
    setting = make_setting(**changes)
    scheduler = rule(setting.optimizers[0])
    options = {"num_steps": 1000, "schedulers": [(scheduler, 1.0)], **changes}
    return rows_of(make_setting(setting.model, **{**options, "optimizers": setting.optimizers}))["learning rate"]


def _cosine(warm: int, end: float = 0.0) -> Any:
    def rule(step: int) -> float:
        if step < warm:
            return step / warm
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * (step - warm) / (1000 - warm)))

    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, rule)


@pytest.mark.parametrize(
    ("warm", "end", "value", "advice"),
    [
        (50, 0.0, "LambdaLR: warm-up 5.0 % of 1,000 steps, peak 0.001, ends at 0 % of it", ""),
        (100, 0.1, "LambdaLR: warm-up 10.0 % of 1,000 steps, peak 0.001, ends at 10 % of it", ""),
        (10, 0.1, "LambdaLR: warm-up 1.0 % of 1,000 steps", "warm up over 5-10 %"),
        (0, 0.1, "LambdaLR: no warm-up, peak 0.001", "warm up over 5-10 %"),
        (300, 0.1, "LambdaLR: warm-up 30.0 % of 1,000 steps", "is enough"),
        (70, 1.0, "LambdaLR: warm-up 7.0 % of 1,000 steps, peak 0.001, does not decay", "let the rate decay"),
    ],
)
def test_warm_up_and_decay(warm: int, end: float, value: str, advice: str) -> None:
    fact = _scheduled(_cosine(warm, end))
    assert fact.value.startswith(value)
    assert bool(fact.advice) == bool(advice)
    assert advice in fact.advice


@pytest.mark.parametrize(
    ("rule", "changes", "value"),
    [
        (lr_scheduler.ReduceLROnPlateau, {}, "ReduceLROnPlateau, not known: ReduceLROnPlateau decides while"),
        (_cosine(50), {"num_steps": None}, "LambdaLR, shares not known: the number of planned steps is not known"),
    ],
)
def test_a_rate_that_is_not_known(rule: Any, changes: Any, value: str) -> None:
    fact = _scheduled(rule, **changes)
    assert fact.value.startswith(value)
    assert not fact.advice


def test_a_scheduler_that_the_loop_moves_and_two_that_move_one_optimizer() -> None:
    setting = make_setting()
    scheduler = lr_scheduler.StepLR(setting.optimizers[0], 3)
    options: dict[str, Any] = {"optimizers": setting.optimizers, "num_steps": 10}
    loop = rows_of(make_setting(setting.model, schedulers=[(scheduler, None)], **options))["learning rate"]
    assert loop.value == "StepLR, not known: when the scheduler steps is up to the training loop"
    both = rows_of(make_setting(setting.model, schedulers=[(scheduler, 1.0)] * 2, **options))["learning rate"]
    assert both.value == "not known: StepLR and StepLR move the rate of one optimizer together"


def test_no_scheduler_is_marked() -> None:
    fact = rows_of(make_setting())["learning rate"]
    assert fact.value == "constant: 0.001, no scheduler"
    assert "warm up" in fact.advice
    assert "schedulers=" in fact.advice


def test_several_optimizers_have_their_ownrows_of() -> None:
    model = make_mlp()
    optimizers = [torch.optim.SGD(model.first.parameters(), lr=0.1), torch.optim.RMSprop(model.second.parameters())]
    schedulers = [(lr_scheduler.StepLR(optimizers[1], 3), 1.0)]
    rows = rows_of(make_setting(model, optimizers=optimizers, schedulers=schedulers, num_steps=9))
    assert rows["learning rate 0"].value.startswith("constant: 0.1")
    assert rows["learning rate 1"].value.startswith("StepLR: no warm-up, peak 0.01, ends at 1 %")
    assert rows["optimizer 0"].value.startswith("SGD, not fused")
    assert rows["optimizer 1"].value.startswith("RMSprop, has no fused form")
    assert "in no optimizer" not in rows


@pytest.mark.parametrize(
    ("make", "value", "is_marked"),
    [
        (
            lambda p: torch.optim.AdamW(p, fused=True),
            "AdamW, fused: steps are skipped on the device (found_inf)",
            False,
        ),
        (lambda p: torch.optim.AdamW(p), "AdamW, not fused: to skip a step the host reads one number a step", True),
        (lambda p: torch.optim.RMSprop(p), "RMSprop, has no fused form: to skip a step the host reads one", False),
    ],
)
def test_what_skipping_costs(make: Any, value: str, is_marked: bool) -> None:
    with fake_cuda():
        model = nn.Linear(16, 16, device="cuda")
        optimizers = [make(model.parameters())]
        setting = make_setting(model, optimizers=optimizers, callbacks=[AdaptiveClipThreshold()])
        fact = rows_of(setting)["optimizer"]
        assert fact.value.startswith(value)
        assert bool(fact.advice) == is_marked
        # Without a callback that skips there is nothing to advise.
        for callback in (GradNormCallback(), AdaptiveClipThreshold(mode="observe")):
            setting = make_setting(model, optimizers=optimizers, callbacks=[callback])
            assert not rows_of(setting)["optimizer"].advice


def test_skipping_is_free_on_a_cpu() -> None:
    fact = rows_of(make_setting(callbacks=[AdaptiveClipThreshold()]))["optimizer"]
    assert "(free on a CPU)" in fact.value
    assert not fact.advice


def test_parameters_that_are_left_out() -> None:
    model = make_transformer(adapters=True)
    model.norm.requires_grad_(True)
    wanted = [p for name, p in model.named_parameters() if "lora_" in name and not name.startswith("layers.0")]
    stranger = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*wanted, model.lm_head.weight, stranger], lr=0.1)
    rows = rows_of(make_setting(model, optimizers=[optimizer]))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert rows["parameters"].value.startswith(f"{trainable:,} trainable")
    left = rows["in no optimizer"]
    assert left.value.startswith("6: layers.0.attention.q.lora_a.weight, ")
    assert left.value.endswith("and 1 more")
    assert "requires_grad=False" in left.advice
    assert rows["frozen, in an optimizer"] == Fact("frozen, in an optimizer", "1: lm_head.weight: not moved")
    assert rows["unknown to the model"].value == "1 of the optimizers' parameters"
    assert rows["unknown to the model"].advice


@pytest.mark.parametrize(
    ("shape", "shown"),
    [((124_439_808, 1), "124.4 M"), ((7_241_732_096, 1), "7.2 B"), ((12_345, 1), "12.3 k"), ((9_999, 1), "9,999")],
)
def test_numbers_for_people(shape: tuple[int, int], shown: str) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(shape, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert rows_of(make_setting(model, optimizers=[optimizer]))["parameters"].value == f"{shown} trainable, 0 frozen"


def test_what_callbacks_cannot_do() -> None:
    rows = rows_of(
        make_setting(callbacks=[GradNormCallback(name="vision"), Limited(), LayerClipCallback()], host="Lightning")
    )
    assert rows["GradNormCallback[vision]"].value == "ok"
    assert rows["Limited"] == Fact("Limited", "limited in 2 ways", "sees no tokens in a Lightning; nor ranks")


def test_a_faulty_callback_costs_its_own_row_only() -> None:
    found = {fact.name: fact for fact in facts(make_setting(callbacks=[Faulty(), Limited()]))}
    assert found["Faulty"] == Fact("Faulty", "not known (KeyError: 'tokens')")
    assert found["Limited"].advice


def test_a_faulty_rule_costs_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("torch has moved it")

    monkeypatch.setattr("stabilizer.callbacks.facts.reductions", broken)
    found = {fact.name: fact for fact in facts(make_setting())}
    assert found["gradient reduction"].value == "not known (RuntimeError: torch has moved it)"
    assert found["learning rate"].value.startswith("constant")


def test_dimensions_on_a_gpu() -> None:
    assert "matrix dimensions" not in rows_of(make_setting())
    with fake_cuda():
        model = nn.Sequential(nn.Linear(32, 48, device="cuda"), nn.Linear(48, 50, bias=False, device="cuda"))
        odd = rows_of(make_setting(model, optimizers=[]))["matrix dimensions"]
        even = rows_of(make_setting(model[0], optimizers=[]))["matrix dimensions"]
    assert odd.value == "no multiple of 16: 1: 1.weight (50 x 48)"
    assert "16" in odd.advice
    assert even == Fact("matrix dimensions", "all are multiples of 16")


def test_nothing_of_the_run_is_touched() -> None:
    model = make_transformer(unused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=100)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    random = torch.get_rng_state()
    facts(make_setting(model, optimizers=[optimizer], schedulers=[(scheduler, 1.0)], num_steps=100))
    after = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert after[1:] == before[1:]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


def test_the_host_does_not_wait_for_the_device() -> None:
    with fake_cuda():
        model = nn.Sequential(nn.Linear(16, 16, device="cuda"), nn.Linear(16, 16, device="cuda"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = lr_scheduler.LinearLR(optimizer)
        options: dict[str, Any] = {"optimizers": [optimizer], "schedulers": [(scheduler, 1.0)], "num_steps": 10}
        rows_of(make_setting(model, callbacks=[GradNormCallback()], **options))
