"""The action "save_checkpoint" on every host: where it is, what it holds, and that a run goes on from it."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, attach
from tests.accelerate_loops import make_accelerator, make_optimizer
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, make_module, make_trainer
from tests.loss_alarm_loops import BURST, play, watcher
from tests.models import loss_of, make_transformer, token_batch
from tests.sharding import full
from tests.states import same
from tests.tiny_loops import no_log, told

# The data of a step follow from its number, whatever the loader says.
pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")

#: The step whose loss is five times what it is, and the length of a run.
BAD, NUM_STEPS = 60, 66

SAVE = {"name": "save_checkpoint", "max_saves": 2}


def factor_at(step: int) -> float:
    """What a step's loss is multiplied by."""
    return 5.0 if step == BAD else 1.0


def make_watcher(**options: Any) -> LossMeanVarCallback:
    """Saves, and lowers the rate after it."""
    return watcher({"name": "lower_lr", "num_steps": 4}, SAVE, windows=(20, 40), strict=True, **options)


def scripted(package: str = PACKAGES[0], **options: Any) -> Any:
    """A transformer whose batch and loss follow from the step alone: resumed runs see the same.

    Args:
        package: One of PACKAGES.
        **options: Of `make_module`.
    """
    module = make_module("transformer", package=package, optimizer="adamw", learning_rate=1e-4, length=960, **options)

    def step(batch: Any, batch_idx: int) -> Tensor:
        number = module.trainer.global_step
        return loss_of(module.model, token_batch(module.data_rank()[0], step=number)) * factor_at(number)

    module.training_step = step
    return module


def weights_of(model: Any) -> dict[str, Tensor]:
    """Whole and detached: collective."""
    return {name: full(value).detach().clone() for name, value in model.named_parameters()}


def fit(folder: Path, *, package: str = PACKAGES[0], ckpt_path: Any = None, extra: Any = (), **options: Any) -> Any:
    """A run: its callback, weights and trainer."""
    callback, module = make_watcher(), scripted(package)
    defaults: dict[str, Any] = {"max_steps": NUM_STEPS, "default_root_dir": folder}
    callbacks = [*extra, callback, GradNormCallback()]
    trainer = make_trainer(package=package, callbacks=callbacks, **{**defaults, **options})
    trainer.fit(module, ckpt_path=ckpt_path)
    return callback, weights_of(module.model), trainer


def our_states(checkpoint: Any) -> dict[str, Any]:
    """Those of our callbacks in a checkpoint of Lightning."""
    return {key: state for key, state in checkpoint["callbacks"].items() if "LossMeanVar" in key or "GradNorm" in key}


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_saves_and_goes_on_from_it(package: str, tmp_path: Path) -> None:
    callback, weights, _ = fit(tmp_path, package=package)
    assert [alarm.step for alarm in callback.alarms] == [BAD]
    [path] = tmp_path.rglob("*.ckpt")
    assert path == tmp_path / "alarms" / f"alarm_step_{BAD}_jump.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == BAD + 1
    states = our_states(checkpoint)
    assert {key: state["steps"] for key, state in states.items()} == {
        "LossMeanVarCallback": {"0": BAD + 1},
        "GradNormCallback": {"0": BAD + 1},
    }
    alerts = states["LossMeanVarCallback"]["extra"]["alerts"]
    # The detector after the alarm, the rate that will be lowered, and the checkpoint itself.
    assert alerts["watches"]["0"]["folder"]["told_at"] == {"jump": BAD}
    assert alerts["watches"]["0"]["detector"]["last"][-1][0] == BAD
    assert (alerts["lowered"], alerts["num_saves"]) == ({"0": [0.5, BAD + 5]}, 1)
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == 1e-4
    other, again, _ = fit(tmp_path / "second", package=package, ckpt_path=path)
    assert same(again, weights)
    assert same(other.state_dict(), callback.state_dict())
    assert other.alarms == ()


