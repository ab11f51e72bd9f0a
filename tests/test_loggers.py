"""Any logger gets the same numbers at the same steps, from every host."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, attach
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import make_accelerator, make_optimizer, prepared, train
from tests.contract_hosts import Wrapped
from tests.event_files import read_run
from tests.lightning_models import PACKAGES, expected_batches, make_module, make_trainer
from tests.loggers import (
    CSVTracker,
    OfflineRun,
    Points,
    WandbTracker,
    points_of,
    read_csv,
    read_event_files,
    row_logger,
    wandb_logger,
)
from tests.models import loss_of

NUM_STEPS = 5
USER = "user/loss"


def _callbacks() -> list[Any]:
    norms = GradNormCallback(layer_every_n_steps=2, heatmap_every_n_steps=2)
    return [LossMeanVarCallback(windows=(2, 3), every_n_steps=2, warmup_steps=0), norms]


def _lightning(folder: Path, package: str) -> dict[str, Points]:
    loggers = importlib.import_module(f"{package}.loggers")
    rows, run = row_logger(package), wandb_logger(package)
    writers = [
        loggers.TensorBoardLogger(folder, name="", version="run"),
        loggers.CSVLogger(folder, name="csv", version=""),
    ]
    module = make_module("transformer", package=package)
    original = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = original(batch, batch_idx)
        module.log(USER, loss)
        return loss

    module.training_step = training_step
    make_trainer(
        package=package, max_steps=NUM_STEPS, callbacks=_callbacks(), logger=[*writers, rows, run], log_every_n_steps=1
    ).fit(module)
    return {
        "rows": points_of(rows.rows),
        "wandb": run.experiment.points(),
        "tensorboard": read_event_files(folder / "run"),
        "csv": read_csv(folder / "csv/metrics.csv"),
    }


def _accelerate(folder: Path, trackers: list[Any], callbacks: list[Any]) -> list[float]:
    """The user logs the loss of every step at the step, before and after ours come."""
    accelerator = make_accelerator(log_with=trackers, project_dir=str(folder))
    accelerator.init_trackers("run")
    bare = Wrapped()
    model, optimizer = accelerator.prepare(bare, make_optimizer(bare))
    losses: list[float] = []
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks):
        for step in range(NUM_STEPS):
            [batch] = expected_batches("transformer", step)
            loss = loss_of(model, batch)
            losses.append(loss.item())
            if step % 2:
                accelerator.log({USER: losses[-1]}, step=step)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if not step % 2:
                accelerator.log({USER: losses[-1]}, step=step)
    accelerator.end_training()
    return losses


def _plain(log: Any) -> None:
    model = Wrapped()
    optimizer = make_optimizer(model)
    with attach(None, model=model, optimizer=optimizer, callbacks=_callbacks(), log=log) as handle:
        for step in range(NUM_STEPS):
            [batch] = expected_batches("transformer", step)
            loss = loss_of(model, batch)
            loss.backward()
            handle.record_loss(loss)
            optimizer.step()
            optimizer.zero_grad()


def _split(points: Points) -> tuple[Points, list[float]]:
    """Ours, and the user's values in the order of steps."""
    users = sorted((step, value) for (tag, step), value in points.items() if tag == USER)
    return {key: value for key, value in points.items() if key[0] != USER}, [value for _, value in users]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Points]:
    """Points of every logger in every host, and what the user has logged."""
    folder = tmp_path_factory.mktemp("loggers")
    found: dict[str, Points] = {}
    for package in PACKAGES:
        found |= {f"{package}, {name}": points for name, points in _lightning(folder / package, package).items()}
    csv, wandb = CSVTracker(folder / "rows.csv"), WandbTracker()
    _accelerate(folder, ["tensorboard", csv, wandb], _callbacks())
    assert wandb.run.dropped == []
    found["accelerate, tensorboard"] = read_event_files(folder / "run")
    found["accelerate, csv"] = read_csv(csv.path)
    found["accelerate, wandb"] = wandb.run.points()
    alone = WandbTracker()
    _accelerate(folder / "alone", [alone], _callbacks())
    found["accelerate, wandb alone"] = alone.run.points()
    rows: list[Any] = []
    _plain(lambda *row: rows.append(row))
    found["plain, function"] = points_of(rows)
    with SummaryWriter(str(folder / "plain")) as writer:
        _plain(writer)
    found["plain, tensorboard"] = read_event_files(folder / "plain")
    return found


