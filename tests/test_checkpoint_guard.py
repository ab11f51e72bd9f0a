"""CheckpointGuardCallback at the saves of each host, on one process."""

from __future__ import annotations

import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration

from stabilizer import tags
from stabilizer.callbacks import CheckpointGuardCallback, StabilizerCallback, StepContext, attach
from stabilizer.callbacks import checkpoint_worker as worker_module
from stabilizer.checkpoints import (
    CheckpointChangedError,
    last_good_checkpoint,
    read_guard,
    verify_checkpoint,
    verifying,
)
from tests.accelerate_loops import make_accelerator, make_optimizer
from tests.checkpoint_runs import accelerate_run, guards_below, lightning_run
from tests.lightning_models import PACKAGES
from tests.loggers import row_logger
from tests.models import loss_of, make_mlp, make_transformer, mlp_batch

NAN = "tensor .*embed_tokens.weight: 1 of 512 elements are not finite"


def _verdicts(folder: Path) -> dict[str, tuple[str, int]]:
    return {name: (guard.verdict, guard.step) for name, guard in guards_below(folder).items()}


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_keeps_two_good_ones_where_it_would_keep_one(package: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=NAN) as told:
        lightning_run(tmp_path, CheckpointGuardCallback(), package=package, bad_steps=[4, 5])
    messages = [str(warning.message) for warning in told if "BAD CHECKPOINT" in str(warning.message)]
    assert len(messages) == 2
    assert f"BAD CHECKPOINT {tmp_path / 'step=4.ckpt'} (step 4)" in messages[0]
    assert "last_good_checkpoint" in messages[0]
    assert _verdicts(tmp_path) == {"step=3.ckpt": ("good", 3), "step=6.ckpt": ("good", 6)}
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=3.ckpt", "step=6.ckpt"]


@pytest.mark.filterwarnings("ignore:.*BAD CHECKPOINT:UserWarning")
def test_a_run_that_ends_badly_leaves_the_good_ones(tmp_path: Path) -> None:
    lightning_run(tmp_path, CheckpointGuardCallback(), bad_steps=[4, 5, 6], checkpoint={"save_last": True})
    verdicts = _verdicts(tmp_path)
    assert verdicts["last.ckpt"] == verdicts["step=6.ckpt"] == ("bad", 6)
    found = last_good_checkpoint(tmp_path)
    assert found is not None
    guard = read_guard(found)
    assert guard is not None
    assert guard.step == 3
    assert {step for verdict, step in verdicts.values() if verdict == "good"} == {2, 3}


