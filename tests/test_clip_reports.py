"""What clips count and say of steps that they skip, where a scaler, a device or another clip is beside them."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch

from stabilizer import measurement, tags
from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, attach
from stabilizer.callbacks.acting import Actor
from stabilizer.callbacks.clip_counts import SkipCounter
from stabilizer.errors import TrainingStoppedError
from stabilizer.store import GradientStore
from tests.clip_loops import HandLoop, fixed, norms_of
from tests.lightning_models import make_module, make_trainer
from tests.loggers import points_of
from tests.models import loss_of
from tests.skip_tools import INF, NAN, OPTIMIZERS
from tests.tiny_loops import OneLayer, loss_at, told

# A device that is not waited for.


class OnDevice(torch.Tensor):
    """A number on a CPU that says that it is on another device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Not where it is."""
        return torch.device("cuda", 0)


class StoreOnDevice:
    """A store that says so too."""

    device = torch.device("cuda", 0)

    def __init__(self, store: GradientStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever may not wait for a device think that there is one."""
    begin, make = Actor.begin, SkipCounter.__init__

    def begin_there(self: Actor, store: Any, *args: Any, **kwargs: Any) -> Any:
        return begin(self, StoreOnDevice(store), *args, **kwargs)  # type: ignore[arg-type]

    def make_there(self: SkipCounter, **kwargs: Any) -> None:
        make(self, **kwargs)
        self.consecutive = self.consecutive.as_subclass(OnDevice)

    monkeypatch.setattr(Actor, "begin", begin_there)
    monkeypatch.setattr(SkipCounter, "__init__", make_there)
    monkeypatch.setattr(measurement.Measurer, "_host_sees_nonfinite", lambda *_: None)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("kind", [LayerClipCallback, AdaptiveClipThreshold])
def test_layers_are_named_late_where_the_host_does_not_wait(kind: Any) -> None:
    callback = kind(strict=True)
    with told() as messages, HandLoop(callback, make=OPTIMIZERS["adamw_fused"], a=3, b=2, c=4) as loop:
        loop.steps(5, a=1.0, b=1.0, c=1.0)
        before = loop.weights
        loop.steps(40, a=NAN, b=1.0, c=INF)
        assert all(torch.equal(value, before[name]) for name, value in loop.weights.items())
        loop.steps(5, a=1.0, b=1.0, c=1.0)
        assert not torch.equal(loop.weights["b"], before["b"])
    assert callback.num_skipped() == 40
    [message] = messages
    assert message.startswith("step 5: the gradient is not finite in ")
    assert re.search(r"\bc, a\b(?!, b)", message), "in backward order, and no other"


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(("num_bad", "ends"), [(15, True), (1000, True), (4, True), (3, False)])
def test_a_short_row_of_skips_is_noticed_late(num_bad: int, ends: bool) -> None:
    """It is over before the host has read that it was too long."""
    callback = AdaptiveClipThreshold(max_consecutive_skips=3)
    with told(), HandLoop(callback, make=OPTIMIZERS["adamw_fused"], a=3) as loop:
        loop.steps(17, a=1.0)
        error = None
        try:
            for step in range(17, 80):
                loop.step(a=NAN if step < 17 + num_bad else 1.0)
        except TrainingStoppedError as stopped:
            error = str(stopped)
        if num_bad < 16:
            loop.steps(40, a=1.0)  # who goes on all the same is left alone
    assert (error is not None) == ends
    if error is not None:
        assert step <= 17 + 16 + 16
        assert "more than max_consecutive_skips=3" in error
        num = int(error.split(": ")[1].split()[0])
        assert 3 < num <= num_bad


# A scaler that the loop tells of.