class SavesToo:
    """Makes a callback of Lightning that saves after each batch, wherever it stands in the list."""

    def __new__(cls, package: str, folder: Path) -> Any:
        import importlib

        class Saves(importlib.import_module(package).Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if trainer.global_step in (BAD, BAD + 1):
                    trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

        return Saves()


def test_other_checkpoints_of_the_same_step_hold_the_same(tmp_path: Path) -> None:
    """One that is saved before our hook is called, within which ours is saved, and Lightning's own after it."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    regular = ModelCheckpoint(dirpath=tmp_path / "regular", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(tmp_path, extra=[SavesToo(PACKAGES[0], tmp_path), regular], enable_checkpointing=True)
    ours = torch.load(tmp_path / "alarms" / f"alarm_step_{BAD}_jump.ckpt", weights_only=True)
    first = torch.load(tmp_path / f"{BAD + 1}.ckpt", weights_only=True)
    last = torch.load(tmp_path / "regular" / f"step={BAD + 1}.ckpt", weights_only=True)
    for other in (first, last):
        assert same(dict(other["state_dict"]), dict(ours["state_dict"]))
        assert same(our_states(other), our_states(ours))
    before = torch.load(tmp_path / f"{BAD}.ckpt", weights_only=True)
    assert our_states(before)["LossMeanVarCallback"]["extra"]["alerts"]["num_saves"] == 0
    assert len(list((tmp_path / "alarms").iterdir())) == 1
    assert len(list((tmp_path / "regular").iterdir())) == NUM_STEPS


def in_loop(
    folder: Path, *, host: str, load: Path | None = None, rank: int = 0, **options: Any
) -> tuple[LossMeanVarCallback, Any, dict[str, Tensor]]:
    """A run in a loop; with `load` it begins after the step of a checkpoint."""
    callback = make_watcher()
    bare = make_transformer()
    optimizer: Any = make_optimizer(bare, name="adamw", learning_rate=1e-4)
    model: Any = bare
    accelerator: Any = None
    if host == "accelerate":
        accelerator = make_accelerator(project_config=options["project_config"])
        model, optimizer = accelerator.prepare(bare, optimizer)

    def save(name: str) -> None:
        states = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "ours": handle.state_dict()}
        torch.save(states, folder / name)

    save_fn = save if host == "plain" else None
    with attach(
        accelerator, model=model, optimizer=optimizer, callbacks=[callback], log=no_log, save_fn=save_fn
    ) as handle:
        if load is not None and host == "plain":
            states = torch.load(load, weights_only=True)
            bare.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optimizer"])
            handle.load_state_dict(states["ours"])
        elif load is not None:
            accelerator.load_state(str(load))
        for step in range(callback.next_step(), NUM_STEPS):
            loss = loss_of(model, token_batch(step=step)) * factor_at(step)
            if accelerator is None:
                handle.record_loss(loss)
                loss.backward()
            else:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator is not None and load is None and step % 30 == 29:
                accelerator.save_state()  # numbered by Accelerate
    return callback, accelerator, weights_of(bare)


def test_a_plain_loop_saves_by_its_own_function(tmp_path: Path) -> None:
    callback, _, weights = in_loop(tmp_path, host="plain")
    [path] = tmp_path.iterdir()
    assert path.name == f"alarm_step_{BAD}_jump"
    other, _, again = in_loop(tmp_path, host="plain", load=path)
    assert same(again, weights)
    assert same(other.state_dict(), callback.state_dict())


def test_accelerate_saves_apart_from_its_own_numbers(tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    def configuration() -> Any:
        return ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)

    callback, accelerator, weights = in_loop(tmp_path, host="accelerate", project_config=configuration())
    path = tmp_path / "alarms" / f"alarm_step_{BAD}_jump"
    assert path.is_dir()
    # Neither counted nor deleted, and the next regular one has the next number.
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0", "checkpoint_1"]
    assert accelerator.project_configuration.iteration == 2
    assert accelerator.project_configuration.automatic_checkpoint_naming
    other, _, again = in_loop(tmp_path, host="accelerate", load=path, project_config=configuration())
    assert same(again, weights)
    assert same(other.state_dict(), callback.state_dict())


def test_no_more_than_max_saves_and_one_a_step(tmp_path: Path) -> None:
    from stabilizer.callbacks.loop_states import LoopStates

    names: list[str] = []
    callback = watcher(SAVE, cooldown_steps=0, name="a/b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopStates, "save_checkpoint", lambda self, name: names.append(name) or name)
        with told() as messages:
            play(BURST, callback)
    assert names == ["a_b_alarm_step_80_jump", "a_b_alarm_step_81_jump"]
    assert sum("the last of 2 checkpoints at alarms (max_saves)" in message for message in messages) == 1
    # The run that goes on remembers how many there are.
    other = copy.deepcopy(callback)
    assert other.state_dict()["extra"]["alerts"]["num_saves"] == 2


def test_without_anybody_who_saves_it_is_said_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    play(BURST, watcher(SAVE))
    assert "save_checkpoint does nothing here" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_save_that_raises_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "alarms").write_text("no folder")
    with caplog.at_level(logging.ERROR, "stabilizer"):
        callback, _, trainer = fit(tmp_path)
    assert trainer.global_step == NUM_STEPS
    assert not callback.has_failed
    assert f"alarm_step_{BAD}_jump could not be saved" in caplog.text
    assert callback.state_dict()["extra"]["alerts"]["num_saves"] == 0


def _spread_fit(rank: int, world_size: int, strategy: str, folder: Path, ckpt_path: Any = None) -> Any:
    callback, weights, trainer = fit(folder, strategy=strategy, devices=world_size, ckpt_path=ckpt_path)
    return [alarm.step for alarm in callback.alarms], weights, callback.state_dict(), trainer.global_step


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_ranks_save_together_and_go_on_from_it(strategy: str, tmp_path: Path) -> None:
    results = run_distributed(_spread_fit, strategy, tmp_path, world_size=2, timeout=150)
    assert [result[0] for result in results] == [[BAD], [BAD]]
    path = tmp_path / "alarms" / f"alarm_step_{BAD}_jump.ckpt"
    assert path.exists()
    again = run_distributed(_spread_fit, strategy, tmp_path / "second", path, world_size=2, timeout=150)
    for first, second in zip(results, again, strict=True):
        assert same(second[1], first[1])
        assert same(second[2], first[2])


def test_one_rank_that_cannot_write_does_not_keep_the_other_waiting(tmp_path: Path) -> None:
    (tmp_path / "alarms").write_text("no folder")
    results = run_distributed(_spread_fit, "ddp", tmp_path, world_size=2, timeout=100)
    assert [result[3] for result in results] == [NUM_STEPS, NUM_STEPS]
    assert same(results[0][1], results[1][1])


@pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")
def test_what_is_saved_before_an_alarm_is_stopped_is_there(tmp_path: Path) -> None:
    from stabilizer.errors import TrainingStoppedError

    first, second = watcher("stop", name="a"), watcher(SAVE, name="b")
    saved: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        from stabilizer.callbacks.loop_states import LoopStates

        patch.setattr(LoopStates, "save_checkpoint", lambda self, name: saved.append(name) or name)
        with pytest.raises(TrainingStoppedError, match=r"LossMeanVarCallback\[a\]: step 80"):
            play(BURST, first, second)
    assert saved == ["b_alarm_step_80_jump"]
