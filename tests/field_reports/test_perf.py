"""Field reports, area perf: what measuring costs. Times are compared within one run only."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from stabilizer import GradientStore, ParameterIndex
from stabilizer.callbacks import GradNormCallback
from tests.counting import Calls, count_collectives
from tests.event_files import read_run
from tests.field_reports.helpers import fit
from tests.launcher import run_distributed
from tests.sharding import mesh_1d


def measure_many(rank: int, world_size: int, counts: tuple[int, int]) -> dict[str, Any]:
    """For each number of parameters: seconds of the first measurement and of later ones, and its collectives.

    Seconds of this thread alone: what other processes and the other rank take does not count.
    """
    mesh = mesh_1d()
    parameters = []
    for number in range(max(counts)):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)], src_data_rank=None))
        parameter.grad = distribute_tensor(torch.full((2,), float(number)), mesh, [Shard(0)], src_data_rank=None)
        parameters.append(parameter)
    first: dict[int, list[float]] = {count: [] for count in counts}
    later: dict[int, list[float]] = {count: [] for count in counts}
    calls: dict[int, Calls] = {}
    for _, count in itertools.product(range(5), counts):
        start = time.thread_time()
        store = GradientStore(ParameterIndex(parameters[:count]), granularities=("parameter",))
        store.measure(0)
        first[count].append(time.thread_time() - start)
        for step in range(1, 6):
            start = time.thread_time()
            store.measure(step)
            later[count].append(time.thread_time() - start)
        with count_collectives() as calls[count]:
            store.measure(6)
    return {
        "first": {count: min(times) for count, times in first.items()},
        "later": {count: min(times) for count, times in later.items()},
        "calls": {count: dict(calls[count].names) for count in counts},
    }


@pytest.mark.alone
def test_B109_time_grows_no_faster_than_the_number_of_parameters() -> None:
    for result in run_distributed(measure_many, (200, 800)):
        assert result["calls"] == {200: {"c10d.allreduce_.default": 1}, 800: {"c10d.allreduce_.default": 1}}
        for when in ("first", "later"):
            assert result[when][800] < 6 * result[when][200], (when, result)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine cost more than the operators of a tiny model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TinyRecurrent(pl.LightningModule):
    """An LSTM with 21,000 parameters: a step of about 5 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(16, 64, batch_first=True)
        self.head = nn.Linear(64, 1)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """The loss of one batch."""
        outputs, _ = self.recurrent(batch)
        return self.head(outputs).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Sequences of 64 steps."""
        return DataLoader([torch.randn(64, 16) for _ in range(64)], batch_size=16)  # type: ignore[arg-type]


class Clock(pl.Callback):
    """Seconds from one batch to the next."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """A step begins where the one before ends."""
        self.times.append(time.perf_counter())

    def median(self) -> float:
        """Of all steps but the first 20."""
        times = self.times[20:]
        return statistics.median(end - start for start, end in itertools.pairwise(times))


@pytest.mark.alone
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval")
def test_B122_all_defaults_cost_less_than_a_third_of_a_tiny_step(tmp_path: Path) -> None:
    def median(callbacks: list[Any], version: str) -> float:
        clock = Clock()
        fit(TinyRecurrent(), tmp_path, version=version, callbacks=[*callbacks, clock], max_steps=200)
        return clock.median()

    ratios: list[float] = []
    # Seven pairs at most: the noise of a busy machine makes some of them worse.
    while len(ratios) < 7 and min(ratios, default=2) >= 1.3:
        with_all = median([GradNormCallback()], f"with{len(ratios)}")
        ratios.append(with_all / median([], f"without{len(ratios)}"))
    assert min(ratios) < 1.3, ratios
    assert len(read_run(tmp_path / "with0").scalars["grad_norm/total"]) == 200


@pytest.mark.usefixtures("one_thread")
def test_B122_intervals_cover_everything_that_is_written(tmp_path: Path) -> None:
    options = {"every_n_steps": 50, "layer_every_n_steps": 50, "max_abs_every_n_steps": 50, "heatmap_every_n_steps": 50}
    fit(TinyRecurrent(), tmp_path, callbacks=[GradNormCallback(**options)], max_steps=120)
    run = read_run(tmp_path / "run")
    assert {tuple(points) for points in run.ours().values()} == {(0, 50, 100)}
    assert run.pictures == {"grad_norm/heatmap": [50, 100, 119]}