@pytest.mark.parametrize("verb", ["skip_step", "raise", "zero_layer"])
@pytest.mark.parametrize("unscales_first", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw_fused"])
def test_measuring_knows_of_the_scaler(name: str, unscales_first: bool, verb: Any) -> None:
    model, rows = OneLayer(), []
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    callback = AdaptiveClipThreshold(on_nonfinite=verb, rule=fixed(100.0), strict=True)
    with (
        told() as messages,
        attach(
            None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda *row: rows.append(row)
        ) as handle,
    ):
        for value in (3.0, INF, 200.0, 5.0):
            scaler.scale(loss_at(model, value)).backward()
            if unscales_first:
                scaler.unscale_(optimizer)
            handle.measure(scaler=scaler)
            if not unscales_first:
                scaler.unscale_(optimizer)
            if value == 200.0:
                assert model.weight.grad is not None
                assert float(model.weight.grad) == pytest.approx(100.0)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    points = points_of([(dict(values), step) for values, step in rows])
    # A scaler that finds an infinity calls no step, but of a fused optimizer.
    num_seen = int(name == "adamw_fused")
    last = 2 + num_seen
    norms = [points.get((tags.GRAD_NORM_TOTAL, step)) for step in (0, last - 1, last)]
    assert norms == pytest.approx([3.0, 200.0, 5.0])
    assert points[tags.SKIP_OVERFLOWS, last] == num_seen
    assert points[tags.SKIP_COUNT, last] == callback.num_skipped() == 0
    assert scaler.get_scale() == 512.0
    assert [text for text in messages if "not finite" in text] == []


# Spikes that are skipped.


@pytest.mark.parametrize("kind", [LayerClipCallback, AdaptiveClipThreshold])
@pytest.mark.parametrize(
    ("rule", "accepts"), [("quantile", False), ("zscore", False), ("robust_log", True), ("mean_multiple", True)]
)
def test_skipped_spikes_enter_no_history(rule: str, accepts: bool, kind: Any) -> None:
    """But rules that tell a spike from a new level of 32 steps."""
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)).mul(0.05).exp().tolist()
    options: dict[str, Any] = {} if kind is LayerClipCallback else {"warmup_cap": None}
    callback = kind(rule=rule, on_spike="skip_step", strict=True, **options)
    with told(), HandLoop(callback, a=3) as loop:
        for norm in noise:
            loop.step(a=norm)
        before, num_before = callback.thresholds(), callback.num_skipped()
        loop.steps(31, a=1e3)
        assert callback.thresholds() == before
        assert callback.num_skipped() - num_before == 31
        loop.steps(9, a=1e3)
        assert (callback.num_skipped() - num_before < 40) == accepts
        assert (callback.thresholds() == before) != accepts


@pytest.mark.parametrize(
    ("verb", "coefficient"), [("ignore", 1.0), ("skip_step", 1.0), ("clip", 0.2), ("zero_layer", 0.0)]
)
@pytest.mark.parametrize("kind", [LayerClipCallback, AdaptiveClipThreshold])
def test_what_is_logged_is_what_was_multiplied_with(kind: Any, verb: Any, coefficient: float) -> None:
    if kind is AdaptiveClipThreshold and verb == "zero_layer":
        return
    with told(), HandLoop(kind(rule=fixed(1.0), on_spike=verb, every_n_steps=1, strict=True), a=3) as loop:
        received = norms_of(loop.step(a=5.0))["a"]
    tag = f"{tags.CLIP_LAYER_COEFFICIENT}/a" if kind is LayerClipCallback else tags.CLIP_TOTAL_COEFFICIENT
    assert loop.values(tag) == pytest.approx({0: coefficient})
    assert received == pytest.approx(0.0 if verb == "skip_step" else 5.0 * coefficient)


# A layer that is bad for good.


@pytest.mark.parametrize(("verb", "outcome"), [("zero_layer", "set to zero"), ("ignore", "left as it is")])
def test_what_is_bad_for_good_is_looked_at_once_in_a_hundred_steps(
    verb: Any, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = GradientStore.nonfinite_parameters, []

    def counted(self: GradientStore) -> Any:
        looks.append(self.current.step if self.current is not None else -1)
        return look(self)

    monkeypatch.setattr(GradientStore, "nonfinite_parameters", counted)
    with told() as messages, HandLoop(LayerClipCallback(on_nonfinite=verb, strict=True), a=3, b=2) as loop:
        loop.steps(150, a=NAN, b=1.0)
    assert looks == [0, 100]
    first, second = messages
    assert outcome in first.split("; ")[-1]
    assert outcome in second.split("; ")[-1]
    assert "since this was said last" not in first
    assert second.endswith("(100 such steps since this was said last)")


# Another clip beside ours.


class Clips:
    """What a module does by itself."""

    @staticmethod
    def manual(module: Any) -> None:
        """In its own loop."""

        def training_step(batch: Any, batch_idx: int) -> None:
            optimizer = module.optimizers()
            optimizer.zero_grad()
            module.manual_backward(loss_of(module.model, batch))
            module.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()

        module.automatic_optimization, module.training_step = False, training_step

    @staticmethod
    def own(module: Any) -> None:
        """In the hook for it."""

        def configure_gradient_clipping(self: Any, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, 1.0, "norm")

        module.configure_gradient_clipping = types.MethodType(configure_gradient_clipping, module)


@pytest.mark.parametrize("verb", ["clip", "ignore", "skip_step", "raise"])
@pytest.mark.parametrize("way", ["manual", "own", "trainer"])
def test_two_clips_are_said_once_where_there_are_two(way: str, verb: Any) -> None:
    module = make_module("transformer")
    if way != "trainer":
        getattr(Clips, way)(module)
    options: dict[str, Any] = {"gradient_clip_val": 1.0} if way == "trainer" else {}
    callback = AdaptiveClipThreshold(rule=fixed(1e6), on_spike=verb, strict=True)
    with told() as messages:
        make_trainer(callbacks=[callback], **options).fit(module)
    about = [text for text in messages if "two clips" in text]
    assert len(about) == (verb == "clip")
    name = "Trainer(gradient_clip_val=1.0)" if way == "trainer" else "clip_gradients(..., 1.0)"
    assert all(f"first AdaptiveClipThreshold, then {name}" in text for text in about)
