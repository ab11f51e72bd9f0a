"""Field reports, area hooks-order: clips, several optimizers and manual optimization beside the norms."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from stabilizer import StabilizerWarning, gradient_norms
from stabilizer.callbacks import attach
from tests import reference
from tests.clip_loops import HandLoop
from tests.event_files import read_run
from tests.field_reports.clip_tools import Received, layer_clip, total_clip
from tests.field_reports.helpers import TOLERANCE, covers, fit, norm_logger, our_warnings, total_norm_of
from tests.lightning_models import expected_batches
from tests.lightning_variants import Manual, Plain, TwoOptimizers
from tests.models import loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients
from tests.tiny_loops import no_log


def test_B019_each_optimizer_counts_its_own_steps(tmp_path: Path) -> None:
    module = TwoOptimizers()
    # Lightning's own count rises by two a batch.
    trainer = fit(module, tmp_path, callbacks=[norm_logger(every_n_steps=2, layer_every_n_steps=3)], max_steps=24)
    assert trainer.global_step == 24
    scalars = read_run(tmp_path / "run").scalars
    for number, prefix in enumerate(("", "opt1/")):
        totals = scalars[f"{prefix}grad_norm/total"]
        assert totals == pytest.approx(dict(zip(range(0, 12, 2), module.expected[number][::2], strict=True)), rel=1e-5)
        layers = [tag for tag in scalars if tag.startswith(f"{prefix}grad_norm/layer/")]
        assert layers
        for tag in layers:
            assert list(scalars[tag]) == [0, 3, 6, 9]


class Look(pl.Callback):
    """A user's own hook, which reads gradients where Lightning calls it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the norm."""
        self.seen.append(total_norm_of(optimizer))


