"""Recovery where a run is not the usual one: several optimizers, averages, a loss scale, saves in between."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from stabilizer.callbacks import CheckpointGuardCallback
from stabilizer.callbacks.replays import Replays
from stabilizer.callbacks.rolling_back_hosts import refusal
from stabilizer.callbacks.run_host import RunHost
from stabilizer.errors import TrainingStoppedError
from stabilizer.recovery import SkipEntry, write_skip_list
from tests.lightning_models import PACKAGES, make_trainer
from tests.recovery_runs import BATCH, ROLL_BACK, Guard, Line, Loader, Module, fit, make_net, test_loss
from tests.test_recovery_lightning import LADDER, LENGTH, bad_batches

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")


class Game:
    """Two nets with an optimizer each, in manual optimization; the second one steps first, and twice a batch."""

    def __init__(self, data: Line) -> None:
        super().__init__()
        self.data, self.automatic_optimization = data, False
        self.nets = nn.ModuleList([make_net(), make_net()])
        self.before: list[list[torch.Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Three steps."""
        self.before.append([parameter.detach().clone() for parameter in self.nets.parameters()])
        inputs, targets = batch
        for number in (1, 0, 1):
            optimizer = self.optimizers()[number]  # type: ignore[attr-defined]
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.nets[number](inputs), targets))  # type: ignore[attr-defined]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        """One for each."""
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in self.nets]

    def train_dataloader(self) -> Loader:
        """In order."""
        return Loader(self.data, batch_size=BATCH)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize("package", PACKAGES)
def test_several_optimizers_in_manual_optimization(tmp_path: Path, package: str) -> None:
    lightning = importlib.import_module(package)
    kind: Any = type("Game", (Game, lightning.LightningModule), {"__module__": __name__})
    module = kind(Line(60 * BATCH, bad=range(33 * BATCH, 34 * BATCH)))
    conditions = [{"name": "nonfinite", "num": 2}]
    guard = CheckpointGuardCallback(conditions=conditions, ladder=LADDER, strict=True)
    # Lightning counts the steps of both.
    saves = importlib.import_module(f"{package}.callbacks").ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=30, save_top_k=-1
    )
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "enable_checkpointing": True}
    make_trainer(callbacks=[guard, saves], package=package, default_root_dir=tmp_path, **options).fit(module)
    # Both are in trouble at the same step: that is one rung.
    [entry] = guard.recovery.history
    assert "(step 30)" in entry.outcome
    assert guard.recovery.ladder.num_rollbacks == 1
    # The batch after it begins with what batch 30 began with, both nets alike.
    assert all(torch.equal(one, other) for one, other in zip(module.before[30], module.before[34], strict=True))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())
    assert (guard.next_step(0), guard.next_step(1)) == (60, 120)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_several_optimizers_in_trouble_at_a_step_take_one_rung(tmp_path: Path) -> None:
    kind: Any = type("Game", (Game, importlib.import_module(PACKAGES[0]).LightningModule), {"__module__": __name__})
    guard = CheckpointGuardCallback(
        conditions=[{"name": "nonfinite", "num": 1}], ladder=["alarm", "skip", "stop"], strict=True
    )
    module = kind(Line(40 * BATCH, bad=range(33 * BATCH, 34 * BATCH)))
    trainer = make_trainer(callbacks=[guard], default_root_dir=tmp_path, max_steps=-1, max_epochs=1)
    with pytest.raises(TrainingStoppedError):
        trainer.fit(module)
    steps = [entry.step for entry in guard.recovery.history]
    assert [entry.rung for entry in guard.recovery.history] == ["alarm", "skip", "stop"]
    assert steps == sorted(set(steps))


def test_what_is_loaded_by_executing_it_alone_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    class WithPath(Module):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["hyper_parameters"] = {"root": tmp_path}

    guard = Guard(ladder=["roll_back"])
    data = Line(LENGTH, bad=bad_batches(33, 35))
    module = fit(guard, tmp_path / "run", data=data, kind=WithPath)
    [entry, *_] = guard.recovery.history
    assert entry.rung == "roll_back"
    assert "not done" in entry.outcome
    assert "Path, which is not loaded without executing code" in entry.outcome
    assert "add_safe_globals" in entry.outcome
    # Nothing was left out, and nothing is said to be bad.
    assert len(guard.recovery.skips) == 0
    assert not (tmp_path / "run" / "skip_list.json").exists()
    assert [batch for _, batch, _ in module.seen] == [*range(100)]


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_averages_of_weights_go_back_too(tmp_path: Path) -> None:
    ema = EMAWeightAveraging(decay=0.9)
    weights: list[torch.Tensor] = []
    averages: list[torch.Tensor] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            weights.append(pl_module.net[0].weight.detach().clone())
            averages.append(ema._average_model.module.net[0].weight.detach().clone())

    guard = Guard(ladder=LADDER)
    data = Line(LENGTH, bad=bad_batches(33, 35))
    fit(None, tmp_path, data=data, shuffles=True, callbacks=[guard, ema, Look()])
    assert torch.equal(weights[36], weights[30])
    assert torch.equal(averages[36], averages[30])
    assert not torch.equal(weights[30], averages[30])


class Spoiled(Module):
    """Its gradient is infinite at some batches, its loss is not."""

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx in (10, 11, 12):
            self.net[0].weight.grad.fill_(torch.inf)


