"""Field reports, area state-resume: what a callback leaves in checkpoints, pickles and copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradNormCallback,
    LayerClipCallback,
    LossMeanVarCallback,
    attach,
)
from stabilizer.callbacks.state_files import load_states
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import make_accelerator, prepared, train
from tests.event_files import read_run
from tests.field_reports.helpers import LEARNING_RATE, TOLERANCE, covers, fit, norm_logger, reference_run, remembered
from tests.lightning_models import BATCH_SIZE, expected_batches, make_loader, make_module
from tests.models import Batch, loss_of, make_mlp, token_batch
from tests.states import Copier, same


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool, Tensor)


def _everything() -> list[Any]:
    first = norm_logger(heatmap_every_n_steps=2, max_abs_every_n_steps=2, granularity={"bias$": "biases"})
    second = norm_logger(name="largest", norm_type=float("inf"), layers=["model.first"], history=4)
    losses = LossMeanVarCallback(windows=(2, 5), every_n_steps=1, warmup_steps=0)
    return [first, second, losses, LayerClipCallback(), AdaptiveClipThreshold(rule="quantile")]


def _short_epochs() -> Any:
    # Three steps an epoch: Lightning starts an epoch's data over when it resumes in the middle of one.
    return make_module("mlp", length=3 * BATCH_SIZE)


@covers("single")
def test_B005_a_checkpoint_holds_plain_types_only_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "step3.ckpt"
    fit(_short_epochs(), tmp_path, version="first", callbacks=_everything(), max_steps=3).save_checkpoint(path)
    states = torch.load(path, weights_only=True)["callbacks"]
    names = ["GradNormCallback", "GradNormCallback[largest]", "LayerClipCallback", "LossMeanVarCallback"]
    assert sorted(states) == ["AdaptiveClipThreshold", *names]
    assert _is_plain(states)
    assert states["GradNormCallback"]["extra"]["history"]["0"]["norms"].shape == (3, 4)

    whole, resumed = _everything(), _everything()
    fit(_short_epochs(), tmp_path, version="whole", callbacks=whole, max_steps=6)
    fit(_short_epochs(), tmp_path, version="second", callbacks=resumed, max_steps=6, ckpt_path=path)
    for again, once in zip(resumed, whole, strict=True):
        assert same(again.state_dict(), once.state_dict())
    scalars = {name: read_run(tmp_path / name).scalars for name in ("whole", "second")}
    for tag, points in scalars["second"].items():
        assert points == {step: value for step, value in scalars["whole"][tag].items() if step >= 3}, tag
    assert "loss/slope_5" in scalars["second"]


@covers("single")
def test_B009_each_of_two_callbacks_gets_its_own_state_back(tmp_path: Path) -> None:
    def callbacks() -> list[GradNormCallback]:
        return [norm_logger(name="short", history=2), norm_logger(name="long", history=64, norm_type="inf")]

    path, saved, loaded = tmp_path / "step6.ckpt", callbacks(), callbacks()
    fit(_short_epochs(), tmp_path, version="first", callbacks=saved, max_steps=6).save_checkpoint(path)
    # In another order: what counts is the name.
    fit(_short_epochs(), tmp_path, version="second", callbacks=loaded[::-1], max_steps=6, ckpt_path=path)
    assert [remembered(callback) for callback in loaded] == [remembered(callback) for callback in saved]
    assert [remembered(callback)["steps"] for callback in loaded] == [[4, 5], [0, 1, 2, 3, 4, 5]]


@covers("single")
def test_B009_each_of_two_loss_windows_gets_its_own_state_back(tmp_path: Path) -> None:
    def callbacks(**options: Any) -> list[LossMeanVarCallback]:
        return [LossMeanVarCallback(windows=[window], name=f"last_{window}", **options) for window in (8, 64)]

    path, saved, loaded = tmp_path / "step12.ckpt", callbacks(every_n_steps=4), callbacks(every_n_steps=4)
    fit(_short_epochs(), tmp_path, version="first", callbacks=saved, max_steps=12).save_checkpoint(path)
    states = torch.load(path, weights_only=True)["callbacks"]
    assert sorted(states) == ["LossMeanVarCallback[last_64]", "LossMeanVarCallback[last_8]"]
    # In another order: what counts is the name.
    fit(_short_epochs(), tmp_path, version="second", callbacks=loaded[::-1], max_steps=12, ckpt_path=path)
    for again, once in zip(loaded, saved, strict=True):
        assert same(again.state_dict(), once.state_dict())
    short, long = (callback.statistics() for callback in loaded)
    assert short.keys() != long.keys()
    assert short["mean_8"] < long["mean_64"], "the loss falls: the last 8 steps lie below all 12"
    # A state finds its callback though unrelated options have changed, and says so.
    others = callbacks(every_n_steps=3, warmup_steps=5)
    assert [callback.state_key for callback in others] == [callback.state_key for callback in saved]
    with pytest.warns(StabilizerWarning, match="every_n_steps: 4 -> 3"):
        others[0].load_state_dict(states[others[0].state_key])
    assert others[0].statistics() == short


def test_B009_the_key_of_a_state_is_class_and_name_alone() -> None:
    options: list[dict[str, Any]] = [{}, {"every_n_steps": 7}, {"norm_type": "inf"}, {"layers": [0]}, {"history": 5}]
    assert {GradNormCallback(**option).state_key for option in options} == {"GradNormCallback"}
    assert {GradNormCallback(name="a", **option).state_key for option in options} == {"GradNormCallback[a]"}


class Copies(pl.Callback):
    """Pickles and copies another callback in the middle of a run.

    Args:
        callback: The other one.
    """

    def __init__(self, callback: GradNormCallback) -> None:
        self.callback = callback
        self.copies: list[GradNormCallback] = []
        self.num_bytes: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """Both ways."""
        pickled = pickle.dumps(self.callback)
        self.num_bytes.append(len(pickled))
        self.copies += [pickle.loads(pickled), copy.deepcopy(self.callback)]


def test_B078_callbacks_can_be_pickled_and_copied_at_any_time(tmp_path: Path) -> None:
    callback = norm_logger(granularity={r"norm\.": "norms"}, history=8)
    assert pickle.loads(pickle.dumps(callback)).state_dict() == callback.state_dict()
    assert copy.deepcopy(callback).state_dict() == callback.state_dict()
    copies = Copies(callback)
    fit(make_module("transformer", length=9), tmp_path, version="first", callbacks=[callback, copies], max_steps=3)
    assert len(copies.copies) == 6
    for number, made in enumerate([*copies.copies, pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)]):
        steps = min(number // 2 + 1, 3)
        expected = {**remembered(callback), "steps": list(range(steps))}
        assert remembered(made)["steps"] == expected["steps"]
        assert remembered(made)["totals"] == expected["totals"][:steps]
    assert max(copies.num_bytes) < 10_000, "the copy holds more than the history"
    # A copy trains on, in another Trainer.
    last = copies.copies[-1]
    fit(make_module("transformer", length=9), tmp_path, version="second", callbacks=[last])
    assert remembered(last)["steps"] == [0, 1, 2, 3, 4, 5]


def test_B078_loss_windows_can_be_pickled_and_copied_at_any_time(tmp_path: Path) -> None:
    losses = LossMeanVarCallback(windows=(2, 5), every_n_steps=3)
    copier = Copier(losses)
    fit(make_module("mlp"), tmp_path, callbacks=[losses, copier])
    copier.on_step_end(None)  # type: ignore[arg-type]
    assert len(copier.states) == 4
    for state, *copies in copier.states:
        assert all(same(made, state) for made in copies)
    fit(make_module("mlp"), tmp_path, version="again", callbacks=[copy.deepcopy(losses)])


class Spawned(pl.LightningModule):
    """The usual module as a class that a new process can import."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_mlp()

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The loss of one micro-batch."""
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    def train_dataloader(self) -> DataLoader[Batch]:
        """This rank's data."""
        return make_loader("mlp", length=96, rank=self.global_rank, num_ranks=self.trainer.world_size)


