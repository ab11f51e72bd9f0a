"""Field reports, area accumulation: a step is one optimizer step, however many micro-batches it has."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stabilizer import GradientStore, ParameterIndex, gradient_norms
from stabilizer.callbacks import StabilizerCallback, StepContext
from tests import reference
from tests.event_files import read_run
from tests.field_reports.helpers import (
    TOLERANCE,
    covers,
    fit,
    norm_logger,
    our_warnings,
    reference_run,
    remembered,
    train,
)
from tests.launcher import run_distributed
from tests.lightning_models import Samples, expected_batches, make_module
from tests.lightning_variants import Plain
from tests.models import Batch, loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients, token_batch
from tests.sharding import shard_fsdp2


def _totals(folder: Path) -> dict[int, float]:
    return read_run(folder / "run").scalars["grad_norm/total"]


def test_B026_a_short_last_window_is_measured_as_it_is_and_left_as_it_is(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "accumulate_grad_batches": 4}
    weights = []
    for name, callbacks in (("with", [norm_logger()]), ("without", [])):
        module = make_module("transformer", length=10 * 3)
        fit(module, tmp_path / name, callbacks=callbacks, **options)
        weights.append([parameter.detach() for parameter in module.parameters()])
    assert all(map(torch.equal, *weights)), "the callback changed a gradient"

    module = make_module("transformer", length=10 * 3, learning_rate=0.0)
    fit(module, tmp_path / "still", callbacks=[norm_logger()], **options)
    # Lightning divides the loss by 4 in the last window too, though only two micro-batches are left.
    windows = [expected_batches("transformer", step, num_micro_batches=4) for step in range(3)]
    gradients = [reference_gradients(make_transformer(), window) for window in (*windows[:2], windows[2][:2])]
    expected = [reference.total_norm(window) for window in gradients]
    expected[2] *= 2 / 4
    assert _totals(tmp_path / "still") == pytest.approx(dict(enumerate(expected)), rel=TOLERANCE)


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
def test_B033_norms_do_not_depend_on_how_a_batch_is_cut(tmp_path: Path) -> None:
    runs = {}
    for accumulation in (1, 2, 4):
        folder = tmp_path / str(accumulation)
        options: dict[str, Any] = {"accumulate_grad_batches": accumulation, "max_steps": 2}
        fit(AnyBatchSize(12 // accumulation), folder, callbacks=[norm_logger()], **options)
        runs[accumulation] = read_run(folder / "run").ours()
    assert len(runs[1]) == 9
    for accumulation in (2, 4):
        assert runs[accumulation].keys() == runs[1].keys()
        for tag, points in runs[1].items():
            assert runs[accumulation][tag] == pytest.approx(points, rel=1e-4), (accumulation, tag)


class Count(StabilizerCallback):
    """Notes the steps at which it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: list[int] = []
        self.after: list[int] = []

    def on_gradients(self, context: StepContext) -> None:
        """Before the step."""
        self.before.append(context.step)

    def on_step_end(self, context: StepContext) -> None:
        """After it."""
        self.after.append(context.step)


def test_B069_every_hook_of_ours_runs_once_an_optimizer_step(tmp_path: Path) -> None:
    count = Count(strict=True)
    module = make_module("transformer")
    fit(module, tmp_path, callbacks=[count, norm_logger()], accumulate_grad_batches=3, max_steps=3)
    assert len(module.losses) == 9
    assert count.before == count.after == [0, 1, 2]
    assert {tuple(points) for points in read_run(tmp_path / "run").ours().values()} == {(0, 1, 2)}