@pytest.mark.parametrize("what", ["overflow", "loss"])
def test_an_overflow_is_the_scaler_s_affair_and_a_bad_loss_is_not(tmp_path: Path, what: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # type: ignore[attr-defined]
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    guard = Guard(conditions=["nonfinite"], ladder=[ROLL_BACK])
    bad = range(33 * BATCH, 36 * BATCH) if what == "loss" else ()
    data = Line(60 * BATCH, bad=bad)
    kind = Spoiled if what == "overflow" else Module
    module = fit(guard, tmp_path, data=data, kind=kind, trainer_options={"plugins": plugin})
    assert [entry.rung for entry in guard.recovery.history] == (["roll_back"] if what == "loss" else [])
    assert bool(torch.isfinite(module.net[0].weight).all())
    if what == "loss":
        assert scaler.get_scale() == 4.0  # of the checkpoint: three bad steps had halved it three times


def test_a_save_by_somebody_else_when_a_rollback_is_due(tmp_path: Path) -> None:
    """Saving closes the step, and must not find the model put back in its middle."""
    seen: dict[str, Any] = {}

    class Saver(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 35:
                trainer.save_checkpoint(tmp_path / "mine.ckpt")
                seen["weight"] = pl_module.net[0].weight.detach().clone()

    guard = Guard(ladder=LADDER)
    data = Line(LENGTH, bad=bad_batches(33, 35))
    module = fit(None, tmp_path, data=data, shuffles=True, callbacks=[Saver(), guard])
    mine = torch.load(tmp_path / "mine.ckpt", weights_only=True)
    assert torch.equal(mine["state_dict"]["net.0.weight"], seen["weight"]) or bool(seen["weight"].isnan().all())
    assert bool(mine["state_dict"]["net.0.weight"].isnan().all())
    assert len(guard.recovery.history) == 1
    assert bool(torch.isfinite(module.net[0].weight).all())


def test_the_same_callback_in_two_fits(tmp_path: Path) -> None:
    guard = Guard(ladder=LADDER)
    data = Line(LENGTH, bad=bad_batches(33, 35))
    first = fit(guard, tmp_path / "one", data=data, shuffles=True)
    rungs = [entry.rung for entry in guard.recovery.history]
    assert rungs == ["roll_back"]
    assert type(first.trainer.train_dataloader.batch_sampler).__name__ == "BatchSampler"
    assert vars(first.trainer.fit_loop.epoch_loop).get("advance") is None
    second = fit(guard, tmp_path / "two", data=Line(LENGTH), shuffles=True)
    # Another run has another list, and its own rungs.
    assert [batch for _, batch, _ in second.seen] == [*range(100)]
    assert (guard.recovery.history, len(guard.recovery.skips)) == ([], 0)


class Plain(Module):
    """Its loader begins anew when a run resumes in the middle of an epoch."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        return DataLoader(self.data, batch_sampler=loader.batch_sampler)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
@pytest.mark.parametrize("kind", [Module, Plain])
def test_samples_of_a_resumed_epoch_are_those_that_were_drawn(tmp_path: Path, kind: type[Module]) -> None:
    fit(Guard(last_save=30), tmp_path, data=Line(LENGTH), shuffles=True, kind=kind)
    guard = Guard(conditions=[lambda context: context.step == 45], ladder=LADDER)
    resume_from = tmp_path / "alarms" / "at_30.ckpt"
    module = fit(guard, tmp_path, data=Line(LENGTH), shuffles=True, kind=kind, resume_from=resume_from)
    [listed] = guard.recovery.skips.entries
    assert (listed.first_batch, listed.last_batch) == (40, 45)
    drawn = [value for _, batch, values in module.seen if 40 <= batch <= 45 for value in values]
    assert [float(module.data.inputs[sample, 0]) for sample in listed.sample_ids[0]] == drawn


class Stream(IterableDataset[Any]):
    """Samples whose number nobody knows."""

    def __iter__(self) -> Any:
        return iter([Line(BATCH * 10)[number] for number in range(BATCH * 10)])


class Streaming(Module):
    """Trains on a stream and validates after each epoch."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=BATCH)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.trainer.current_epoch, -1, []))

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=BATCH)


def test_a_stream_whose_last_batches_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    write_skip_list(file, [SkipEntry(8, 9, epoch=0, first_batch=8, last_batch=9)])
    guard = Guard(skip_list=file)
    module = fit(guard, tmp_path, data=Line(BATCH), kind=Streaming, max_epochs=2)
    first = [(0, batch) for batch in range(8)] + [(0, -1)]
    assert [(epoch, batch) for epoch, batch, _ in module.seen] == first + [(1, batch) for batch in range(10)] + [
        (1, -1)
    ]
    assert module.trainer.global_step == 20
    assert [step for step, _ in guard.losses] == [*range(8), *range(10, 20)]


def test_who_cannot_go_back() -> None:
    def host(kind: Any, num: int = 1) -> RunHost:
        optimizers = [torch.optim.SGD(make_net().parameters(), lr=0.1) for _ in range(num)]
        return RunHost(kind, None, make_net(), optimizers, Replays([]), [])

    assert refusal(host("lightning", 2)) == ""
    assert refusal(host("accelerate")) == ""
    assert refusal(host("transformers")).startswith("transformers' trainer cannot be put back")
    assert refusal(host("plain")).startswith("a plain loop cannot be put back")
    assert refusal(host("accelerate", 2)).startswith("a loop with 2 optimizers")


def test_a_list_without_a_use_changes_nothing(tmp_path: Path) -> None:
    plain = fit(None, tmp_path / "plain", data=Line(LENGTH))
    guarded = fit(Guard(ladder=["alarm", "skip", "lower_lr", ROLL_BACK, "stop"]), tmp_path, data=Line(LENGTH))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), guarded.parameters(), strict=True))
    assert test_loss(plain.net) == test_loss(guarded.net)
