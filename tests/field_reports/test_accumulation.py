"""Field reports, area accumulation: a step is one optimizer step, however many micro-batches it has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stabilizer import GradientStore, ParameterIndex, gradient_norms
from stabilizer.callbacks import AdaptiveClipThreshold, LossMeanVarCallback, StabilizerCallback, StepContext
from stabilizer.callbacks.context import Position
from tests import reference
from tests.accelerate_loops import Recorder
from tests.event_files import read_run
from tests.field_reports.clip_tools import Received, layer_clip, total_clip
from tests.field_reports.helpers import (
    TOLERANCE,
    covers,
    fit,
    norm_logger,
    our_warnings,
)
from tests.lightning_models import Samples, expected_batches, make_module
from tests.lightning_variants import Plain
from tests.models import Batch, loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients


def _totals(folder: Path) -> dict[int, float]:
    return read_run(folder / "run").scalars["grad_norm/total"]


_SHORT = "step 2 (batch 9) has 2 micro-batches, but each loss is divided by 4: its gradient i"


def test_B026_a_short_last_window_is_measured_as_it_is_and_left_as_it_is(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "accumulate_grad_batches": 4}
    weights = []
    for name, callbacks in (("with", [norm_logger()]), ("without", [])):
        module = make_module("transformer", length=10 * 3)
        with our_warnings() as messages:
            fit(module, tmp_path / name, callbacks=callbacks, **options)
        weights.append([parameter.detach() for parameter in module.parameters()])
        assert [message[:83] for message in messages] == [_SHORT] * len(callbacks)
    assert all(map(torch.equal, *weights)), "the callback changed a gradient"

    module, recorder = make_module("transformer", length=10 * 3, learning_rate=0.0), Recorder(strict=True)
    with our_warnings() as messages:
        fit(module, tmp_path / "still", callbacks=[norm_logger(), recorder], **options)
    assert len(messages) == 1, "told once for all callbacks"
    assert recorder.positions == [Position(3, 4, 4, 0), Position(7, 4, 4, 0), Position(9, 2, 4, 0)]
    assert [position.is_short for position in recorder.positions] == [False, False, True]
    # Lightning divides the loss by 4 in the last window too, though only two micro-batches are left.
    windows = [expected_batches("transformer", step, num_micro_batches=4) for step in range(3)]
    gradients = [reference_gradients(make_transformer(), window) for window in (*windows[:2], windows[2][:2])]
    expected = [reference.total_norm(window) for window in gradients]
    expected[2] *= 2 / 4
    assert _totals(tmp_path / "still") == pytest.approx(dict(enumerate(expected)), rel=TOLERANCE)


def test_B026_a_short_last_window_beside_an_adaptive_clip(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "accumulate_grad_batches": 4}
    weights = []
    for name in ("with", "without"):
        clip = AdaptiveClipThreshold(rule={"name": "mean_multiple", "warmup_steps": 3}, warmup_cap=None, strict=True)
        module = make_module("transformer", length=10 * 3)
        with our_warnings() as messages:
            fit(module, tmp_path / name, callbacks=[clip] if name == "with" else [], **options)
        weights.append([parameter.detach() for parameter in module.parameters()])
        assert [message[:83] for message in messages] == [_SHORT] * (name == "with")
    assert all(map(torch.equal, *weights)), "the callback changed a gradient"
    assert list(read_run(tmp_path / "with/run").scalars["clip/total_coefficient"].values()) == [1, 1, 1]


def _signed_loss(module: Plain, batch: Batch, number: int) -> Tensor:
    return loss_of(module.model, batch) * (1 if number % 4 < 2 else -1)


@covers("single")
def test_B032_one_norm_of_the_full_sum_of_micro_batches_that_cancel(tmp_path: Path) -> None:
    module = Plain(loss=_signed_loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    fit(module, tmp_path, callbacks=[norm_logger()], accumulate_grad_batches=4, max_steps=2)
    totals = _totals(tmp_path)
    assert list(totals) == [0, 1]
    for step, total in totals.items():
        model = make_transformer().double()
        for number, batch in enumerate(expected_batches("transformer", step, num_micro_batches=4)):
            (loss_of(model, batch) * (1 if number < 2 else -1) / 4).backward()
        summed = {name: p.grad for name, p in model.named_parameters()}
        assert total == pytest.approx(reference.total_norm(summed), rel=TOLERANCE)
        alone = reference_gradients(make_transformer(), expected_batches("transformer", step * 4))
        assert total < 0.8 * reference.total_norm(alone), "nothing cancels: the test says nothing"


@covers("single")
def test_B032_one_clip_of_the_full_sum_of_micro_batches_that_cancel(tmp_path: Path) -> None:
    model, signs = make_transformer().double(), (1, 1, -1, -1)
    for sign, batch in zip(signs, expected_batches("transformer", 0, num_micro_batches=4), strict=True):
        (loss_of(model, batch) * sign / 4).backward()
    raw = {name: p.grad for name, p in model.named_parameters()}
    limit = 0.5 * reference.total_norm(raw)
    module = Plain(loss=_signed_loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    fit(module, tmp_path, callbacks=[total_clip(limit)], accumulate_grad_batches=4, max_steps=1)
    start = dict(make_transformer().named_parameters())
    for name, parameter in module.model.named_parameters():
        # Half of the whole sum: a clip of each micro-batch would have turned it.
        torch.testing.assert_close((start[name] - parameter).double(), raw[name] / 2, rtol=1e-4, atol=1e-6)


def _loss_window(**options: Any) -> LossMeanVarCallback:
    return LossMeanVarCallback(**{"windows": [2], "every_n_steps": 1, "warmup_steps": 0, "strict": True, **options})


class AnyBatchSize(Plain):
    """The same 24 samples, in micro-batches of any size.

    Args:
        batch_size: Samples of a micro-batch.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Batch]:
        """All samples in order."""
        return DataLoader(Samples("transformer", length=24), batch_size=self.batch_size)


