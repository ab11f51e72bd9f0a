"""Field reports, area dist-sync: every rank does the same, whatever it has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from stabilizer import GradientStore, ParameterIndex, gradient_norms
from stabilizer.callbacks import LossMeanVarCallback, attach
from tests.accelerate_loops import Recorder, make_accelerator
from tests.counting import count_collectives
from tests.event_files import read_run
from tests.field_reports.clip_tools import layer_clip
from tests.field_reports.helpers import TOLERANCE, covers, fit, norm_logger, our_warnings, reference_run, remembered
from tests.launcher import run_distributed
from tests.lightning_models import make_module
from tests.lightning_variants import Plain
from tests.loggers import read_csv, read_event_files
from tests.sharding import mesh_1d


def fit_with_all_files(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], dict[str, int], str]:
    callback = norm_logger(heatmap_every_n_steps=2, max_abs_every_n_steps=1, progress_bar=True)
    losses = LossMeanVarCallback(windows=(2, 3), every_n_steps=1, warmup_steps=0)
    loggers = [TensorBoardLogger(folder, name="", version="run"), CSVLogger(folder, name="csv", version="")]
    options: dict[str, Any] = {"logger": loggers, "enable_checkpointing": True, "default_root_dir": folder}
    with count_collectives() as calls:
        callbacks = [callback, losses]
        trainer = fit(make_module("mlp"), folder, strategy="ddp", devices=world_size, callbacks=callbacks, **options)
    return {**remembered(callback), "loss": losses.statistics()}, dict(calls.names), trainer.log_dir


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@covers("ddp")
def test_B020_a_run_that_writes_everything_does_not_hang(tmp_path: Path) -> None:
    results = run_distributed(fit_with_all_files, str(tmp_path), timeout=60)
    assert results[0] == results[1], "ranks differ in what they know, in their collectives or in their folder"
    history, calls, _ = results[0]
    assert history["totals"] == pytest.approx(reference_run(num_ranks=2).totals, rel=TOLERANCE)
    assert calls
    assert read_run(tmp_path / "run").pictures == {"grad_norm/heatmap": [2]}
    assert read_csv(tmp_path / "csv/metrics.csv") == read_event_files(tmp_path / "run")
    assert ("loss/slope_3", 2) in read_event_files(tmp_path / "run")
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


def fit_branches(rank: int, world_size: int, folder: str, *, host: str) -> tuple[dict[str, Any], list[str]]:
    norms, losses = norm_logger(), LossMeanVarCallback(windows=[3], every_n_steps=1)
    with our_warnings() as messages:
        if host == "lightning":
            _lightning_branches(world_size, folder, [norms, losses])
        else:
            _loop_branches(rank, [norms, losses], with_accelerator=host == "accelerate")
    return {**remembered(norms), "loss": losses.statistics()}, messages


def _lightning_branches(world_size: int, folder: str, callbacks: list[Any]) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    class AlwaysRankOne(Plain):
        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            return self.model(self.global_rank == 1 and batch_index != 1)

    pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(find_unused_parameters=True),
        max_steps=3,
        callbacks=callbacks,
        logger=TensorBoardLogger(folder, name="", version="run"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
    ).fit(AlwaysRankOne(Wrapped.branches()))


class Wrapped(nn.Module):
    """The branches under the name that they have in the Lightning module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.branches()

    @staticmethod
    def branches() -> Branches:
        """Weights of one half: every rank begins with the same."""
        made = Branches()
        for parameter in made.parameters():
            nn.init.constant_(parameter, 0.5)
        return made

    def forward(self, uses_both: bool) -> Tensor:
        """The branches' result."""
        output: Tensor = self.model(uses_both)
        return output


def _loop_branches(rank: int, callbacks: list[Any], *, with_accelerator: bool) -> None:
    bare = Wrapped()
    optimizer: Any = torch.optim.SGD(bare.parameters(), lr=0.05)
    accelerator: Any = None
    if with_accelerator:
        accelerator = make_accelerator(
            "ddp", kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
        )
        model, optimizer = accelerator.prepare(bare, optimizer)
    else:
        model = DistributedDataParallel(bare, find_unused_parameters=True)
    attached = attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *row: None)
    with attached as handle:
        for step in range(3):
            loss = model(rank == 1 and step != 1)
            # What the model gets has no samples that could be counted.
            handle.record_loss(loss, weight=1)
            if accelerator is None:
                loss.backward()
            else:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@covers("ddp")
@covers("ddp", "accelerate")
@covers("ddp", "plain")
@pytest.mark.parametrize("host", ["lightning", "accelerate", "plain"])
def test_B031_a_layer_that_one_rank_uses_under_ddp(host: str, tmp_path: Path) -> None:
    # The losses of both ranks: 3 weights of one half, and twice as much where the second layer is used; plain SGD.
    always, sometimes = 1.5 - 0.15 * torch.arange(3.0), torch.tensor([1.5, 1.35, 1.35])
    mean = (always + sometimes * torch.tensor([1.0, 0.0, 1.0])).mean().item()
    for history, messages in run_distributed(fit_branches, str(tmp_path), host=host, timeout=60):
        assert history["layers"]["model.always"] == pytest.approx([3**0.5] * 3)
        # Averaged over two ranks; nobody uses it at step 1.
        assert history["layers"]["model.sometimes"] == pytest.approx([3**0.5, 0, 3**0.5])
        assert history["loss"]["mean_3"] == pytest.approx(mean)
        assert messages == []


def clip_branches(rank: int, world_size: int) -> list[float | None]:
    recorder = Recorder(strict=True)
    _loop_branches(rank, [layer_clip(1.0), recorder], with_accelerator=False)
    return recorder.afters


@covers("ddp", "plain")
def test_B031_a_layer_that_one_rank_uses_is_clipped_on_both() -> None:
    for afters in run_distributed(clip_branches, timeout=60):
        # Nobody uses the second layer at step 1.
        assert afters == pytest.approx([2**0.5, 1.0, 2**0.5], rel=TOLERANCE)


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
    # One float64 a name, and a few for the step.
    assert sizes == [sizes[0]] * 3
    [[num_bytes]] = sizes[0]
    assert 3 * 8 <= num_bytes <= (3 + 4) * 8
    # Two elements a rank, where the rank has the gradient.
    holders = [sum((rank + step + number) % 3 > 0 for rank in range(2)) for step in range(3) for number in range(3)]
    assert norms == pytest.approx([(2 * count) ** 0.5 for count in holders])
    assert set(holders) == {1, 2}
