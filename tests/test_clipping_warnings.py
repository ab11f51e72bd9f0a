"""What clips say of thresholds that are too low, and of a second clip beside them: once, with the numbers."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from stabilizer.callbacks import AdaptiveClipThreshold, GradNormCallback, LayerClipCallback
from tests.clip_loops import HandLoop, fixed
from tests.lightning_models import PACKAGES, make_module, make_trainer
from tests.tiny_loops import Loop, told

QUIET = {"every_n_steps": 10_000, "strict": True}


def said(callback: Any, norms: Any, *, num: int) -> list[str]:
    """What is said in so many steps.

    Args:
        callback: A clip.
        norms: From the step to the norms of all layers.
        num: Number of steps.
    """
    with told() as messages:
        sizes = dict.fromkeys(norms(0), 2)
        with HandLoop(callback, **sizes) as loop:
            for step in range(num):
                loop.step(**norms(step))
    return messages


@pytest.mark.parametrize("kind", [LayerClipCallback, AdaptiveClipThreshold])
def test_clipping_often_is_said_once_with_k(kind: Any) -> None:
    """Every tenth norm is 4, the threshold 3 times the usual one."""
    rule = {"name": "mean_multiple", "k": 3.0, "warmup_steps": 10}
    options = {} if kind is LayerClipCallback else {"warmup_cap": None}
    messages = said(kind(rule=rule, **options, **QUIET), lambda step: {"a": 8.0 if step % 10 == 9 else 1.0}, num=1500)
    assert len(messages) == 1
    name = "a" if kind is LayerClipCallback else "total"
    assert f"{name} in " in messages[0]
    assert "more than 5 % of the last 1000 steps were over the threshold" in messages[0]
    assert "(k = 3 in force)" in messages[0]
    assert "mean_multiple(k=3.0" in messages[0]


def test_the_share_and_the_ratio_are_right() -> None:
    callback = LayerClipCallback(rule=fixed(3.2), rules={"a": {"name": "mean_multiple", "k": 4.0}}, **QUIET)
    messages = said(callback, lambda step: {"a": 1.0, "b": 4.0 if step % 5 == 0 else 1.0}, num=600)
    assert len(messages) == 1
    assert "b in 20 % (k = 3.2 in force)" in messages[0]
    assert "a in" not in messages[0]


def test_five_percent_are_no_reason() -> None:
    """49 of 1,000 are fewer than 5 %, 51 more; not before they are so many."""
    spikes = set(range(20, 1000, 20))
    rule = {"name": "robust_log", "warmup_steps": 10}
    for more, expected in ((set(), 0), ({501, 502}, 1)):
        norms = lambda step, now=spikes | more: {"a": 50.0 if step in now else 1.0}  # noqa: E731
        assert len(said(LayerClipCallback(rule=rule, **QUIET), norms, num=1001)) == expected


def test_a_low_fixed_threshold_is_said_once() -> None:
    callback = LayerClipCallback(rule=fixed(2.5), **QUIET)
    messages = said(callback, lambda step: {"a": 1.0, "b": 0.5}, num=1200)
    assert len(messages) == 1, messages
    assert "step 99: fixed thresholds under 3 times the usual norm: a: 2.5 (k = 2.5 in force); rule: " in messages[0]


def test_what_is_usual_is_the_median_of_finite_norms() -> None:
    """A third of the norms is large, and one is no norm at all: the threshold is 3.2 times the median all the same."""
    callback = AdaptiveClipThreshold(rule=fixed(3.2), on_nonfinite="ignore", **QUIET)
    norms = lambda step: {"a": 3.1 if step % 3 == 0 else float("nan") if step == 50 else 1.0}  # noqa: E731
    assert [message for message in said(callback, norms, num=300) if "threshold" in message] == []


def test_a_high_fixed_threshold_is_not() -> None:
    assert said(LayerClipCallback(rule=fixed(3.5), **QUIET), lambda step: {"a": 1.0, "b": 0.5}, num=1200) == []


@pytest.mark.parametrize("rule", ["robust_log", {"name": "mean_multiple", "k": 8.0}])
def test_a_healthy_run_hears_nothing(rule: Any) -> None:
    generator = random.Random(0)
    callbacks = [LayerClipCallback(rule=rule, strict=True), AdaptiveClipThreshold(rule=rule, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with HandLoop(*callbacks, a=3, b=2) as loop:
            for _ in range(1500):
                loop.step(a=generator.lognormvariate(0, 0.3), b=generator.lognormvariate(2, 0.3))


def test_a_cap_before_there_is_a_threshold_is_no_threshold() -> None:
    """The first 80 totals are all over the default cap of 1: that is what it is for."""
    callback = AdaptiveClipThreshold(rule={"name": "robust_log", "warmup_steps": 80}, strict=True)
    assert said(callback, lambda step: {"a": 30.0}, num=1200) == []


def test_observing_says_it_too() -> None:
    callback = LayerClipCallback(rule=fixed(0.5), mode="observe", **QUIET)
    assert len(said(callback, lambda step: {"a": 1.0}, num=300)) == 1


ACTING = [LayerClipCallback, AdaptiveClipThreshold]


def _about_two(messages: list[str]) -> list[str]:
    return [message for message in messages if "gradient_clip_val" in message or "clip_grad_" in message]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", ACTING)
def test_lightning_s_clip_beside_ours(kind: Any, package: str) -> None:
    with told() as messages:
        trainer = make_trainer(package=package, callbacks=[kind(strict=True)], gradient_clip_val=1.0)
        trainer.fit(make_module("transformer", package=package))
    assert len(_about_two(messages)) == 1
    assert "gradient_clip_val=1.0" in messages[0]
    assert kind.__name__ in messages[0]


@pytest.mark.parametrize("callback", [LayerClipCallback(mode="observe"), GradNormCallback(heatmap_every_n_steps=None)])
def test_who_only_looks_is_no_second_clip(callback: Any) -> None:
    with told() as messages:
        make_trainer(callbacks=[callback], gradient_clip_val=1.0).fit(make_module("transformer"))
    assert messages == []


@pytest.mark.parametrize("kind", ACTING)
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_accelerate_s_clip_beside_ours(kind: Any, name: str) -> None:
    with told() as messages, Loop("accelerate", kind(strict=True)) as loop:
        for _ in range(3):
            loop.backward(0.5)
            getattr(loop.accelerator, name)(loop.model.parameters(), 1.0)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert len(_about_two(messages)) == 1
    assert f"accelerator.{name}" in messages[0]


def test_measuring_with_a_clip_at_infinity_is_no_second_clip() -> None:
    with told() as messages, Loop("accelerate", LayerClipCallback(strict=True)) as loop:
        loop.backward(0.5)
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), float("inf"))
        loop.optimizer.step()
    assert messages == []


def test_ours_comes_first_and_the_host_s_clips_what_is_left() -> None:
    received: list[float] = []
    module = make_module("transformer")
    configure = module.configure_optimizers

    def configure_optimizers() -> torch.optim.Optimizer:
        optimizer = configure()
        optimizer.register_step_post_hook(
            lambda o, *_: received.append(
                float(torch.nn.utils.get_total_norm([p.grad for group in o.param_groups for p in group["params"]]))
            )
        )
        return optimizer

    module.configure_optimizers = configure_optimizers
    callback = AdaptiveClipThreshold(rule=fixed(1.5), strict=True)
    seen: list[float] = []

    class After(GradNormCallback):
        def on_step_end(self, context: Any) -> None:
            seen.append(context.after.total_norm.item())

    with told():
        make_trainer(callbacks=[callback, After(heatmap_every_n_steps=None)], gradient_clip_val=1.2).fit(module)
    assert received == pytest.approx([1.2] * 3, rel=1e-5)
    assert seen == pytest.approx(received, rel=1e-5)
