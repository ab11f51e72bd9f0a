"""The parts of a step in Lightning, in Accelerate and under loss scales, against one process in float64."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stabilizer.callbacks import GradNoiseScaleCallback, attach
from tests import accelerate_loops
from tests.accelerate_loops import make_accelerator
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, expected_batches, make_module, make_trainer
from tests.models import Batch, loss_of, make_transformer, reference_gradients, token_batch
from tests.part_loops import PartProbe
from tests.spread import no_sync

TOLERANCE = 1e-5
STEPS = 3


def covers(host: str, strategy: str) -> pytest.MarkDecorator:
    return pytest.mark.covers(feature="noise scale", host=host, strategy=strategy)


def total(values: dict[str, float]) -> float:
    return sum(values.values())


def summary(seen: dict[str, Any]) -> dict[str, Any]:
    """What is compared, of a step."""
    return {
        "squares": total(seen["squares"]),
        "whole": total(seen["whole"]),
        **{key: seen[key] for key in ("num_parts", "num_ranks", "size")},
    }


def expected(batches: Sequence[Batch], *, num_ranks: int, divisor: int | None = None) -> dict[str, Any]:
    """The same of a step from its micro-batches of all ranks, each weighing one by so many."""
    gradients = [reference_gradients(make_transformer(), [batch]) for batch in batches]
    by_part = [
        torch.cat([g.flatten() for g in one.values() if g is not None]) / (divisor or len(batches)) for one in gradients
    ]
    return {
        "squares": sum(float(part.square().sum()) for part in by_part),
        "whole": float(torch.stack(by_part).sum(0).square().sum()),
        "num_parts": float(len(batches)),
        "num_ranks": float(num_ranks),
        "size": float(sum(len(inputs) for inputs, _ in batches)),
    }


def with_scaler(package: str, scaler: Any) -> dict[str, Any]:
    plugins = importlib.import_module(f"{package}.plugins")
    return {} if scaler is None else {"plugins": plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)}


def growing(scale: float = 64.0) -> Any:
    """Doubles its scale after every step."""
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)


def _lightning(
    rank: int, world_size: int, strategy: str, package: str, micro_batches: int, length: int, scaler: Any = None
) -> Any:
    probe = PartProbe()
    trainer = make_trainer(
        strategy,
        devices=world_size,
        package=package,
        max_steps=STEPS,
        max_epochs=1,
        accumulate_grad_batches=micro_batches,
        callbacks=[probe],
        **with_scaler(package, scaler),
    )
    trainer.fit(make_module("transformer", package=package, learning_rate=0.0, length=length))
    return probe.seen


def _ranks_of(function: Any, strategy: str, *args: Any) -> list[Any]:
    if strategy == "single":
        return [function(0, 1, strategy, *args)]
    return run_distributed(function, strategy, *args)


@pytest.mark.parametrize(
    ("package", "strategy", "micro_batches"),
    [
        pytest.param(PACKAGES[0], "single", 3, marks=covers("lightning", "single")),
        pytest.param(PACKAGES[1], "single", 3, marks=covers("pytorch_lightning", "single")),
        pytest.param(PACKAGES[0], "ddp", 2, marks=covers("lightning", "ddp")),
        pytest.param(PACKAGES[1], "ddp", 2, marks=covers("pytorch_lightning", "ddp")),
        pytest.param(PACKAGES[0], "fsdp1", 2, marks=covers("lightning", "fsdp1")),
        pytest.param(PACKAGES[0], "fsdp2", 2, marks=covers("lightning", "fsdp2")),
    ],
)
def test_lightning_s_parts_are_those_of_one_process(package: str, strategy: str, micro_batches: int) -> None:
    ranks = _ranks_of(_lightning, strategy, package, micro_batches, 96)
    assert all(one == ranks[0] for one in ranks)
    # Under FSDP2 the first forward makes what is hooked.
    for step in range(strategy == "fsdp2", STEPS):
        batches = expected_batches("transformer", step, num_ranks=len(ranks), num_micro_batches=micro_batches)
        assert ranks[0][step]["is_known"]
        assert summary(ranks[0][step]) == pytest.approx(expected(batches, num_ranks=len(ranks)), rel=TOLERANCE)


@pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")
def test_a_short_last_window_has_the_parts_that_it_has() -> None:
    """Five micro-batches in windows of three: the last two are divided by three all the same."""
    [seen] = _ranks_of(_lightning, "single", PACKAGES[0], 3, 15)
    assert list(seen) == [0, 1]
    batches = expected_batches("transformer", 0, num_micro_batches=5)[3:]
    assert summary(seen[1]) == pytest.approx(expected(batches, num_ranks=1, divisor=3), rel=TOLERANCE)


def _accelerate(rank: int, world_size: int, strategy: str, scale: float | None = None) -> Any:
    accelerator = make_accelerator(strategy, gradient_accumulation_steps=2)
    if scale is not None:
        accelerator.scaler = growing(scale)  # which Accelerate refuses on a CPU
    model = make_transformer()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    batches = [b for step in range(STEPS) for b in _batches_of(step, world_size)[rank::world_size]]
    probe = PartProbe()
    with attach(accelerator, model=wrapped, optimizer=optimizer, callbacks=[probe]):
        accelerate_loops.train(accelerator, wrapped, optimizer, batches)
    return probe.seen


def _batches_of(step: int, num_ranks: int) -> list[Batch]:
    return [token_batch(rank, step=step, micro_batch=n) for n in range(2) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("strategy", "scale"),
    [
        pytest.param("single", None, marks=covers("accelerate", "single")),
        ("single", 64.0),
        pytest.param("ddp", None, marks=covers("accelerate", "ddp")),
        ("ddp", 64.0),
        pytest.param("fsdp1", None, marks=covers("accelerate", "fsdp1")),
        pytest.param("fsdp2", None, marks=covers("accelerate", "fsdp2")),
    ],
)
def test_accelerate_s_parts_are_those_of_one_process(strategy: str, scale: float | None) -> None:
    ranks = _ranks_of(_accelerate, strategy, scale)
    assert all(one == ranks[0] for one in ranks)
    for step in range(strategy == "fsdp2", STEPS):
        wanted = expected(_batches_of(step, len(ranks)), num_ranks=len(ranks))
        assert summary(ranks[0][step]) == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_s_loss_scale_is_out_of_it(package: str) -> None:
    """In half precision, with a scale that doubles at every step: what is left is the rounding of fp16."""
    scaler = growing()
    [seen] = _ranks_of(_lightning, "single", package, 2, 96, scaler)
    assert scaler.get_scale() == 64.0 * 2**STEPS
    for step in range(STEPS):
        batches = expected_batches("transformer", step, num_micro_batches=2)
        assert summary(seen[step]) == pytest.approx(expected(batches, num_ranks=1), rel=0.02)


def _scaled_loop(rank: int, world_size: int, bad_step: int | None = None) -> Any:
    """A loop with a scaler of its own; rank 1's last micro-batch of one step overflows."""
    model: nn.Module = make_transformer()
    model = DistributedDataParallel(model) if world_size > 1 else model
    optimizer, scaler, probe = torch.optim.SGD(model.parameters(), lr=0.0), growing(), PartProbe()
    scale = GradNoiseScaleCallback()
    read: list[dict[str, float]] = []
    with attach(None, model=model, optimizer=optimizer, callbacks=[probe, scale], log=lambda *row: None) as handle:
        for step in range(STEPS + 1):
            for number, batch in enumerate(_batches_of(step, world_size)[rank::world_size]):
                with contextlib.nullcontext() if number else no_sync(model):
                    loss = loss_of(model, batch)
                    handle.record_loss(loss.detach(), weight=len(batch[0]))
                    is_bad = step == bad_step and number and rank == world_size - 1
                    (scaler.scale(loss / 2) * (torch.inf if is_bad else 1.0)).backward()
            handle.measure(scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            read.append(scale.reading())
    return probe.seen, read


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loop_s_loss_scale_is_out_of_it(num_ranks: int) -> None:
    ranks = [_scaled_loop(0, 1)] if num_ranks == 1 else run_distributed(_scaled_loop)
    for step in range(STEPS):
        wanted = expected(_batches_of(step, num_ranks), num_ranks=num_ranks)
        assert summary(ranks[-1][0][step]) == pytest.approx(wanted, rel=TOLERANCE)


def test_an_overflow_on_one_rank_is_left_out_on_both() -> None:
    bad = 2
    for _, read in run_distributed(_scaled_loop, bad):
        assert [one["num_steps"] for one in read] == [1, 2, 2, 3]
        assert repr(read[bad]) == repr(read[bad - 1]), "an overflow has left a trace"
        assert torch.tensor(list(read[-1].values())).isfinite().all()


def test_bf16_parts_are_those_of_the_same_autocast() -> None:
    model, probe = make_transformer(), PartProbe()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, batch) / 2

    parts = []
    with attach(None, model=model, optimizer=optimizer, callbacks=[probe], log=lambda *row: None):
        for batch in _batches_of(0, 1):
            loss(batch).backward()
        optimizer.step()
    for batch in _batches_of(0, 1):
        parts.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss(batch), list(model.parameters()))]))
    assert total(probe.seen[0]["squares"]) == pytest.approx(
        sum(float(p.double().square().sum()) for p in parts), rel=1e-5
    )
    assert total(probe.seen[0]["whole"]) == pytest.approx(float(sum(parts).double().square().sum()), rel=1e-5)