def test_every_logger_and_host_has_the_same_points(everything: dict[str, Points]) -> None:
    expected, _ = _split(everything["lightning.pytorch, rows"])
    assert {step for tag, step in expected if tag == "grad_norm/total"} == set(range(NUM_STEPS))
    assert {step for tag, step in expected if tag == "loss/mean_2"} == {0, 2, 4}
    assert {step for tag, step in expected if tag == "grad_norm/layer/model.layers.3"} == {0, 2, 4}
    for name, points in everything.items():
        assert _split(points)[0] == expected, name


def test_nothing_of_the_user_s_is_lost(everything: dict[str, Points]) -> None:
    _, expected = _split(everything["accelerate, csv"])
    assert len(set(expected)) == NUM_STEPS
    for name, points in everything.items():
        if not name.startswith("plain"):
            assert _split(points)[1] == pytest.approx(expected, rel=1e-7), name


def test_pictures_and_charts_reach_tensorboard_from_every_host(tmp_path: Path) -> None:
    _lightning(tmp_path / "lightning", PACKAGES[0])
    _accelerate(tmp_path / "accelerate", ["tensorboard"], _callbacks())
    with SummaryWriter(str(tmp_path / "plain/run")) as writer:
        _plain(writer)
    for host in ("lightning", "accelerate", "plain"):
        run = read_run(tmp_path / host / "run")
        assert run.pictures == {"grad_norm/heatmap": [2, 4]}, host
        assert run.layouts == 1, host


@pytest.mark.parametrize("every", [1, 2])
def test_two_optimizers_and_wandb(every: int) -> None:
    """Each has rows and steps of its own, which must not push W&B's step ahead of the user's."""
    tracker = WandbTracker()
    accelerator = make_accelerator(log_with=[tracker])
    accelerator.init_trackers("run")
    bare = Wrapped()
    parameters = list(bare.parameters())
    halves = (parameters[:20], parameters[20:])
    model, *optimizers = accelerator.prepare(bare, *(torch.optim.SGD(half, lr=0.05) for half in halves))
    callbacks = [GradNormCallback(layer_every_n_steps=None, heatmap_every_n_steps=None)]
    with attach(accelerator, model=model, optimizer=optimizers, callbacks=callbacks):
        for step in range(NUM_STEPS):
            loss = loss_of(model, expected_batches("transformer", step)[0])
            accelerator.backward(loss)
            for optimizer in optimizers[: 1 if step % every else 2]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            accelerator.log({USER: loss.item()}, step=step)
    points = tracker.run.points()
    assert tracker.run.dropped == []
    expected = {USER: NUM_STEPS, "grad_norm/total": NUM_STEPS, "opt1/grad_norm/total": len(range(0, NUM_STEPS, every))}
    for tag, num in expected.items():
        assert [step for name, step in points if name == tag] == list(range(num)), tag


def test_a_loop_without_a_log_is_told_once() -> None:
    with pytest.warns(StabilizerWarning, match=r"give attach\(\.\.\., log=\)") as caught:
        _plain(None)
    assert len(caught) == 1


def test_an_accelerator_without_trackers_is_told_once() -> None:
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    with pytest.warns(StabilizerWarning, match="the Accelerator has no trackers") as caught:  # noqa: SIM117
        with attach(accelerator, model=model, optimizer=optimizer, callbacks=_callbacks()):
            train(accelerator, model, optimizer, [expected_batches("transformer", step)[0] for step in range(3)])
    assert len(caught) == 1


def test_the_offline_run_behaves_as_wandb_does() -> None:
    """As W&B 0.31 was seen to: an earlier step is dropped, the same one merges, none ends the row."""
    run = OfflineRun()
    run.define_metric("axis")
    run.define_metric("ours", step_metric="axis")
    run.log({"user": 0.0}, step=0)
    run.log({"ours": 10.0, "axis": 5})
    assert run.step == 1
    run.log({"user": 1.0}, step=1)
    run.log({"other": 1.5}, step=1)
    run.log({"ours": 11.0, "axis": 6})
    run.log({"ours": 12.0})  # takes the last value of its axis: it would be twice at 6
    assert run.step == 3
    run.log({"user": 2.0}, step=2)
    assert run.dropped == [{"user": 2.0}]
    run.log({"user": 7.0}, step=7)
    assert run.step == 7
    with pytest.raises(AssertionError, match="ours was written twice at step 6"):
        run.points()