class TwoMicroBatches(Plain):
    """Manual accumulation over two micro-batches; one of them is synchronized, and it should be the last.

    Args:
        synchronized: Which.
    """

    def __init__(self, synchronized: int) -> None:
        super().__init__(make_mlp())
        self.automatic_optimization = False
        self.synchronized = synchronized

    def training_step(self, batch: Batch, batch_index: int) -> None:
        """All by hand."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for number in range(2):
            is_silent = number != self.synchronized
            with self.trainer.strategy.model.no_sync() if is_silent else contextlib.nullcontext():
                batch = mlp_batch(self.global_rank, step=batch_index, micro_batch=number)
                self.manual_backward(loss_of(self.model, batch))
        optimizer.step()


def accumulate_by_hand(rank: int, world_size: int, folder: str, synchronized: int) -> tuple[list[str], list[Tensor]]:
    module = TwoMicroBatches(synchronized)
    with our_warnings() as messages:
        fit(module, folder, strategy="ddp", devices=world_size, callbacks=[norm_logger()], max_steps=5)
    return messages, [p.detach() for p in module.parameters()]


@covers("ddp")
def test_B077_gradients_that_differ_between_ranks_are_said(tmp_path: Path) -> None:
    (wrong, first), (_, second) = run_distributed(accumulate_by_hand, str(tmp_path / "wrong"), 0)
    assert not all(map(torch.equal, first, second)), "the ranks' models have not drifted apart"
    [message] = wrong
    assert message.startswith("cross-rank check: gradients differ between ranks at step 0")
    assert "no_sync()" in message
    (right, first), (_, second) = run_distributed(accumulate_by_hand, str(tmp_path / "right"), 1)
    assert all(map(torch.equal, first, second))
    assert right == []


def test_B088_every_series_has_the_optimizer_step_as_its_axis(tmp_path: Path) -> None:
    callbacks = [norm_logger(heatmap_every_n_steps=4, max_abs_every_n_steps=1), norm_logger(name="second")]
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": -1, "max_epochs": 1}
    trainer = fit(make_module("transformer", length=20 * 3), tmp_path, callbacks=callbacks, **options)
    assert trainer.global_step == 10
    run = read_run(tmp_path / "run")
    assert len(run.ours()) == 2 * 9 + 7
    assert {tuple(points) for points in run.ours().values()} == {tuple(range(10))}
    assert run.pictures == {"grad_norm/heatmap": [4, 8, 9]}


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


def accumulate_without_sync(rank: int, world_size: int) -> list[Any]:
    model = shard_fsdp2(make_transformer())
    results: list[Any] = []
    for step in range(2):
        model.zero_grad()
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            (loss_of(model, token_batch(rank, step=step, micro_batch=number)) / 2).backward()
            if number == 0:
                results.append(all(p.grad is None for p in model.parameters()))
        norms = gradient_norms(model)
        results.append((dict(zip(norms.layer_names, norms.norms.tolist(), strict=True)), norms.total_norm.item()))
    return results


class WithoutSync(TwoMicroBatches):
    """The same under FSDP2."""

    def configure_model(self) -> None:
        """Shard, once."""
        if not hasattr(self.model, "set_requires_gradient_sync"):
            shard_fsdp2(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Batch, batch_index: int) -> None:
        """All by hand."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for number in range(2):
            self.model.set_requires_gradient_sync(number == 1)
            batch = mlp_batch(self.global_rank, step=batch_index, micro_batch=number)
            self.manual_backward(loss_of(self.model, batch) / 2)
        optimizer.step()


def fit_without_sync(rank: int, world_size: int, folder: str) -> tuple[list[str], dict[str, Any]]:
    callback = norm_logger(max_abs_every_n_steps=1)
    with our_warnings() as messages:
        fit(WithoutSync(1), folder, strategy="fsdp2", devices=world_size, callbacks=[callback])
    return messages, remembered(callback)


@covers("fsdp2")
@covers("fsdp2", "plain")
def test_B123_fsdp2_hides_gradients_until_the_last_micro_batch(tmp_path: Path) -> None:
    pairs = [(rank, number) for rank in range(2) for number in range(2)]
    for hidden, _, also_hidden, (layers, total) in run_distributed(accumulate_without_sync):
        assert hidden is also_hidden is True
        batches = [token_batch(rank, step=1, micro_batch=number) for rank, number in pairs]
        gradients = reference_gradients(make_transformer(), batches)
        assert total == pytest.approx(reference.total_norm(gradients), rel=TOLERANCE)
        assert len(layers) == 7
        assert all(norm > 0 for norm in layers.values())

    gradients = reference_gradients(make_mlp(), [mlp_batch(rank, step=0, micro_batch=number) for rank, number in pairs])
    for messages, result in run_distributed(fit_without_sync, str(tmp_path)):
        assert messages == []
        assert result["steps"] == [0, 1, 2]
        assert result["totals"][0] == pytest.approx(reference.total_norm(gradients), rel=TOLERANCE)
    scalars = read_run(tmp_path / "run").ours()
    assert set(scalars.pop("grad_norm/nonfinite").values()) == {0}
    assert all(value > 0 for points in scalars.values() for value in points.values())


@covers("fsdp2")
def test_B123_lightning_s_own_accumulation_under_fsdp2(tmp_path: Path) -> None:
    expected = reference_run("transformer", num_ranks=2, num_micro_batches=2)
    for result in run_distributed(train, str(tmp_path), "fsdp2", kind="transformer", accumulate_grad_batches=2):
        assert result["totals"] == pytest.approx(expected.totals, rel=TOLERANCE)
        assert result["warnings"] == []