class Labelled(nn.Module):
    """Takes `input_ids` and `labels` as models of transformers do; -100 is no label."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_transformer()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean loss over labels."""
        return {"loss": F.cross_entropy(self.model(input_ids).flatten(0, 1), labels.flatten())}


def labelled_batch(step: int, number: int) -> dict[str, Tensor]:
    inputs, labels = token_batch(step=step, micro_batch=number, size=4)
    labels[:, : 1 + 2 * number] = -100
    return {"input_ids": inputs, "labels": labels}


def test_tokens_are_counted_without_those_that_have_no_loss() -> None:
    accelerator = make_accelerator("single", gradient_accumulation_steps=2)
    bare = Labelled()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.0))
    probe, tokens = PartProbe(), GradNoiseScaleCallback(batch_unit="tokens", name="tokens")
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=[probe, tokens, GradNoiseScaleCallback()]):
        for step in range(STEPS):
            for number in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**labelled_batch(step, number))["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
        reading = tokens.reading()
    counts = [float((labelled_batch(0, number)["labels"] != -100).sum()) for number in range(2)]
    assert counts[0] != counts[1]
    assert probe.seen[0]["size"] == 8
    # Means of unequal parts with the same say: as noisy as a batch of this many.
    assert reading["batch"] == pytest.approx(4 / sum(1 / count for count in counts))


@pytest.mark.parametrize("factor", [3.0])
def test_fsdp2_s_own_divisor_is_known(factor: float) -> None:
    for rank in run_distributed(_divided, factor):
        wanted = expected(_batches_of(1, 2), num_ranks=2, divisor=2)
        for key in ("squares", "whole"):
            assert summary(rank[1])[key] == pytest.approx(wanted[key] / factor**2, rel=TOLERANCE)


def _divided(rank: int, world_size: int, factor: float) -> Any:
    from tests.sharding import shard_fsdp2

    model: Any = shard_fsdp2(make_transformer())
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(factor)
    optimizer, probe = torch.optim.SGD(model.parameters(), lr=0.0), PartProbe()
    with attach(None, model=model, optimizer=optimizer, callbacks=[probe], log=lambda *row: None) as handle:
        for step in range(2):
            for number, batch in enumerate(_batches_of(step, world_size)[rank::world_size]):
                with contextlib.nullcontext() if number else no_sync(model):
                    loss = loss_of(model, batch) / 2
                    handle.record_loss(loss.detach(), weight=len(batch[0]))
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return probe.seen
