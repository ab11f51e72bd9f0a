"""Field reports, area noise-scale: data whose covariance is known, what is kept, and which optimizer it is for."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stabilizer.callbacks import GradNoiseScaleCallback, attach
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed
from tests.spread import no_sync
from tests.stateful import differences

DIM, SIZE = 64, 8
#: The gradient of a sample is the sample: of mean `_mean()` and this deviation in every dimension.
DEVIATION = 1.5
#: Relative.
TOLERANCE = 0.15


def _mean() -> Tensor:
    return torch.linspace(-0.5, 0.5, DIM)


def _truth() -> float:
    """tr(Sigma) / |G|^2."""
    return DIM * DEVIATION**2 / float(_mean().square().sum())


def _samples(rank: int, step: int, number: int, size: int = SIZE, dim: int = DIM) -> Tensor:
    generator = torch.Generator().manual_seed((step * 100 + number) * 10 + rank)
    mean = _mean() if dim == DIM else torch.zeros(dim)
    return mean + DEVIATION * torch.randn(size, dim, generator=generator)


def _train(
    rank: int,
    world_size: int,
    micro_batches: int,
    steps: int,
    *,
    options: dict[str, Any] | None = None,
    optimizer: str = "SGD",
    dim: int = DIM,
    bad_step: int | None = None,
    look: Any = lambda: None,
) -> Any:
    """A linear model at learning rate 0; what is read, after every step."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(dim, 1, bias=False)
    model = DistributedDataParallel(model) if world_size > 1 else model
    moving = getattr(torch.optim, optimizer)(model.parameters(), lr=0.0)
    callback, read = GradNoiseScaleCallback(**(options or {})), []
    with attach(None, model=model, optimizer=moving, callbacks=[callback], log=lambda *row: None) as handle:
        for step in range(steps):
            for number in range(micro_batches):
                batch = _samples(rank, step, number, dim=dim)
                with contextlib.nullcontext() if number == micro_batches - 1 else no_sync(model):
                    loss = model(batch).mean()
                    handle.record_loss(loss.detach(), weight=len(batch))
                    is_bad = step == bad_step and rank == 0 and number == 0
                    (loss * (torch.inf if is_bad else 1 / micro_batches)).backward()
            looked = look()
            moving.step()
            moving.zero_grad()
            read.append(callback.reading())
    return read, looked


@pytest.mark.parametrize("steps", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("source", "micro_batches"), [("local", 1), ("micro_batch", 2)])
def test_B062_two_ranks_find_the_analytic_noise_scale(source: str, micro_batches: int, steps: int) -> None:
    options = {"source": source, "decay": 0.999}
    (first, _), (second, _) = run_distributed(_train, micro_batches, steps, options=options, timeout=120)
    assert differences(first[-1], second[-1]) == []
    assert first[-1]["num_steps"] == steps
    assert first[-1]["batch"] == pytest.approx(2 * micro_batches * SIZE)
    assert first[-1]["noise_scale"] == pytest.approx(_truth(), rel=TOLERANCE)


def test_B062_one_process_finds_it_in_its_micro_batches() -> None:
    read, _ = _train(0, 1, 2, 300, options={"source": "micro_batch", "decay": 0.999})
    assert read[-1]["noise_scale"] == pytest.approx(_truth(), rel=TOLERANCE)


def test_B062_one_rank_with_one_micro_batch_is_told_that_there_is_nothing() -> None:
    with pytest.warns(StabilizerWarning, match="the noise scale is not available: one process with one micro-batch"):
        read, _ = _train(0, 1, 1, 40)
    assert read[-1]["num_steps"] == read[-1]["reliable"] == 0


LARGE = 100_000


def _held() -> int:
    """Elements of all tensors that are alive, each storage once."""
    gc.collect()
    found = [value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter)]
    tensors = [value for value in found if value.layout == torch.strided]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) // 4


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_B083_what_is_kept_does_not_grow_with_the_number_of_micro_batches() -> None:
    _held()  # what other tests have left behind is not freed in between
    held = [_train(0, 1, number, 2, dim=LARGE, look=_held)[1] for number in (2, 2, 64)]
    # A gradient is 100,000 elements; a micro-batch leaves its norms, its loss and its size.
    assert held[2] - held[1] < 64 * 100


def test_B083_an_overflow_on_one_rank_is_left_out_on_both() -> None:
    for read, _ in run_distributed(_train, 8, 6, bad_step=3):
        assert [one["num_steps"] for one in read] == [1, 2, 3, 3, 4, 5]
        assert differences(read[3], read[2]) == []
        assert torch.tensor(list(read[-1].values())).isfinite().all()


def test_B133_the_reading_is_that_of_the_raw_gradient_whatever_the_optimizer() -> None:
    sgd, adam = (_train(0, 1, 2, 30, optimizer=name)[0] for name in ("SGD", "Adam"))
    assert sgd[-1]["num_steps"] == 30
    assert differences(sgd[-1], adam[-1]) == []
    assert "whatever the optimizer makes of it" in " ".join((GradNoiseScaleCallback.__doc__ or "").split())
