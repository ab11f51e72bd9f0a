"""Long runs and long matrices."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stabilizer.callbacks import GradNormCallback
from tests.event_files import read_run
from tests.launcher import run_distributed
from tests.lightning_models import make_trainer
from tests.models import make_transformer, reference_gradients, token_batch
from tests.spread import CASES
from tests.test_strategies import MODELS, TOLERANCE, _compare, measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_STEPS = 10_000
MEGABYTE = 2**20


class FortyLayers(pl.LightningModule):
    """38 blocks, an embedding and a head, as small as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(38))
        self.head = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A loss that depends on everything."""
        x = self.embed(batch)
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """As many batches as steps."""
        return DataLoader(torch.randn(NUM_STEPS, 2, generator=torch.Generator().manual_seed(0)), batch_size=1)


class Memory(pl.Callback):
    """Resident memory now and then."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look."""
        if batch_idx % 1000 == 999:
            self.bytes[batch_idx + 1] = psutil.Process().memory_info().rss


def test_ten_thousand_steps_of_forty_layers(tmp_path: Path) -> None:
    """With all defaults: under 20 MB of events, every point in its place, and no memory that grows."""
    from lightning.pytorch.loggers import TensorBoardLogger

    memory = Memory()
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    trainer = make_trainer(max_steps=NUM_STEPS, logger=logger, callbacks=[GradNormCallback(), memory])
    trainer.fit(FortyLayers())
    run = read_run(tmp_path / "run")
    assert len({tag for tag in run.scalars if tag.startswith("grad_norm/layer/")}) == 40
    assert list(run.scalars["grad_norm/total"]) == list(range(NUM_STEPS))
    assert list(run.scalars["grad_norm/layer/layers.7"]) == list(range(0, NUM_STEPS, 10))
    assert run.pictures["grad_norm/heatmap"] == [*range(1000, NUM_STEPS, 1000), NUM_STEPS - 1]
    assert run.num_bytes < 20 * MEGABYTE
    assert memory.bytes[10_000] - memory.bytes[3000] < 30 * MEGABYTE


def _matrix() -> list[Any]:
    combinations = []
    for strategy, model, num_micro_batches in itertools.product(CASES, ("plain", *MODELS), (1, 3)):
        is_tensor_parallel = any(part in strategy for part in ("tp", "sp"))
        # The tensor-parallel plans know neither adapters nor tied weights.
        if not (is_tensor_parallel and model in ("tied", "adapters")):
            combinations.append((strategy, model, num_micro_batches))
    return combinations


@pytest.mark.parametrize(("strategy", "model", "num_micro_batches"), _matrix())
def test_every_strategy_with_every_model(strategy: str, model: str, num_micro_batches: int) -> None:
    case, options = CASES[strategy], MODELS.get(model, {})
    results = run_distributed(measure, strategy, options, num_micro_batches, 3, world_size=case.world_size)
    pairs = [(rank, micro) for rank in range(case.num_data_ranks) for micro in range(num_micro_batches)]
    batches = [token_batch(rank, step=2, micro_batch=micro) for rank, micro in pairs]
    _compare(results, reference_gradients(make_transformer(**options), batches), TOLERANCE)
