"""Field reports, area accumulation: which micro-batch is synchronized, and what is visible before, on every host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stabilizer import gradient_norms
from stabilizer.callbacks import LossMeanVarCallback, attach
from tests import reference
from tests.accelerate_loops import make_accelerator, prepared, train
from tests.event_files import read_run
from tests.field_reports.clip_tools import total_clip
from tests.field_reports.helpers import (
    LEARNING_RATE,
    TOLERANCE,
    covers,
    fit,
    norm_logger,
    our_warnings,
    remembered,
)
from tests.launcher import run_distributed
from tests.lightning_models import expected_batches, make_module
from tests.lightning_variants import Plain
from tests.models import Batch, loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients, token_batch
from tests.reference_run import reference_run
from tests.sharding import shard_fsdp2


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


def accumulate_in_a_loop(
    rank: int, world_size: int, folder: str, synchronized: int, *, with_accelerator: bool
) -> tuple[list[str], list[Tensor]]:
    """The same without Lightning: `no_sync` of Accelerate, or of DDP itself."""
    bare = make_mlp()
    accelerator = make_accelerator("ddp") if with_accelerator else None
    model: Any = DistributedDataParallel(bare)
    optimizer: Any = torch.optim.SGD(bare.parameters(), lr=LEARNING_RATE)
    backward, no_sync = Tensor.backward, model.no_sync
    if accelerator is not None:
        model, optimizer = accelerator.prepare(bare, optimizer)
        backward, no_sync = accelerator.backward, lambda: accelerator.no_sync(model)
    handle: Any = attach(
        accelerator, model=model, optimizer=optimizer, callbacks=[norm_logger()], log=lambda *row: None
    )
    with our_warnings() as messages, handle:
        if accelerator is not None:
            backward = accelerator.backward  # ours stands before it now
        for step in range(5):
            optimizer.zero_grad()
            for number in range(2):
                with no_sync() if number != synchronized else contextlib.nullcontext():
                    backward(loss_of(model, mlp_batch(rank, step=step, micro_batch=number)))
            optimizer.step()
    return messages, [p.detach() for p in bare.parameters()]


@covers("ddp")
@covers("ddp", "accelerate")
@covers("ddp", "plain")
@pytest.mark.parametrize("host", ["lightning", "accelerate", "plain"])
def test_B077_gradients_that_differ_between_ranks_are_said(host: str, tmp_path: Path) -> None:
    loop: Callable[..., Any] = accumulate_by_hand if host == "lightning" else accumulate_in_a_loop
    options = {} if host == "lightning" else {"with_accelerator": host == "accelerate"}
    (wrong, first), (_, second) = run_distributed(loop, str(tmp_path / "wrong"), 0, **options)
    assert not all(map(torch.equal, first, second)), "the ranks' models have not drifted apart"
    [message] = wrong
    assert message.startswith("cross-rank check: gradients differ between ranks at step 0")
    assert "no_sync()" in message
    (right, first), (_, second) = run_distributed(loop, str(tmp_path / "right"), 1, **options)
    assert all(map(torch.equal, first, second))
    assert right == []


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


def _loss_window() -> LossMeanVarCallback:
    return LossMeanVarCallback(windows=[2, 3], every_n_steps=1, warmup_steps=0, strict=True)


def fit_without_sync(
    rank: int, world_size: int, folder: str, limit: float
) -> tuple[list[str], dict[str, Any], dict[str, float]]:
    callback, losses = norm_logger(max_abs_every_n_steps=1), _loss_window()
    with our_warnings() as messages:
        callbacks = [callback, losses, total_clip(limit)]
        fit(WithoutSync(1), folder, strategy="fsdp2", devices=world_size, callbacks=callbacks)
    return messages, remembered(callback), losses.statistics()


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

    batches = [mlp_batch(rank, step=0, micro_batch=number) for rank, number in pairs]
    gradients = reference_gradients(make_mlp(), batches)
    losses = [loss_of(make_mlp(), batch).item() for batch in batches]
    limit = 0.5 * reference.total_norm(gradients)
    for messages, result, _ in run_distributed(fit_without_sync, str(tmp_path), limit):
        assert messages == []
        assert result["steps"] == [0, 1, 2]
        assert result["totals"][0] == pytest.approx(reference.total_norm(gradients), rel=TOLERANCE)
    run = read_run(tmp_path / "run")
    norms = run.ours()
    assert set(norms.pop("grad_norm/nonfinite").values()) == {0}
    assert all(value > 0 for points in norms.values() for value in points.values())
    # Both halves belong to one batch of Lightning's: parts of one loss, each divided by two.
    assert run.scalars["loss/mean_2"][0] == pytest.approx(sum(losses) / 4, rel=TOLERANCE)
    assert list(run.scalars["loss/mean_2"]) == [0, 1, 2]
    # One clip a step, of the whole sum.
    assert run.scalars["clip/total_coefficient"][0] == pytest.approx(0.5, rel=TOLERANCE)
    assert run.scalars["grad_norm/total_after"][0] == pytest.approx(limit, rel=TOLERANCE)
    assert list(run.scalars["clip/total_rate"]) == list(run.scalars["skip/count"]) == [0, 1, 2]


def accumulate_under_fsdp2(
    rank: int, world_size: int, folder: str, *, host: str
) -> tuple[list[str], dict[str, Any], dict[str, float]]:
    """Two micro-batches a step, as the host does it."""
    norms, losses = norm_logger(), _loss_window()
    with our_warnings() as messages:
        if host == "lightning":
            module = make_module("transformer")
            options: dict[str, Any] = {"callbacks": [norms, losses], "accumulate_grad_batches": 2}
            fit(module, folder, strategy="fsdp2", devices=world_size, **options)
        else:
            _accumulate_in_accelerate(rank, world_size, [norms, losses])
    return messages, remembered(norms), losses.statistics()


def _accumulate_in_accelerate(rank: int, world_size: int, callbacks: list[Any]) -> None:
    accelerator = make_accelerator("fsdp2", gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *row: None):
        batches = [expected_batches("transformer", step, num_ranks=world_size)[rank] for step in range(6)]
        train(accelerator, model, optimizer, batches)


@covers("fsdp2")
@covers("fsdp2", "accelerate")
@pytest.mark.parametrize("host", ["lightning", "accelerate"])
def test_B123_the_host_s_own_accumulation_under_fsdp2(host: str, tmp_path: Path) -> None:
    steps = [expected_batches("transformer", step, num_ranks=2, num_micro_batches=2) for step in range(3)]
    expected = reference_run(steps)
    means = [sum(losses) / 4 for losses in expected.losses]
    for messages, result, statistics in run_distributed(accumulate_under_fsdp2, str(tmp_path), host=host):
        assert messages == []
        assert result["totals"] == pytest.approx(expected.totals, rel=TOLERANCE)
        assert statistics["mean_3"] == pytest.approx(sum(means) / 3, rel=TOLERANCE)
        assert statistics["mean_2"] == pytest.approx(sum(means[1:]) / 2, rel=TOLERANCE)
