"""What the noise scale costs: collectives, batches that are kept, waits of the host."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import GradLocCallback, GradNoiseScaleCallback, GradNormCallback, attach
from stabilizer.callbacks.replays import Replays
from stabilizer.errors import StabilizerWarning
from stabilizer.tally import MicroBatchLoss
from tests.counting import count_collectives, fake_cuda
from tests.fake_suites import fake_suite
from tests.launcher import run_distributed
from tests.models import loss_of, make_mlp, make_transformer, mlp_batch, token_batch
from tests.spread import spread
from tests.test_grad_noise_scale_edges import run

pytestmark = pytest.mark.norms


def _collectives(rank: int, world_size: int, strategy: str, callbacks: list[Any]) -> list[tuple[int, int]]:
    model, data_rank = spread(strategy, rank)
    _, _, seen = run(*callbacks, model=model, rank=data_rank, steps=range(9), look=lambda step: count_collectives())
    return [(len(calls), sum(max(sizes) for sizes in calls.sizes)) for _, calls in seen]


@pytest.mark.parametrize(("strategy", "added"), [("ddp", 1), ("fsdp2", 0)])
def test_a_step_has_one_small_collective_and_those_between_have_none(strategy: str, added: int) -> None:
    beside = GradNormCallback(heatmap_every_n_steps=None)
    with_it, without = (
        run_distributed(_collectives, strategy, callbacks)[0]
        for callbacks in ([beside, GradNoiseScaleCallback(every_n_steps=2)], [beside])
    )
    # At steps 5 to 7 the ranks have nothing else to tell each other; step 6 is looked at.
    assert [one[0] - other[0] for one, other in zip(with_it, without, strict=True)][5:8] == [0, added, 0]
    extra = [one[1] - other[1] for one, other in zip(with_it, without, strict=True)]
    # One flag more, in a collective that is there anyway.
    assert max(extra[5], extra[7]) <= 8
    assert 8 < extra[6] <= 8 * (48 + 10 + 6)


class Gone(GradNoiseScaleCallback):
    """Counts the batches that are alive when a step is over."""

    batches: list[weakref.ref[Any]]
    alive: list[int]

    def on_step_end(self, context: Any) -> None:
        super().on_step_end(context)
        gc.collect()
        self.alive.append(sum(ref() is not None for ref in self.batches))


@pytest.mark.parametrize("fails", [None, 1])
def test_batches_are_not_kept(fails: int | None, tmp_path: Path) -> None:
    """With a search beside it they are, until that has failed."""

    class Failing(GradLocCallback):
        def on_gradients(self, context: Any) -> None:
            raise RuntimeError("a fault of ours")

    callback = Gone()
    callback.batches, callback.alive = [], []
    model, others = make_transformer(), [] if fails is None else [Failing(dump_dir=str(tmp_path))]

    def batches(step: int) -> Any:
        for number in range(3):
            batch = token_batch(step=step, micro_batch=number)
            callback.batches.append(weakref.ref(batch[0]))
            yield batch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(None, model=model, optimizer=optimizer, callbacks=[callback, *others], log=lambda *row: None) as handle:
        for step in range(4):
            for batch in batches(step):
                loss_of(model, batch).backward()
                handle.record_loss(1.0)
            del batch
            optimizer.step()
            optimizer.zero_grad()
    assert callback.alive == ([0, 0, 0, 0] if fails is None else [3, 0, 0, 0])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_host_never_waits_for_the_device() -> None:
    callbacks = [
        GradNoiseScaleCallback(per_layer=True, log_every_n_steps=1),
        GradNoiseScaleCallback(name="b", every_n_steps=2),
    ]
    with fake_cuda():
        suite = fake_suite(callbacks, replays=Replays(callbacks))
        for _ in range(5):
            losses = [MicroBatchLoss(torch.ones((), device="cuda"), (3, 3)) for _ in range(2)]
            gradients = suite._searches.gradients
            assert gradients is not None
            # A backward pass is not possible on a fake device: what its hooks would have left.
            for _ in range(2):
                gradients.local.add(gradients.segments.sum(torch.ones(len(gradients.store.index), device="cuda")))
            suite.run(losses=losses, grad_scale=torch.full((), 2.0, device="cuda"))
            context = suite._contexts[0]
            assert context.parts is not None
            assert context.parts.squares.device.type == "cuda"
            suite.finish()
        assert suite.step == 6
        assert all(not callback.has_failed for callback in callbacks)


@pytest.mark.parametrize("searches", [False, True])
def test_hundreds_of_micro_batches_are_all_counted_or_told_to_be_too_many(searches: bool, tmp_path: Path) -> None:
    """A search keeps 256 of them."""
    model, callback = make_mlp(), GradNoiseScaleCallback(log_every_n_steps=1)
    callbacks: list[Any] = [callback, *([GradLocCallback(dump_dir=str(tmp_path))] if searches else [])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with (
        pytest.warns(StabilizerWarning) if searches else contextlib.nullcontext() as told,
        attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *row: None),
    ):
        for _ in range(4):
            for number in range(260):
                loss_of(model, mlp_batch(micro_batch=number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = callback.reading()
    if searches:
        assert any("more micro-batches than are kept for a search" in str(one.message) for one in told or ())
        assert found["num_steps"] == 0
    else:
        assert found["num_steps"] == 4
        assert found["batch"] == pytest.approx(260)