@covers("single")
def test_B033_norms_and_losses_do_not_depend_on_how_a_batch_is_cut(tmp_path: Path) -> None:
    runs = {}
    for accumulation in (1, 2, 4):
        folder = tmp_path / str(accumulation)
        options: dict[str, Any] = {"accumulate_grad_batches": accumulation, "max_steps": 2}
        fit(AnyBatchSize(12 // accumulation), folder, callbacks=[norm_logger(), _loss_window()], **options)
        scalars = read_run(folder / "run").scalars
        # The extremes are those of micro-batches, which differ.
        named = {tag: points for tag, points in scalars.items() if tag.startswith(("grad_norm/", "loss/mean_"))}
        assert named["loss/mean_2"].keys() == {0, 1}
        runs[accumulation] = named
    assert len(runs[1]) == 9 + 1
    for accumulation in (2, 4):
        assert runs[accumulation].keys() == runs[1].keys()
        for tag, points in runs[1].items():
            assert runs[accumulation][tag] == pytest.approx(points, rel=1e-4), (accumulation, tag)


class Count(StabilizerCallback):
    """Notes the steps at which it is called, and how many losses they have."""

    loss_weight = "samples"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: list[int] = []
        self.after: list[int] = []
        self.num_losses: list[float] = []

    def on_gradients(self, context: StepContext) -> None:
        """Before the step."""
        self.before.append(context.step)
        assert context.loss is not None
        self.num_losses.append(context.loss.num_seen.item())

    def on_step_end(self, context: StepContext) -> None:
        """After it."""
        self.after.append(context.step)


def test_B069_every_hook_of_ours_runs_once_an_optimizer_step(tmp_path: Path) -> None:
    count = Count(strict=True)
    module = make_module("transformer")
    fit(module, tmp_path, callbacks=[count, norm_logger()], accumulate_grad_batches=3, max_steps=3)
    assert len(module.losses) == 9
    assert count.before == count.after == [0, 1, 2]
    assert count.num_losses == [3, 3, 3], "every micro-batch has a loss"
    assert {tuple(points) for points in read_run(tmp_path / "run").ours().values()} == {(0, 1, 2)}


def test_B069_clip_and_skip_act_once_an_optimizer_step(tmp_path: Path) -> None:
    received = Received()
    # One of the nine micro-batches is spoiled: its step is left out, and no other.
    module = Plain(loss=lambda module, batch, number: loss_of(module.model, batch) * (torch.nan if number == 4 else 1))
    callbacks = [layer_clip(0.3), total_clip(0.5), received]
    with our_warnings() as messages:
        fit(module, tmp_path, callbacks=callbacks, accumulate_grad_batches=3, max_steps=3)
    assert len(messages) == 1
    assert received.norms == [pytest.approx([0.5, 0.0, 0.5], rel=1e-4)]
    scalars = read_run(tmp_path / "run").scalars
    ours = {tag: tuple(points) for tag, points in scalars.items() if tag.startswith(("clip/", "skip/"))}
    assert set(ours.values()) == {(0, 1, 2)}
    assert list(scalars["skip/count"].values()) == [0, 1, 1]
    assert list(scalars["clip/total_rate"].values()) == pytest.approx([1, 1 / 2, 2 / 3])


def _not_finite_at(bad: int) -> Any:
    # The gradient is what it should be: a number is added.
    return lambda module, batch, number: loss_of(module.model, batch) + (torch.nan if number == bad else 0)


def test_B088_every_series_and_alarm_has_the_optimizer_step_as_its_axis(tmp_path: Path) -> None:
    callbacks = [norm_logger(heatmap_every_n_steps=4, max_abs_every_n_steps=1), norm_logger(name="second")]
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": 10}
    with our_warnings() as messages:
        trainer = fit(Plain(loss=_not_finite_at(7)), tmp_path, callbacks=[*callbacks, _loss_window()], **options)
    assert trainer.global_step == 10
    run = read_run(tmp_path / "run")
    assert len(run.ours()) == 2 * 9 + 7
    assert {tuple(points) for points in run.ours().values()} == {tuple(range(10))}
    losses = {tag: tuple(points) for tag, points in run.scalars.items() if tag.startswith("loss/")}
    # A deviation and a slope take three losses; the band of a deviation is as long as its mean.
    late = {tag for tag in losses if "std" in tag or "slope" in tag}
    assert len(late) == 3
    assert len(losses) == 3 + 7
    assert losses == {tag: tuple(range(2 if tag in late else 0, 10)) for tag in losses}
    assert run.pictures == {"grad_norm/heatmap": [4, 8, 9]}
    # The eighth batch is the second of the fourth step; its chart shows it there.
    [message] = messages
    assert message.startswith("step 3 (batch 7): the loss is not finite on rank 0 (1 micro-batch since")
    assert run.scalars["loss/nonfinite"] == {step: float(step >= 3) for step in range(10)}


def test_B094_a_generator_given_once_serves_every_step() -> None:
    model = make_mlp()
    index = ParameterIndex(model.parameters())
    store = None
    for step in range(5):
        model.zero_grad()
        batches = [mlp_batch(step=step, micro_batch=number) for number in range(2)]
        for batch in batches:
            (loss_of(model, batch) / 2).backward()
        store = store or GradientStore(index)
        store.measure(step)
        expected = reference.total_norm(reference_gradients(copy.deepcopy(model), batches))
        assert expected > 0
        assert store.view().total_norm.item() == pytest.approx(expected, rel=TOLERANCE)
    for function in (ParameterIndex, gradient_norms):
        with pytest.raises(ValueError, match=r"^0 of 0 parameters"):
            function([])