@pytest.mark.slow
@covers("ddp")
def test_B078_callbacks_travel_to_spawned_processes(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp_spawn",
        devices=2,
        max_steps=3,
        callbacks=[norm_logger(), LossMeanVarCallback(windows=(2, 3), every_n_steps=1)],
        logger=pl.loggers.TensorBoardLogger(tmp_path, name="", version="run"),
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Spawned())
    expected = reference_run(num_ranks=2)
    scalars = read_run(tmp_path / "run").scalars
    assert list(scalars["grad_norm/total"].values()) == pytest.approx(expected.totals, rel=TOLERANCE)
    batches = expected_batches("mlp", 0, num_ranks=2)
    mean = sum(loss_of(make_mlp(), batch).item() for batch in batches) / 2
    assert scalars["loss/mean_3"][0] == pytest.approx(mean, rel=TOLERANCE)


class Saves(pl.Callback):
    """Saves a checkpoint after every step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """One file a step."""
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def test_B116_states_do_not_grow_and_the_latest_is_restored(tmp_path: Path) -> None:
    def callbacks() -> list[GradNormCallback]:
        return [norm_logger(name="a", history=2), norm_logger(name="b", history=3)]

    saved, loaded = callbacks(), callbacks()
    fit(make_module("mlp"), tmp_path, version="first", callbacks=[*saved, Saves(tmp_path)], max_steps=8)
    sizes = set()
    for step in range(4, 9):
        states = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["callbacks"]
        ours = {key: state for key, state in states.items() if "GradNorm" in key}
        assert sorted(ours) == ["GradNormCallback[a]", "GradNormCallback[b]"]
        sizes.add(len(pickle.dumps(ours)))
        assert ours["GradNormCallback[b]"]["extra"]["history"]["0"]["steps"] == list(range(step - 3, step))
    assert len(sizes) == 1
    fit(make_module("mlp"), tmp_path, version="second", callbacks=loaded, max_steps=8, ckpt_path=tmp_path / "8.ckpt")
    assert [remembered(callback) for callback in loaded] == [remembered(callback) for callback in saved]


def _accelerate_run(
    folder: Path, callbacks: Sequence[Any], steps: range, *, load: Path | None = None, save_from: int = 99
) -> None:
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator, optimizer="adamw")

    def save(number: int) -> None:
        if steps[number] >= save_from:
            accelerator.save_state(str(folder / str(steps[number])))

    with attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *row: None):
        if load is not None:
            accelerator.load_state(str(load))
        train(accelerator, model, optimizer, [token_batch(step=step) for step in steps], after_step=save)


@covers("single", "accelerate")
def test_B116_accelerate_s_states_do_not_grow_and_the_latest_is_restored(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        short, long = (
            # Without alarms: what these have seen grows up to their own window, and no further.
            LossMeanVarCallback(windows=[window], every_n_steps=1, on_alarm=[], name=f"last_{window}")
            for window in (2, 4)
        )
        return [short, long, norm_logger(history=3)]

    saved, loaded, whole = callbacks(), callbacks(), callbacks()
    _accelerate_run(tmp_path, saved, range(8), save_from=3)
    folders = sorted(tmp_path.iterdir())
    assert [folder.name for folder in folders] == ["3", "4", "5", "6", "7"]
    sizes = {
        tuple((folder / f"stabilizer.{end}").stat().st_size for end in ("json", "safetensors")) for folder in folders
    }
    assert len(sizes) == 1
    states = load_states(folders[-1])
    assert sorted(states) == ["GradNormCallback", "LossMeanVarCallback[last_2]", "LossMeanVarCallback[last_4]"]
    _accelerate_run(tmp_path, loaded, range(8, 10), load=folders[-1])
    _accelerate_run(tmp_path, whole, range(10))
    for again, once, before in zip(loaded, whole, saved, strict=True):
        assert same(states[before.state_key], before.state_dict())
        assert same(again.state_dict(), once.state_dict())
