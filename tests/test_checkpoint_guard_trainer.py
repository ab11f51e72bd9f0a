"""CheckpointGuardCallback with the checkpoints of transformers' trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import CheckpointGuardCallback, StabilizerTrainerCallback
from stabilizer.checkpoints import last_good_checkpoint
from tests.checkpoint_runs import guards_below
from tests.trainer_runs import make_trainer


def _train(folder: Path, guard: CheckpointGuardCallback, **options: Any) -> None:
    callback = StabilizerTrainerCallback([guard], log=lambda *_: None)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "optimizer": "adamw_torch", **options}
    make_trainer("single", folder, callbacks=[callback], **saving).train()


def test_its_checkpoints_are_verified_and_found(tmp_path: Path) -> None:
    _train(tmp_path, CheckpointGuardCallback())
    guards = guards_below(tmp_path)
    assert {name: (guard.verdict, guard.step) for name, guard in guards.items()} == {
        f"checkpoint-{step}": ("good", step) for step in (1, 2, 3)
    }
    names = {file.name for file in guards["checkpoint-3"].files}
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json", "stabilizer.json"} <= names
    newest = tmp_path / "checkpoint-3"
    assert last_good_checkpoint(tmp_path) == newest
    (newest / "stabilizer.guard.json").unlink()
    moments = torch.load(newest / "optimizer.pt", weights_only=True)
    next(iter(moments["state"].values()))["exp_avg"].view(-1)[0] = float("nan")
    torch.save(moments, newest / "optimizer.pt")
    with pytest.warns(UserWarning, match=r"passed over: tensor optimizer.pt: state.*exp_avg: 1 of .* are not finite"):
        assert last_good_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_what_it_deletes_by_itself_is_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "stabilizer")
    _train(tmp_path, CheckpointGuardCallback(), save_total_limit=1)
    assert {name: guard.verdict for name, guard in guards_below(tmp_path).items()} == {"checkpoint-3": "good"}
    assert not [record for record in caplog.records if record.name == "stabilizer"]


def test_the_model_alone_is_nothing_to_resume_from(tmp_path: Path) -> None:
    _train(tmp_path, CheckpointGuardCallback(), save_only_model=True, save_steps=3)
    [guard] = guards_below(tmp_path).values()
    assert (guard.verdict, guard.is_full) == ("good", False)
    assert last_good_checkpoint(tmp_path) is None
