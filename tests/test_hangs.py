"""What goes wrong on one rank must not let the others wait: every test here ends, and training goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from stabilizer import losses, measurement
from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, StabilizerCallback, attach, recommended
from stabilizer.store import GradientStore
from tests.accelerate_loops import attached, make_accelerator, prepared
from tests.launcher import run_distributed
from tests.lightning_models import make_module, make_trainer
from tests.models import loss_of, token_batch
from tests.sharding import mesh_1d
from tests.spread import spread
from tests.tiny_loops import HOSTS, OneLayer, Steps, loss_at, no_log, told, unit

STEPS = 12
#: A fault at step 2 is told at step 4 and acted on at step 8.
FAULT, OFF = 2, 8


@contextlib.contextmanager
def _broken_norms(counter: StabilizerCallback, *, is_here: bool) -> Iterator[list[int]]:
    """Local norms cannot be computed from a step on; yields the steps at which a clip was measured again."""
    original, remeasure = measurement.norms, GradientStore.remeasure
    measured_again: list[int] = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        if is_here and counter.next_step() >= FAULT:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args, **kwargs)

    def counted(self: GradientStore, **kwargs: Any) -> Any:
        measured_again.append(counter.next_step())
        return remeasure(self, **kwargs)

    measurement.norms, GradientStore.remeasure = broken, counted  # type: ignore[assignment, method-assign]
    logging.getLogger("stabilizer").disabled = True  # the fault is told by both ranks, with tracebacks
    try:
        yield measured_again
    finally:
        measurement.norms, GradientStore.remeasure = original, remeasure  # type: ignore[method-assign]
        logging.getLogger("stabilizer").disabled = False


def _clipped(rank: int, strategy: str, kind: str) -> tuple[int, list[int]]:
    accelerator = make_accelerator(strategy)
    model, optimizer = prepared(accelerator)
    callbacks: list[Any] = recommended()
    num_done = 0
    with told(), _broken_norms(callbacks[0], is_here=rank == 0) as measured_again:  # noqa: SIM117
        with attached(accelerator, model, optimizer, *callbacks):
            for step in range(STEPS):
                accelerator.backward(loss_of(model, token_batch(rank, step=step)))
                # What another norm leaves has to be measured again.
                norm_type = 2 if kind == "norm" else torch.inf
                accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type)
                optimizer.step()
                optimizer.zero_grad()
                num_done += 1
    return num_done, measured_again


def clip_on_two_ranks(rank: int, world_size: int, *, strategy: str, kind: str) -> tuple[int, list[int]]:
    """Steps done, and at which of them a clip was measured again."""
    return _clipped(rank, strategy, kind)


@pytest.mark.parametrize(("strategy", "kind"), [("fsdp2", "norm"), ("fsdp2", "inf"), ("ddp", "norm")])
def test_measuring_that_fails_on_one_rank_stops_no_clip_of_accelerate(strategy: str, kind: str) -> None:
    for num_done, measured_again in run_distributed(clip_on_two_ranks, strategy=strategy, kind=kind, timeout=30):
        assert num_done == STEPS
        assert [step for step in measured_again if step >= OFF] == [], "nothing is measured once all is off"
        if kind == "norm":
            assert measured_again == []


@pytest.mark.parametrize("kind", ["norm", "inf"])
def test_once_measuring_is_off_a_clip_costs_nothing(kind: str) -> None:
    num_done, measured_again = _clipped(0, "single", kind)
    assert num_done == STEPS
    assert [step for step in measured_again if step >= FAULT] == []


def clip_in_lightning(rank: int, world_size: int, *, algorithm: str) -> tuple[int, list[int]]:
    """Steps done, and at which of them a clip was measured again."""
    callbacks: list[Any] = recommended()
    with told(), _broken_norms(callbacks[0], is_here=rank == 0) as measured_again:
        trainer = make_trainer(
            "fsdp2",
            devices=world_size,
            max_steps=STEPS,
            callbacks=callbacks,
            gradient_clip_val=1.0,
            gradient_clip_algorithm=algorithm,
        )
        trainer.fit(make_module("transformer"))
    return trainer.global_step, measured_again


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_measuring_that_fails_on_one_rank_stops_no_clip_of_lightning(algorithm: str) -> None:
    for num_done, measured_again in run_distributed(clip_in_lightning, algorithm=algorithm, timeout=40):
        assert num_done == STEPS
        assert [step for step in measured_again if step >= OFF] == []
        if algorithm == "norm":
            assert measured_again == []


def joined(rank: int, world_size: int, *, host: str) -> dict[str, Any]:
    """Three batches on one rank and six on the other inside `join`, then two more on both."""
    accelerator = make_accelerator("ddp") if host == "accelerate" else None
    model: Any = OneLayer()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    if accelerator is None:
        model = DistributedDataParallel(model)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    steps, norms = Steps(), GradNormCallback()

    def step(value: float, handle: Any) -> None:
        loss = loss_at(model, value)
        if accelerator is None:
            loss.backward()
            handle.record_loss(loss)
            handle.measure()
        else:
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()

    with told() as warnings:  # noqa: SIM117
        with attach(accelerator, model=model, optimizer=optimizer, callbacks=[norms, steps], log=no_log) as handle:
            step(1.0, handle)
            with model.join():
                for _ in range(6 if rank else 3):
                    step(100.0, handle)
            inside = steps.next_step()
            for _ in range(2):
                step(2.0 + 2 * rank, handle)
    return {"inside": inside, "rows": steps.done, "norms": norms.norm_history().steps, "warnings": warnings}


@pytest.mark.parametrize("host", HOSTS)
def test_inside_join_nothing_is_done_and_it_is_told(host: str) -> None:
    results = run_distributed(joined, host=host, timeout=30)
    for result in results:
        assert result["inside"] == 1, "no step of a joined loop is counted"
        assert result["rows"][0] == (0, 1.0, 1.0)
        assert 100.0 not in [loss for _, _, loss in result["rows"]]
    [message] = results[0]["warnings"]
    assert "join" in message


@pytest.mark.parametrize("host", HOSTS)
def test_after_a_join_they_stay_off_on_every_rank(host: str) -> None:
    """Torch keeps its mark, whether or not a rank had a batch inside; a branch that differed would hang."""
    for result in run_distributed(joined, host=host, timeout=30):
        assert result["rows"] == [(0, 1.0, 1.0)]
        assert result["norms"] == [0]


def resumed_on_one_rank(rank: int, world_size: int, *, strategy: str, on_rank: int) -> str:
    """What the first step says when only one rank has loaded its states."""
    model, _ = spread(strategy, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(handle: Any) -> None:
        loss = loss_of(model, token_batch(rank))
        loss.backward()
        handle.record_loss(loss)
        optimizer.step()
        optimizer.zero_grad()

    arguments: dict[str, Any] = {"model": model, "optimizer": optimizer, "log": no_log}
    with attach(None, callbacks=recommended(), **arguments) as handle:
        for _ in range(3):
            step(handle)
        states = handle.state_dict()
    with attach(None, callbacks=recommended(), **arguments) as handle:
        if rank == on_rank:
            handle.load_state_dict(states)
        with pytest.raises(ValueError, match="every rank") as caught:
            step(handle)
    return str(caught.value)


@pytest.mark.parametrize(("strategy", "on_rank"), [("ddp", 0), ("ddp", 1), ("fsdp2", 0)])
def test_states_that_one_rank_alone_has_loaded_are_an_error_everywhere(strategy: str, on_rank: int) -> None:
    for message in run_distributed(resumed_on_one_rank, strategy=strategy, on_rank=on_rank, timeout=30):
        assert "3" in message
        assert "0" in message


def with_a_fault(rank: int, world_size: int, *, strategy: str, fault: str) -> list[Any]:
    """Twelve clipped steps; from step 2 on something of ours raises on rank 0 alone."""
    originals = losses.LossReduction._sums, losses._extremes
    norms, means = GradNormCallback(heatmap_every_n_steps=None), LossMeanVarCallback(every_n_steps=3)

    def broken(which: int, *args: Any) -> Any:
        if fault == ("losses", "packing")[which] and rank == 0 and norms.next_step() >= FAULT:
            raise RuntimeError("losses cannot be packed")
        return originals[which](*args)

    accelerator = make_accelerator(strategy)
    model, optimizer = prepared(accelerator)
    logging.getLogger("stabilizer").disabled = True
    losses.LossReduction._sums = lambda *args: broken(0, *args)  # type: ignore[method-assign]
    losses._extremes = lambda *args: broken(1, *args)
    try:
        with told(), attached(accelerator, model, optimizer, norms, means):
            for step in range(STEPS):
                accelerator.backward(loss_of(model, token_batch(rank, step=step)))
                accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=torch.inf)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        losses.LossReduction._sums, losses._extremes = originals  # type: ignore[method-assign]
        logging.getLogger("stabilizer").disabled = False
    return [norms.norm_history().steps, norms.has_failed, means.has_failed]


@pytest.mark.parametrize("fault", ["losses", "packing"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_fault_on_one_rank_turns_off_what_needs_it_and_nothing_else(strategy: str, fault: str) -> None:
    for steps, norms_failed, means_failed in run_distributed(with_a_fault, strategy=strategy, fault=fault, timeout=40):
        assert steps == list(range(STEPS))
        assert not norms_failed
        assert means_failed


def distributed_losses(rank: int, world_size: int) -> list[float]:
    """Losses of steps at which ranks record whole tensors, replicas and parts."""
    mesh = mesh_1d()
    model, optimizer = unit()
    steps = Steps()
    parts = torch.tensor(1.0 + rank)
    recorded: list[Any] = [
        DTensor.from_local(torch.tensor(4.0), mesh, [Replicate()], run_check=False),
        DTensor.from_local(parts, mesh, [Partial()]),  # 1 + 2
        DTensor.from_local(torch.tensor(4.0), mesh, [Replicate()], run_check=False) if rank == 0 else parts,  # 4 and 2
    ]
    with attach(None, model=model, optimizer=optimizer, callbacks=[steps], log=no_log) as handle:
        for loss in recorded:
            loss_at(model, 1.0).backward()
            handle.record_loss(loss, weight=1)
            optimizer.step()
            optimizer.zero_grad()
    return steps.losses()


def test_a_distributed_loss_is_taken_as_its_full_value() -> None:
    assert run_distributed(distributed_losses, timeout=30) == [[4.0, 3.0, 3.0]] * 2
