"""What is done when a gradient is not finite or over its threshold, by verb, in every host."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback
from stabilizer.callbacks.clipping import ClipCallback
from stabilizer.errors import TrainingStoppedError
from tests.lightning_models import PACKAGES
from tests.skip_tools import HOSTS, INF, NAN, SQRT, changed, train
from tests.tiny_loops import Loop, told

BAD = 1
CLIPS = (LayerClipCallback, AdaptiveClipThreshold)
#: No layer of a healthy step is over it.
HIGH = {"name": "fixed", "threshold": 100.0}


def is_in_layer(name: str) -> bool:
    """Whether a parameter, or a moment of it, is in the layer that goes wrong."""
    return "layers.1." in name


def spoil(value: float, *, num: int = 1) -> Any:
    """Let single elements of one layer's gradient be a value, at one step."""

    def after_backward(step: int, model: nn.Module) -> None:
        if step == BAD:
            gradient = model.get_parameter("layers.1.attention.q.weight").grad
            assert gradient is not None
            gradient.view(-1)[:num] = value

    return after_backward


def multiply(factor: float) -> Any:
    """Multiply one layer's gradient, at one step."""

    def after_backward(step: int, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if step == BAD and is_in_layer(name) and parameter.grad is not None:
                parameter.grad.mul_(factor)

    return after_backward


def zero(step: int, model: nn.Module) -> None:
    """What zero_layer is to be like."""
    multiply(0.0)(step, model)


def run(host: str, callbacks: list[Any], after_backward: Any, **options: Any) -> Any:
    """Three steps, the middle one of which goes wrong."""
    return train(host, callbacks, num_steps=3, after_backward=after_backward, **options)


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("value", [NAN, INF])
def test_skip_step_is_the_default(host: str, kind: type[ClipCallback], value: float) -> None:
    result = run(host, [kind(warmup_cap=None, every_n_steps=1)], spoil(value))
    assert result.error is None
    assert result.moved(BAD) == []
    assert result.moved(0)
    assert result.moved(2)
    assert [result.points["skip/count", step] for step in range(3)] == [0, 1, 1]
    assert [result.points["skip/consecutive", step] for step in range(3)] == [0, 1, 0]
    assert ("skip/overflows", BAD) not in result.points
    [message] = result.warnings
    assert message.startswith("step 1: the gradient is not finite in ")
    assert message.endswith("the step is skipped")


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("host", HOSTS)
def test_zero_layer_is_a_gradient_of_zero_for_that_layer_alone(host: str, kind: type[ClipCallback]) -> None:
    result = run(host, [kind(warmup_cap=None, on_nonfinite="zero_layer")], spoil(NAN, num=3))
    wanted = run("plain", [], zero)
    assert changed(wanted.states[-1], result.states[-1]) == []
    [message] = result.warnings
    assert "layers.1.attention.q.weight (3 NaN)" in message


@pytest.mark.parametrize("kind", CLIPS)
def test_ignore_leaves_the_gradient_as_it_is(kind: type[ClipCallback]) -> None:
    result = run("plain", [kind(warmup_cap=None, on_nonfinite="ignore")], spoil(NAN))
    wanted = run("plain", [], spoil(NAN))
    assert changed(wanted.states[-1], result.states[-1]) == []
    [message] = result.warnings
    assert message.endswith("the gradient is left as it is")


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("host", HOSTS)
def test_raise_ends_the_run_before_the_update(host: str, kind: type[ClipCallback]) -> None:
    callback = kind(warmup_cap=None, on_nonfinite="raise")
    result = run(host, [callback], spoil(INF, num=2))
    assert result.error is not None
    assert result.error.startswith("step 1: the gradient is not finite; ")
    assert "layers.1.attention.q.weight (2 Inf)" in result.error
    assert "every rank's loss is finite" in result.error
    assert result.num_done == 1
    assert changed(result.states[BAD], result.states[-1]) == []
    assert callback.driver is None, "the handle is closed"


@pytest.mark.parametrize("mode", ["zero_layer", "ignore", "skip_step", "raise"])
def test_observing_changes_nothing(mode: Any) -> None:
    callback = LayerClipCallback(rule=HIGH, on_nonfinite=mode, on_spike="skip_step", mode="observe")
    result = run("plain", [callback], spoil(NAN))
    assert changed(run("plain", [], spoil(NAN)).states[-1], result.states[-1]) == []
    assert result.error is None


def test_the_strongest_of_two_callbacks_wins() -> None:
    callbacks = [AdaptiveClipThreshold(on_nonfinite="skip_step"), LayerClipCallback(on_nonfinite="zero_layer")]
    assert run("plain", callbacks, spoil(NAN)).moved(BAD) == []
    callbacks[1] = LayerClipCallback(on_nonfinite="raise")
    assert run("plain", callbacks, spoil(NAN)).error is not None


@pytest.mark.parametrize("host", HOSTS)
def test_a_spike_may_skip(host: str) -> None:
    callback = LayerClipCallback(rule=HIGH, on_spike="skip_step", every_n_steps=1)
    result = run(host, [callback], multiply(1e6))
    assert result.moved(BAD) == []
    assert result.moved(2)
    assert [result.points["skip/count", step] for step in range(3)] == [0, 1, 1]
    assert result.warnings == []


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", CLIPS)
def test_a_spike_may_raise(host: str, kind: type[ClipCallback]) -> None:
    result = run(host, [kind(rule=HIGH, on_spike="raise")], multiply(1e6))
    where = "model.layers.1" if host.startswith(PACKAGES) else "layers.1"
    name = where if kind is LayerClipCallback else "total"
    assert result.error is not None
    assert result.error.startswith(f"step 1: {kind.__name__}: gradient norms over their thresholds: {name} (")
    assert "over 100)" in result.error
    assert changed(result.states[BAD], result.states[-1]) == []


@pytest.mark.parametrize("host", HOSTS)
def test_a_spike_may_zero_its_layer(host: str) -> None:
    result = run(host, [LayerClipCallback(rule=HIGH, on_spike="zero_layer")], multiply(1e6))
    assert changed(run("plain", [], zero).states[-1], result.states[-1]) == []


@pytest.mark.parametrize(("verb", "kind"), [("ignore", LayerClipCallback), ("ignore", AdaptiveClipThreshold)])
def test_a_spike_may_be_ignored(verb: Any, kind: type[ClipCallback]) -> None:
    result = run("plain", [kind(rule=HIGH, on_spike=verb)], multiply(1e6))
    assert changed(run("plain", [], multiply(1e6)).states[-1], result.states[-1]) == []


@pytest.mark.parametrize("kind", CLIPS)
def test_clipping_by_default_needs_no_skip(kind: type[ClipCallback]) -> None:
    result = run("plain", [kind(rule=HIGH, every_n_steps=1)], multiply(1e6))
    assert result.moved(BAD)
    assert result.points["skip/count", 2] == 0
    after = "grad_norm/total_after" if kind is AdaptiveClipThreshold else "grad_norm/layer_after/layers.1"
    assert result.points[after, BAD] == pytest.approx(100.0, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LayerClipCallback, {"on_nonfinite": "clip"}),
        (AdaptiveClipThreshold, {"on_nonfinite": "clip"}),
        (AdaptiveClipThreshold, {"on_spike": "zero_layer"}),
        (LayerClipCallback, {"on_spike": "skip"}),
        (LayerClipCallback, {"max_consecutive_skips": 0}),
    ],
)
def test_verbs_that_mean_nothing_are_errors(kind: type[ClipCallback], options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(ValueError, match=name):
        kind(**options)


def test_a_gradient_that_is_born_bad_with_a_good_loss() -> None:
    result = train("plain", [LayerClipCallback()], num_steps=3, faults={(1, None): SQRT})
    assert result.moved(1) == []
    [message] = result.warnings
    assert "every rank's loss is finite: it was born in a backward pass" in message


@pytest.mark.parametrize("host", ["plain", "accelerate"])
def test_a_loop_may_catch_the_end_and_go_on(host: str) -> None:
    callback = AdaptiveClipThreshold(on_nonfinite="raise", warmup_cap=None)
    with told(), Loop(host, callback, optimizer=lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)]) as loop:
        loop.step(1.0)
        weight = loop.inner[0].param_groups[0]["params"][0]
        before = weight.detach().clone()
        with pytest.raises(TrainingStoppedError, match="the loss is not finite on rank 0"):
            loop.step(NAN)
        assert torch.equal(before, weight)
        loop.optimizer.zero_grad()
        loop.step(1.0)
        assert not torch.equal(before, weight)
        assert torch.isfinite(weight).all()
        assert callback.next_step() == 2, "the step that was broken off is none"
    assert callback.driver is None
    loop.inner[0].step()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("verb", ["raise", "skip_step"])
