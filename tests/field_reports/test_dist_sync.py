"""Field reports, area dist-sync: every rank does the same, whatever it has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from stabilizer import GradientStore, ParameterIndex, gradient_norms
from tests.counting import count_collectives
from tests.event_files import read_run
from tests.field_reports.helpers import TOLERANCE, covers, fit, norm_logger, our_warnings, reference_run, remembered
from tests.launcher import run_distributed
from tests.lightning_models import make_module
from tests.lightning_variants import Plain
from tests.sharding import mesh_1d


def fit_with_all_files(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], dict[str, int], str]:
    callback = norm_logger(heatmap_every_n_steps=2, max_abs_every_n_steps=1, progress_bar=True)
    loggers = [TensorBoardLogger(folder, name="", version="run"), CSVLogger(folder, name="csv", version="")]
    options: dict[str, Any] = {"logger": loggers, "enable_checkpointing": True, "default_root_dir": folder}
    with count_collectives() as calls:
        trainer = fit(make_module("mlp"), folder, strategy="ddp", devices=world_size, callbacks=[callback], **options)
    return remembered(callback), dict(calls.names), trainer.log_dir


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@covers("ddp")
def test_B020_a_run_that_writes_everything_does_not_hang(tmp_path: Path) -> None:
    results = run_distributed(fit_with_all_files, str(tmp_path), timeout=60)
    assert results[0] == results[1], "ranks differ in what they know, in their collectives or in their folder"
    history, calls, _ = results[0]
    assert history["totals"] == pytest.approx(reference_run(num_ranks=2).totals, rel=TOLERANCE)
    assert calls
    assert read_run(tmp_path / "run").pictures == {"grad_norm/heatmap": [2]}
    assert "grad_norm/total" in (tmp_path / "csv/metrics.csv").read_text()
    assert list(tmp_path.rglob("*.ckpt"))


class Branches(nn.Module):
    """Two layers, the second of which not every rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 1, bias=False)
        self.sometimes = nn.Linear(3, 1, bias=False)

    def forward(self, uses_both: bool) -> Tensor:
        """Gradients of ones, and of twos where the second layer is used."""
        x = torch.ones(1, 3)
        return self.always(x).sum() + (2 * self.sometimes(x).sum() if uses_both else 0)


def fit_branches(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], list[str]]:
    from lightning.pytorch.strategies import DDPStrategy

    class AlwaysRankOne(Plain):
        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            return self.model(self.global_rank == 1 and batch_index != 1)

    callback = norm_logger()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(find_unused_parameters=True),
        max_steps=3,
        callbacks=[callback],
        logger=TensorBoardLogger(folder, name="", version="run"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )
    with our_warnings() as messages:
        trainer.fit(AlwaysRankOne(Branches()))
    return remembered(callback), messages


@covers("ddp")
def test_B031_a_layer_that_one_rank_uses_under_ddp(tmp_path: Path) -> None:
    for history, messages in run_distributed(fit_branches, str(tmp_path), timeout=60):
        assert history["layers"]["model.always"] == pytest.approx([3**0.5] * 3)
        # Averaged over two ranks; nobody uses it at step 1.
        assert history["layers"]["model.sometimes"] == pytest.approx([3**0.5, 0, 3**0.5])
        assert messages == []


def measure_unsynchronized(rank: int, world_size: int) -> tuple[dict[str, float], int]:
    model = Branches()
    model(rank == 1).backward()
    assert (model.sometimes.weight.grad is None) == (rank == 0)
    with count_collectives() as calls, our_warnings() as messages:
        result = gradient_norms(model)
    assert [message.startswith("cross-rank check") for message in messages] == ([] if rank else [True])
    return dict(zip(result.layer_names, result.norms.tolist(), strict=True)), len(calls)


def measure_sharded(rank: int, world_size: int) -> tuple[list[float], list[dict[str, int]], list[Any]]:
    parameters = [nn.Parameter(distribute_tensor(torch.zeros(4), mesh_1d(), [Shard(0)])) for _ in range(3)]
    gradient = distribute_tensor(torch.ones(4), mesh_1d(), [Shard(0)])
    store = GradientStore(ParameterIndex(parameters), granularities=("parameter",))
    names, sizes, norms = [], [], []
    for step in range(3):
        for number, parameter in enumerate(parameters):
            parameter.grad = gradient if (rank + step + number) % 3 else None
        with count_collectives() as calls:
            store.measure(step)
        names.append(dict(calls.names))
        sizes.append(calls.sizes)
        norms += store.view("parameter").norms.tolist()
    return norms, names, sizes


def test_B031_the_collective_does_not_depend_on_which_gradients_exist() -> None:
    results = run_distributed(measure_unsynchronized, timeout=60)
    assert [calls for _, calls in results] == [results[0][1]] * 2
    for rank, (layers, _) in enumerate(results):
        assert layers == pytest.approx({"always": 3**0.5, "sometimes": 2 * 3**0.5 if rank else 0})

    first, second = run_distributed(measure_sharded, timeout=60)
    assert first == second
    norms, names, sizes = first
    assert names == [{"c10d.allreduce_.default": 1}] * 3
    assert sizes == [[(3 * 8,)]] * 3
    # Two elements a rank, where the rank has the gradient.
    holders = [sum((rank + step + number) % 3 > 0 for rank in range(2)) for step in range(3) for number in range(3)]
    assert norms == pytest.approx([(2 * count) ** 0.5 for count in holders])
    assert set(holders) == {1, 2}
