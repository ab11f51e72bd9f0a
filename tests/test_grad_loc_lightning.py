"""GradLoc in a Trainer of both packages: the bad token is found, and neither run nor logs show that anybody looked."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, cpu_fsdp_strategy, make_trainer
from tests.localize_loops import Fault, Plan, batches
from tests.stateful import differences
from tests.test_grad_loc_identity import HOW, Lively, Part, expected, make_callback, summary, traces

FAULTS = (Fault(12, ((0, 0, 1, 3),)), Fault(15, ((0, 1, 0, 5), (0, 1, 1, 0))), Fault(18, ((0, 1, 1, 2),)))
SPREAD_FAULTS = (*FAULTS[:2], Fault(18, ((1, 1, 1, 2),)))
ACCUMULATION = 2


class Body:
    """The Lightning side of a Lively: logs, returns a dictionary, and takes its batch apart."""

    plan = Plan(steps=22, faults=FAULTS, micro_batches=ACCUMULATION, rows=2, length=6)

    def configure_model(self) -> None:
        """Shard over the mesh of ModelParallelStrategy."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None:
            module: Any = self
            for part in (module.embed_tokens, *module.layers, module.lm_head):
                fully_shard(part, mesh=mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """The loss, logged in every way."""
        module: Any = self
        loss = Lively.forward(module, batch)
        module.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=2, sync_dist=True)
        module.log("mean", module.mean, on_step=False, on_epoch=True, batch_size=2)
        module.log_dict({"level": module.level}, batch_size=2)
        if module.logger is not None:
            module.logger.experiment.add_scalar("direct", loss.detach(), module.counts["forwards"])
        return {"loss": loss, "other": [batch_idx]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)  # type: ignore[attr-defined]

    def train_dataloader(self) -> Any:
        """The micro-batches of this rank, in order."""
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        rows = [row for step in batches(self.plan, trainer.global_rank) for row in step]
        found = [dict(zip(("tokens", "targets", "weights"), row, strict=True)) for row in rows]
        return DataLoader(found, batch_size=None)  # type: ignore[arg-type]


@functools.cache
def module_class(package: str) -> type[Any]:
    """The class for one import name."""
    base = importlib.import_module(package).LightningModule
    return type("LivelyModule", (Body, Lively, base), {"__module__": __name__})


def make_module(package: str = PACKAGES[0], *, rank: int = 0, **attributes: Any) -> Any:
    """A module, and everybody's random numbers at their start."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    module = module_class(package)()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def trainer_for(module: Any, callbacks: list[Any], *, package: str = PACKAGES[0], **options: Any) -> Any:
    """A Trainer for all of the module's data."""
    plan: Plan = module.plan
    defaults = {"max_steps": plan.steps, "accumulate_grad_batches": plan.micro_batches, "callbacks": callbacks}
    return make_trainer(package=package, **{**defaults, **options})


def left(trainer: Any, module: Any) -> Any:
    """Everything that a fit leaves."""
    progress = {key: float(value) for key, value in trainer.callback_metrics.items()}
    counts = (trainer.global_step, trainer.fit_loop.total_batch_idx, progress, sorted(trainer.logged_metrics))
    return traces(module, trainer.optimizers[0]), repr(counts)


def fit(callbacks: list[Any], *, package: str = PACKAGES[0], rank: int = 0, module: Any = None, **options: Any) -> Any:
    """Train, and give back what is left of it."""
    module = make_module(package, rank=rank) if module is None else module
    trainer = trainer_for(module, callbacks, package=package, **options)
    trainer.fit(module)
    return left(trainer, module)


def scalars(folder: Path) -> dict[str, Any]:
    """All points of all tags but ours, and but the epoch, which comes with each of them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag != "epoch" and "gradloc" not in tag]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "package", [pytest.param(name, marks=pytest.mark.covers(host=name.partition(".")[0])) for name in PACKAGES]
)
@pytest.mark.covers(feature="token localisation", strategy="single")
def test_a_fit_is_the_same(package: str, how: str, tmp_path: Path) -> None:
    loggers = importlib.import_module(f"{package}.loggers")
    found, callback = {}, make_callback(how, tmp_path / "incidents")
    for name, callbacks in {"without": [], "with": [callback]}.items():
        logger = loggers.TensorBoardLogger(tmp_path, name=name, version="")
        found[name] = fit(callbacks, package=package, logger=logger)
    assert summary(callback) == expected(how, FAULTS)
    assert differences(found["with"], found["without"]) == []
    logged = scalars(tmp_path / "without")
    assert {"loss_step", "loss_epoch", "level", "mean", "direct"} <= logged.keys()
    assert len(logged["direct"]) == len(list(batches(Body.plan, 0))) * ACCUMULATION
    assert scalars(tmp_path / "with") == logged


def _spread(rank: int, world_size: int, strategy: str, how: str, folder: str) -> Any:
    found, callback = [], make_callback(how, folder)
    for callbacks in ([], [callback]):
        module = make_module(rank=rank, plan=Plan(**{**vars(Body.plan), "faults": SPREAD_FAULTS}))
        chosen = cpu_fsdp_strategy(PACKAGES[0])(use_orig_params=True, auto_wrap_policy={Part})
        trainer = trainer_for(
            module, callbacks, strategy=chosen if strategy == "fsdp1" else strategy, devices=world_size
        )
        trainer.fit(module)
        found.append(left(trainer, module))
    return differences(*found), summary(callback)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=pytest.mark.covers(strategy=name)) for name in ("ddp", "fsdp1", "fsdp2")]
)
@pytest.mark.covers(feature="token localisation", host="lightning")
def test_a_fit_of_two_processes_is_the_same(strategy: str, how: str, tmp_path: Path) -> None:
    for differing, told in run_distributed(_spread, strategy, how, str(tmp_path)):
        assert told == expected(how, SPREAD_FAULTS)
        assert differing == []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums over several threads have other bits, and two take far longer where others want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    num = torch.get_num_threads()
    torch.set_num_threads(before)
    assert num == 1, "a fit has changed the number of threads"


@pytest.mark.parametrize("package", PACKAGES)
def test_half_precision_with_a_scaler(package: str, one_thread: None, tmp_path: Path) -> None:
    precision = importlib.import_module(f"{package}.plugins.precision").MixedPrecision
    # What half precision can hold.
    faults = tuple(Fault(fault.step, fault.bad, 150.0) for fault in FAULTS)
    found, callback = [], make_callback("triggered", tmp_path)
    for callbacks in ([], [callback], []):
        module = make_module(package, plan=Plan(**{**vars(Body.plan), "faults": faults}))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=4)
        plugin = precision("16-mixed", "cpu", scaler=scaler)
        found.append((fit(callbacks, package=package, module=module, plugins=plugin), scaler.get_scale()))
        assert scaler.get_scale() > 2.0**6
    without, searched, control = found
    assert differences(without, control) == [], "torch does not compute the same twice here, whoever watches"
    assert differences(without, searched) == []
    assert summary(callback) == expected("triggered", faults)