def _recording(record: list[float]) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: record.append(total_norm_of(optimizer)))
        return optimizer

    return make


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_algorithm": "value"}], ids=["norm", "value"])
@covers("single")
def test_B025_before_and_after_the_clip_for_every_order(clip: Any, order: tuple[int, ...], tmp_path: Path) -> None:
    look, received = Look(), []
    callbacks = [norm_logger(), norm_logger(name="second"), look]
    value = 0.01 if clip else 0.5
    listed = [callbacks[number] for number in order]
    fit(Plain(optimizer=_recording(received)), tmp_path, callbacks=listed, gradient_clip_val=value, **clip)
    scalars = read_run(tmp_path / "run").scalars
    for prefix in ("", "second/"):
        assert list(scalars[f"{prefix}grad_norm/total"].values()) == pytest.approx(look.seen, rel=TOLERANCE)
        assert list(scalars[f"{prefix}grad_norm/total_after"].values()) == pytest.approx(received, rel=TOLERANCE)
    assert all(after < 0.9 * before for before, after in zip(look.seen, received, strict=True)), "nothing was clipped"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_B025_two_clips_at_once_are_said_and_follow_one_order(order: tuple[int, ...], tmp_path: Path) -> None:
    received, listed = Received(), [norm_logger(), total_clip(0.8), layer_clip(0.7)]
    module = Plain(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    callbacks = [*(listed[number] for number in order), received]
    with our_warnings() as messages:
        fit(module, tmp_path, callbacks=callbacks, gradient_clip_val=0.5)
    [message] = messages
    assert message.startswith(
        "two clips act on every step: first LayerClipCallback and then AdaptiveClipThreshold, the"
    )
    assert "Trainer(gradient_clip_val=0.5)" in message
    scalars = read_run(tmp_path / "run").scalars
    for step, given in enumerate(received.norms[0]):
        raw = reference.total_norm(reference_gradients(make_transformer(), expected_batches("transformer", step)))
        assert scalars["grad_norm/total"][step] == pytest.approx(raw, rel=TOLERANCE)
        assert scalars["grad_norm/total_after"][step] == pytest.approx(given, rel=TOLERANCE)
        assert given == pytest.approx(0.5, rel=1e-4)
        # Of the total that the layers' clip leaves, before the Trainer's own.
        assert scalars["clip/total_coefficient"][step] < 1
        assert scalars["clip/layer_coefficient/model.lm_head"][step] < 1


def test_B025_the_order_of_two_clips_of_a_class_does_not_matter() -> None:
    limits = []
    for names in (("a", "b"), ("b", "a")):
        clips = {name: total_clip(1.0 if name == "a" else 2.0, name=name) for name in names}
        with HandLoop(*clips.values(), x=2) as loop:
            loop.step(x=10.0)
        limits.append([loop.points[f"{name}/clip/total_coefficient", 0] for name in ("a", "b")])
    assert limits[0] == limits[1]


@covers("single")
def test_B029_norms_in_manual_optimization(tmp_path: Path) -> None:
    received: list[float] = []
    module = Manual()
    module.make_optimizer = _recording(received)
    fit(module, tmp_path / "one", callbacks=[norm_logger()])
    assert list(read_run(tmp_path / "one/run").scalars["grad_norm/total"].values()) == pytest.approx(received, rel=1e-5)

    two = TwoOptimizers()
    fit(two, tmp_path / "two", callbacks=[norm_logger()], max_steps=6)
    scalars = read_run(tmp_path / "two/run").scalars
    for number, prefix in enumerate(("", "opt1/")):
        assert list(scalars[f"{prefix}grad_norm/total"].values()) == pytest.approx(two.expected[number], rel=1e-5)


class Adversaries(TwoOptimizers):
    """The second optimizer's loss is not finite in the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_index: int) -> None:
        """Each in its turn."""
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            spoiled = number == batch_index == 1
            self.manual_backward(loss_of(self.model, batch) * (torch.nan if spoiled else 1 + number))
            before = [p.detach().clone() for p in self.parameters()]
            optimizer.step()
            if not all(map(torch.equal, before, self.parameters())):
                self.moved.append((batch_index, number))
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


@covers("single")
def test_B029_clip_and_skip_in_manual_optimization(tmp_path: Path) -> None:
    module, received = Adversaries(), Received()
    with our_warnings() as messages:
        fit(module, tmp_path, callbacks=[total_clip(0.5), received], max_steps=6)
    assert module.moved == [(batch, number) for batch in range(3) for number in range(2) if not batch == number == 1]
    assert received.norms == [pytest.approx([0.5] * 3, rel=1e-4), pytest.approx([0.5, 0.0, 0.5], rel=1e-4)]
    [message] = messages
    assert message.startswith("step 1: the gradient is not finite in model.lm_head.weight")
    scalars = read_run(tmp_path / "run").scalars
    assert list(scalars["skip/count"].values()) == [0, 0, 0]
    assert list(scalars["opt1/skip/count"].values()) == [0, 1, 1]


class Shared(TwoOptimizers):
    """The blocks belong to both optimizers; what else there is, to the second."""

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters of both optimizers."""
        blocks, _ = super().parts()
        return blocks, list(self.model.parameters())


class Untoggled(TwoOptimizers):
    """Every backward pass leaves gradients on the parameters of the other optimizer too."""

    def toggle_optimizer(self, optimizer: Any) -> None:
        """No."""

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """No."""


@pytest.mark.parametrize("kind", [TwoOptimizers, Shared, Untoggled])
def test_B044_every_optimizer_has_the_norm_of_its_own_parameters(kind: type[TwoOptimizers], tmp_path: Path) -> None:
    module = kind()
    fit(module, tmp_path, callbacks=[norm_logger()], max_steps=6)
    scalars = read_run(tmp_path / "run").scalars
    outside = {"model.embed_tokens", "model.norm", "model.lm_head"}
    inside = {f"model.layers.{number}" for number in range(4)}
    for number, prefix in enumerate(("", "opt1/")):
        assert list(scalars[f"{prefix}grad_norm/total"].values()) == pytest.approx(module.expected[number], rel=1e-5)
        start = f"{prefix}grad_norm/layer/"
        layers = {tag.removeprefix(start) for tag in scalars if tag.startswith(start)}
        assert layers == (inside if number == 0 else inside | outside if kind is Shared else outside)
        squares = sum(scalars[f"{start}{layer}"][2] ** 2 for layer in layers)
        assert squares**0.5 == pytest.approx(module.expected[number][2], rel=1e-5)


@pytest.mark.parametrize("kind", [TwoOptimizers, Shared, Untoggled])
def test_B044_every_optimizer_is_clipped_by_the_norm_of_its_own_parameters(
    kind: type[TwoOptimizers], tmp_path: Path
) -> None:
    module, received = kind(), Received()
    fit(module, tmp_path, callbacks=[total_clip(2.0), received], max_steps=6)
    scalars = read_run(tmp_path / "run").scalars
    for number, prefix in enumerate(("", "opt1/")):
        coefficients = [min(1.0, 2.0 / total) for total in module.expected[number]]
        assert list(scalars[f"{prefix}clip/total_coefficient"].values()) == pytest.approx(coefficients, rel=TOLERANCE)
        expected = [min(2.0, total) for total in module.expected[number]]
        assert received.norms[number] == pytest.approx(expected, rel=TOLERANCE)
    assert max(module.expected[1]) > 2.0, "nothing was clipped"


def test_B044_layers_of_an_optimizer_that_is_toggled_off_may_be_asked_for(tmp_path: Path) -> None:
    # While the first optimizer steps, the embedding requires no gradient: it is no less a layer of the model.
    module = TwoOptimizers()
    callback = norm_logger(layers=["model.embed_tokens", 0], strict=True)
    fit(module, tmp_path, callbacks=[callback], max_steps=6)
    layers = {tag for tag in read_run(tmp_path / "run").scalars if "grad_norm/layer/" in tag}
    assert layers == {"grad_norm/layer/model.layers.0", "opt1/grad_norm/layer/model.embed_tokens"}


class MeasuresTooEarly(Plain):
    """Calls the function before the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.early: list[float] = []

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        """The loss of one micro-batch."""
        loss = loss_of(self.model, batch)
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters()]
        self.early.append(gradient_norms(self).total_norm.item())
        for old, parameter in zip(before, self.parameters(), strict=True):
            assert (old is None) == (parameter.grad is None)
            assert old is None or torch.equal(old, parameter.grad)
        return loss


def test_B130_norms_before_the_backward_pass_warn(tmp_path: Path) -> None:
    module = MeasuresTooEarly()
    with pytest.warns(StabilizerWarning, match=r"^no gradients found on any of 48 parameters: call this after"):
        fit(module, tmp_path, callbacks=[norm_logger()])
    totals = list(read_run(tmp_path / "run").scalars["grad_norm/total"].values())
    assert all(total > 0 for total in totals)
    # Lightning zeroes gradients after training_step: there, they are those of the step before.
    assert module.early == pytest.approx([0.0, *totals[:-1]], rel=TOLERANCE)


def test_B130_a_stale_gradient_is_left_alone_and_the_warning_comes_once() -> None:
    model = make_mlp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            gradient_norms(model)
    assert [warning.category for warning in caught] == [StabilizerWarning]
    loss_of(model, mlp_batch()).backward()
    stale = [p.grad.clone() for p in model.parameters()]
    assert gradient_norms(model).total_norm > 0
    assert all(torch.equal(old, p.grad) for old, p in zip(stale, model.parameters(), strict=True))


def test_B130_a_clip_before_the_backward_pass_is_said_and_a_callback_needs_no_place(tmp_path: Path) -> None:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "callbacks": [total_clip(0.5)], "log": no_log}
    with our_warnings() as messages, attach(None, **options) as handle:
        for step in range(6):
            optimizer.zero_grad()
            handle.measure()
            loss_of(model, mlp_batch(step=step)).backward()
            raw = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            assert all(torch.equal(old, p.grad) for old, p in zip(raw, model.parameters(), strict=True))
    [message] = messages
    assert message.startswith("none of the 4 trainable parameters had a gradient in the first 3 optimizer steps")

    def clips_too_early(module: Plain, batch: Any, number: int) -> torch.Tensor:
        nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
        return loss_of(module.model, batch)

    received = Received()
    fit(Plain(loss=clips_too_early), tmp_path, callbacks=[total_clip(0.5), received])
    assert received.norms == [pytest.approx([0.5] * 3, rel=1e-4)]