def test_without_the_callback_they_would_be_gone(tmp_path: Path) -> None:
    """What the tests above would see of a host that is left alone."""
    lightning_run(tmp_path, CheckpointGuardCallback(keep_good=None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=6.ckpt", "step=6.ckpt.guard.json"]


def test_what_is_kept_too_long_is_deleted_later(tmp_path: Path) -> None:
    lightning_run(tmp_path, CheckpointGuardCallback(), num_steps=8)
    assert _verdicts(tmp_path) == {"step=7.ckpt": ("good", 7), "step=8.ckpt": ("good", 8)}


@pytest.mark.parametrize("save_last", [True, "link"])
def test_the_last_one_is_written_over_and_kept(save_last: Any, tmp_path: Path) -> None:
    checkpoint = {"save_last": save_last, "save_top_k": 0 if save_last is True else 1}
    lightning_run(tmp_path, CheckpointGuardCallback(), num_steps=4, checkpoint=checkpoint)
    verdicts = _verdicts(tmp_path)
    if save_last is True:
        assert verdicts == {"last.ckpt": ("good", 4), "kept/step3-last.ckpt": ("good", 3)}
        assert last_good_checkpoint(tmp_path) == tmp_path / "last.ckpt"
    else:
        assert verdicts == {"step=3.ckpt": ("good", 3), "step=4.ckpt": ("good", 4)}
        assert (tmp_path / "last.ckpt").resolve() == tmp_path / "step=4.ckpt"


def test_checkpoints_that_are_written_in_the_background_are_waited_for(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.05)
            super().save_checkpoint(*args, **kwargs)

    lightning_run(tmp_path, CheckpointGuardCallback(), num_steps=3, plugins=[AsyncCheckpointIO(Slow())])
    verdicts = _verdicts(tmp_path)
    assert {"step=2.ckpt": ("good", 2), "step=3.ckpt": ("good", 3)}.items() <= verdicts.items()
    assert {verdict for verdict, _ in verdicts.values()} == {"good"}


def test_the_save_after_the_last_step_is_verified_too(tmp_path: Path) -> None:
    checkpoint = {"every_n_train_steps": 100, "save_last": True, "save_on_train_epoch_end": False}
    lightning_run(tmp_path, CheckpointGuardCallback(), num_steps=3, checkpoint=checkpoint)
    assert _verdicts(tmp_path).get("last.ckpt") == ("good", 3)


def test_weights_alone_are_verified_and_never_resumed_from(tmp_path: Path) -> None:
    lightning_run(tmp_path, CheckpointGuardCallback(), num_steps=3, checkpoint={"save_weights_only": True})
    assert _verdicts(tmp_path) == {"step=2.ckpt": ("good", 2), "step=3.ckpt": ("good", 3)}
    assert not any(guard.is_full for guard in guards_below(tmp_path).values())
    assert last_good_checkpoint(tmp_path) is None


def test_a_save_that_fails_ends_as_without_us_and_loses_nothing(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import TorchCheckpointIO

    class Full(TorchCheckpointIO):
        num = 0

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            self.num += 1
            if self.num == 3:
                raise OSError(28, "No space left on device")
            super().save_checkpoint(*args, **kwargs)

    checkpoint = {"save_last": True, "save_top_k": 0}
    with pytest.raises(OSError, match="No space left"):
        lightning_run(tmp_path, CheckpointGuardCallback(keep_good=1), checkpoint=checkpoint, plugins=[Full()])
    assert _verdicts(tmp_path) == {"last.ckpt": ("good", 2)}
    assert last_good_checkpoint(tmp_path) == tmp_path / "last.ckpt"


def test_accelerate_keeps_what_total_limit_would_delete(tmp_path: Path) -> None:
    configuration = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    with pytest.warns(UserWarning, match=NAN):
        accelerate_run(CheckpointGuardCallback(), bad_steps=[4, 5, 6], project_config=configuration)
    assert _verdicts(tmp_path / "checkpoints") == {
        "checkpoint_1": ("good", 2),
        "checkpoint_2": ("good", 3),
        "checkpoint_5": ("bad", 6),
    }
    assert configuration.total_limit == 1
    assert last_good_checkpoint(tmp_path) == tmp_path / "checkpoints" / "checkpoint_2"


def test_without_a_limit_accelerate_keeps_all(tmp_path: Path) -> None:
    configuration = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerate_run(CheckpointGuardCallback(keep_good=1), num_steps=4, project_config=configuration)
    assert len(_verdicts(tmp_path / "checkpoints")) == 4


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_writes_over_a_folder_and_the_one_before_is_kept(safe: bool, tmp_path: Path) -> None:
    def save(accelerator: Any, step: int) -> None:
        accelerator.save_state(tmp_path / "ckpt", safe_serialization=safe)

    with pytest.warns(UserWarning, match=NAN):
        accelerate_run(CheckpointGuardCallback(keep_good=1), save=save, bad_steps=[4, 6])
    assert _verdicts(tmp_path) == {"ckpt": ("bad", 6), "kept/step5-ckpt": ("good", 5)}


def _plain(guard: CheckpointGuardCallback, save: Any, *, num_steps: int = 3, more: Any = ()) -> Any:
    model = make_mlp()
    optimizer = make_optimizer(model)
    with attach(None, model=model, optimizer=optimizer, callbacks=[guard, *more], log=lambda *_: None):
        for step in range(num_steps):
            optimizer.zero_grad()
            loss_of(model, mlp_batch(step=step)).backward()
            optimizer.step()
            save(model, optimizer, step)


def test_a_loop_tells_of_what_it_has_saved(tmp_path: Path) -> None:
    guard, found = CheckpointGuardCallback(), []

    def save(model: Any, optimizer: Any, step: int) -> None:
        path = tmp_path / f"{step}.pt"
        state = {name: value / (step - 1) for name, value in model.state_dict().items()}  # 0/0 and 1/0 at step 1
        torch.save({"model": state, "optimizer": optimizer.state_dict()}, path)
        assert guard.verify(path)
        found.append(guard.latest(before_step=9))

    with pytest.warns(UserWarning, match=r"BAD CHECKPOINT .*1.pt \(step 2\)"):
        _plain(guard, save)
    assert _verdicts(tmp_path) == {"0.pt": ("good", 1), "1.pt": ("bad", 2), "2.pt": ("good", 3)}
    assert [None if one is None else (one.path.name, one.step) for one in found] == [
        ("0.pt", 1),
        ("0.pt", 1),
        ("2.pt", 3),
    ]
    assert not guard.verify(tmp_path / "2.pt")


@pytest.mark.parametrize("overwrites", [False, True])
def test_training_does_not_wait_for_the_verification(
    overwrites: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what is moved or deleted in the meantime come out wrong."""
    held, seen = threading.Event(), []
    original = worker_module.verify_checkpoint

    def verify(*args: Any, **kwargs: Any) -> Any:
        assert held.wait(30)
        return original(*args, **kwargs)

    monkeypatch.setattr(worker_module, "verify_checkpoint", verify)

    class Watch(StabilizerCallback):
        def on_step_end(self, context: StepContext) -> None:
            seen.append(context.step)
            if context.step == 5:
                held.set()

    checkpoint = {"save_last": True, "save_top_k": 0} if overwrites else {}
    lightning_run(tmp_path, CheckpointGuardCallback(), more=[Watch()], checkpoint=checkpoint)
    assert seen == list(range(6))
    names = ("kept/step5-last.ckpt", "last.ckpt") if overwrites else ("step=5.ckpt", "step=6.ckpt")
    assert _verdicts(tmp_path) == {names[0]: ("good", 5), names[1]: ("good", 6)}
    assert not [thread for thread in threading.enumerate() if "stabilizer" in thread.name]


def test_what_is_written_to_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, touched = verifying.sha256_of, []

    def sha256_of(path: Path) -> str:
        if not touched:
            touched.append(path)
            path.write_bytes(path.read_bytes())
        return original(path)

    monkeypatch.setattr(verifying, "sha256_of", sha256_of)
    lightning_run(tmp_path, CheckpointGuardCallback(), num_steps=1)
    assert touched == [tmp_path / "step=1.ckpt"]
    assert _verdicts(tmp_path) == {"step=1.ckpt": ("good", 1)}
    touched.clear()
    with pytest.raises(CheckpointChangedError, match="was written to while it was read"):
        verify_checkpoint(tmp_path / "step=1.ckpt")


def test_a_fault_of_the_verification_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def verify(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(worker_module, "verify_checkpoint", verify)
    lightning_run(tmp_path, CheckpointGuardCallback(), num_steps=2)
    assert "it counts as not verified" in caplog.text
    monkeypatch.undo()
    assert last_good_checkpoint(tmp_path) == tmp_path / "step=2.ckpt"


def test_numbers_and_texts_are_logged(tmp_path: Path) -> None:
    guard, logger = CheckpointGuardCallback(every_n_steps=1), row_logger()

    class Wait(StabilizerCallback):
        """Lets the verdict of each save be there when the next step ends."""

        def on_gradients(self, context: StepContext) -> None:
            guard.latest(0)

    with pytest.warns(UserWarning, match=NAN):
        lightning_run(tmp_path, guard, num_steps=4, bad_steps=[2], more=[Wait()], logger=logger)
    rows = {(name, step): value for values, step in logger.rows for name, value in values.items()}
    assert [rows[tags.CHECKPOINT_GOOD, step] for step in range(4)] == [0, 1, 1, 2]
    assert [rows[tags.CHECKPOINT_BAD, step] for step in range(4)] == [0, 0, 1, 1]


def test_a_remote_path_is_said_to_be_left_alone(tmp_path: Path) -> None:
    from stabilizer.callbacks.checkpoint_saves import GuardedSaves

    saves = GuardedSaves(2, model=make_transformer())
    with pytest.warns(UserWarning, match="s3://bucket/last.ckpt is on no local file system"):
        assert saves.local("s3://bucket/last.ckpt") is None
    assert saves.local("s3://bucket/other.ckpt") is None
    assert saves.local("file:///tmp/x.ckpt") == Path("/tmp/x.ckpt")


def test_everything_is_put_back(tmp_path: Path) -> None:
    accelerator = make_accelerator()
    model, optimizer = accelerator.prepare(model := make_mlp(), make_optimizer(model))
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=[CheckpointGuardCallback()], log=print):
        assert "save_state" in vars(accelerator)
    assert not {"save_state", "load_state"} & set(vars(accelerator))
    assert not accelerator._save_model_state_pre_hook


@pytest.mark.parametrize(
    ("host", "told"),
    [("Lightning", ""), ("Accelerate", ""), ("plain loop", "verify(path)"), ("GRPOTrainer", "save_total_limit")],
)
def test_what_it_cannot_do_is_said_at_the_start(host: str, told: str) -> None:
    found = CheckpointGuardCallback().limitations(types.SimpleNamespace(host=host))
    assert told in " ".join(found)
    assert bool(found) == bool(told)
