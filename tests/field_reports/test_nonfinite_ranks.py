"""Field reports, area nonfinite-skip: gradients that are not finite on one of two ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, attach
from tests.accelerate_loops import Recorder, make_accelerator
from tests.counting import count_collectives
from tests.field_reports.clip_tools import total_clip
from tests.field_reports.helpers import covers, our_warnings
from tests.launcher import run_distributed
from tests.lightning_models import make_module, make_trainer
from tests.lightning_variants import Plain
from tests.models import loss_of, make_mlp, make_transformer, mlp_batch, token_batch
from tests.skip_tools import INF, NAN, Faults, changed, snapshot, train
from tests.spread import spread
from tests.tiny_loops import no_log


def nan_loss(rank: int, world_size: int) -> dict[str, Any]:
    callback = LayerClipCallback(every_n_steps=1)
    run = train(
        "lightning.pytorch",
        [callback],
        num_steps=6,
        faults={(3, 1): NAN},
        rank=rank,
        num_ranks=world_size,
        strategy="ddp",
    )
    return {"moved": [bool(run.moved(step)) for step in range(6)], "weights": run.states[-1], "done": run.num_done}


@covers("ddp")
def test_B004_a_loss_that_is_not_finite_on_one_rank_freezes_nobody() -> None:
    results = run_distributed(nan_loss, timeout=60)
    for result in results:
        assert result["moved"] == [True, True, True, False, True, True]
        assert result["done"] == 6
    assert changed(results[0]["weights"], results[1]["weights"]) == []


class Snapshots(pl.Callback):
    """Keeps weights and moments as they are before every batch and at the end."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Copy."""
        self.states.append(snapshot(pl_module, trainer.optimizers[0]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Copy."""
        self.states.append(snapshot(pl_module, trainer.optimizers[0]))


def nan_input(rank: int, world_size: int) -> tuple[list[list[str]], bool, list[str], list[dict[str, Tensor]]]:
    module = make_module("mlp", optimizer="adamw")

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        if rank == 1 and batch_idx == 3:
            inputs[0, 2] = NAN
        return loss_of(module.model, (inputs, targets))

    module.training_step = training_step
    seen = Snapshots()
    with our_warnings() as messages:
        callbacks = [LayerClipCallback(), total_clip(1.0), seen]
        make_trainer("ddp", devices=world_size, max_steps=10, callbacks=callbacks).fit(module)
    pairs = zip(seen.states, seen.states[1:], strict=False)
    is_finite = all(bool(torch.isfinite(value).all()) for value in seen.states[-1].values())
    return [changed(*pair) for pair in pairs], is_finite, messages, [seen.states[-1]]


@covers("ddp")
def test_B010_one_bad_sample_on_one_rank_costs_one_step() -> None:
    results = run_distributed(nan_input, timeout=60)
    for moved, is_finite, _, _ in results:
        assert [bool(names) for names in moved] == [True] * 3 + [False] + [True] * 6
        assert is_finite
    assert changed(results[0][3][0], results[1][3][0]) == []
    [message] = results[0][2]
    assert results[1][2] == []
    assert message.startswith("step 3: the gradient is not finite in model.second.")
    assert "the loss is not finite on rank 1" in message
    assert "; the step is skipped" in message


def agree(rank: int, world_size: int, faults: Faults, verb: Any) -> tuple[list[bool], list[int]]:
    """Which of six steps move anything, and how many collectives each optimizer step has."""
    model, _ = spread("fsdp2", rank, num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rule = {"name": "fixed", "threshold": 100.0}
    callbacks = [AdaptiveClipThreshold(rule=rule, on_spike="skip_step", on_nonfinite=verb, strict=True)]
    moved, counts = [], []
    with our_warnings(), attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=no_log):
        for step in range(6):
            before = snapshot(model, optimizer)
            loss = loss_of(model, token_batch(rank, step=step)) * faults.get((step, rank), 1.0)
            loss.backward()
            with count_collectives() as calls:
                optimizer.step()
            counts.append(len(calls))
            optimizer.zero_grad()
            moved.append(bool(changed(before, snapshot(model, optimizer))))
    return moved, counts


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("value", [NAN, 1e6])
def test_B042_ranks_decide_together_with_the_same_collectives(value: float, bad_rank: int) -> None:
    first, second = run_distributed(agree, {(3, bad_rank): value}, "skip_step", timeout=60)
    assert first == second
    moved, counts = first
    assert moved == [True, True, True, False, True, True]
    usual = counts[1]
    assert [count for step, count in enumerate(counts) if step not in (0, 3)] == [usual] * 4
    # Ranks find out together which parameter it was; a spike needs no look.
    assert (counts[3] == usual) == (value == 1e6)


def infinite_shard(rank: int, world_size: int, strategy: str) -> tuple[list[bool], int]:
    model = make_mlp() if strategy == "nobody" else spread(strategy, rank, num_layers=2)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    callback, moved = LayerClipCallback(strict=True), []
    with our_warnings(), attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=no_log):
        for step in range(4):
            before = snapshot(model, optimizer)
            batch = (mlp_batch if strategy == "nobody" else token_batch)(rank, step=step)
            loss_of(model, batch).backward()
            if rank == 1 and step == 2:
                parameter = next(p for p in model.parameters() if p.grad is not None and p.grad.dim() == 2)
                getattr(parameter.grad, "_local_tensor", parameter.grad)[-1, -1] = INF
            optimizer.step()
            optimizer.zero_grad()
            moved.append(bool(changed(before, snapshot(model, optimizer))))
        return moved, callback.num_skipped()


@pytest.mark.parametrize("strategy", ["nobody", "fsdp2"])
def test_B051_what_one_rank_alone_sees_is_decided_by_all(strategy: str) -> None:
    for result in run_distributed(infinite_shard, strategy, timeout=60):
        assert result == ([True, True, False, True], 1)


def end_at_infinity(rank: int, world_size: int, strategy: str) -> Any:
    callback = AdaptiveClipThreshold(on_nonfinite="raise")
    faults = {(2, world_size - 1): INF}
    options: dict[str, Any] = {"rank": rank, "num_ranks": world_size, "strategy": strategy}
    run = train("lightning.pytorch", [callback], num_steps=4, faults=faults, **options)
    return run.error, run.num_done, run.moved(2)


@covers("single")
@covers("ddp")
@covers("fsdp2")
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_B089_raise_ends_the_run_on_every_rank_before_the_update(strategy: str) -> None:
    world_size = 1 if strategy == "single" else 2
    results = run_distributed(end_at_infinity, strategy, world_size=world_size, timeout=60)
    for error, num_done, moved in results:
        assert error is not None
        assert error.startswith("step 2: the gradient is not finite; model.lm_head.weight (")
        assert error.endswith(f"the loss is not finite on rank {world_size - 1}")
        assert num_done == 2
        assert moved == []


def invalid_micro_batch(rank: int, world_size: int, host: str) -> tuple[list[Any], list[str], list[Tensor]]:
    """Three steps of three micro-batches; the fifth is invalid on rank 1."""
    recorder = Recorder(strict=True)
    callbacks = [LayerClipCallback(), recorder]

    def spoiled(model: nn.Module, batch: Any, number: int) -> Tensor:
        return loss_of(model, batch) * (NAN if rank == 1 and number == 4 else 1)

    with our_warnings() as messages, contextlib.ExitStack() as stack:
        if host == "lightning":
            module = Plain(loss=lambda module, batch, number: spoiled(module.model, batch, number))
            options: dict[str, Any] = {"callbacks": callbacks, "accumulate_grad_batches": 3, "max_steps": 3}
            make_trainer("ddp", devices=world_size, **options).fit(module)
            model: nn.Module = module
        else:
            accelerator = make_accelerator("ddp", gradient_accumulation_steps=3)
            bare = make_transformer()
            model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.05))
            stack.enter_context(attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=no_log))
            for number in range(9):
                with accelerator.accumulate(model):
                    accelerator.backward(spoiled(model, token_batch(rank, step=number), number))
                    optimizer.step()
                    optimizer.zero_grad()
    return recorder.positions, messages, [p.detach().clone() for p in model.parameters()]


@covers("ddp")
@covers("ddp", "accelerate")
@pytest.mark.parametrize("host", ["lightning", "accelerate"])
def test_B092_windows_of_micro_batches_stay_together_when_a_step_is_skipped(host: str) -> None:
    (positions, messages, weights), (others, silent, again) = run_distributed(invalid_micro_batch, host, timeout=60)
    assert positions == others
    assert [(position.batch_index, position.num_micro_batches) for position in positions] == [(2, 3), (5, 3), (8, 3)]
    [message] = messages
    assert message.startswith("step 1: the gradient is not finite in ")
    assert "the loss is not finite on rank 1" in message
    assert silent == []
    assert all(map(torch.equal, weights, again))
    assert all(bool(torch.isfinite(weight).all()) for weight in weights)