def test_no_checkpoint_holds_what_is_not_finite(package: str, verb: Any, tmp_path: Path) -> None:
    saves = importlib.import_module(f"{package}.callbacks").ModelCheckpoint(
        tmp_path, every_n_train_steps=1, save_top_k=-1, save_last=True
    )
    callbacks: list[Any] = [saves, LayerClipCallback(on_nonfinite=verb)]
    result = train(package, callbacks, num_steps=3, faults={(1, None): NAN}, enable_checkpointing=True)
    assert (result.error is None) == (verb == "skip_step")
    files = list(tmp_path.glob("*.ckpt"))
    assert files
    for file in files:
        saved = torch.load(file, weights_only=True)["state_dict"]
        assert all(bool(torch.isfinite(value).all()) for value in saved.values()), file.name


@pytest.mark.parametrize("host", ["plain"])
def test_it_is_said_once_in_a_hundred_steps_and_counted(host: str) -> None:
    faults = {(step, None): NAN for step in (2, 7, 50, 103, 104)}
    result = train(host, [AdaptiveClipThreshold()], num_steps=106, faults=faults, keep_states=False)
    first, second = result.warnings
    assert first.startswith("step 2: ")
    assert "since" not in first
    assert second.startswith("step 103: ")
    assert second.endswith("the step is skipped (3 such steps since this was said last)")
