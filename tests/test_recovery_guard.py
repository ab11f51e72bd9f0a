"""Recovery as a part of CheckpointGuardCallback: with the checkpoints that hosts save, verified."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from stabilizer.callbacks import (
    CheckpointGuardCallback,
    GradNormCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    attach,
)
from stabilizer.checkpoints import last_good_checkpoint
from tests.accelerate_loops import make_accelerator
from tests.recovery_runs import BATCH, ROLL_BACK, Line, fit, make_net, test_loss
from tests.test_recovery_lightning import LENGTH, bad_batches, same_parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]

LOSS = {"name": "loss", "num_steps": 8}


def train(
    folder: Path, *, more: Sequence[Any] = (), top: int = 2, **options: Any
) -> tuple[Any, CheckpointGuardCallback, list[Any]]:
    guard = CheckpointGuardCallback(conditions=["nonfinite", LOSS], ladder=[ROLL_BACK, "stop"], strict=True)
    others = [GradNormCallback(), LossMeanVarCallback(every_n_steps=1)]
    saves = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=5, save_top_k=top, monitor="step", mode="max"
    )
    chosen = {"enable_checkpointing": True, "logger": False}
    module = fit(None, folder, callbacks=[*more, *others, guard, saves], trainer_options=chosen, **options)
    return module, guard, others


@pytest.mark.parametrize("top", [2, -1])
def test_lightning_goes_back_to_what_model_checkpoint_has_saved(tmp_path: Path, top: int) -> None:
    module, guard, others = train(tmp_path, data=Line(LENGTH), jump=(52, 30.0), top=top)
    [entry] = guard.recovery.history
    assert "step=50.ckpt (step 50)" in entry.outcome
    assert entry.step > 55  # one was saved when the loss had left its window already
    assert test_loss(module.net) < 0.2
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.guard.json")}
    bad = [name for name, guard_file in found.items() if guard_file["verdict"] == "bad"]
    assert bad == (["step=55.ckpt.guard.json", "step=60.ckpt.guard.json"] if top < 0 else [])
    assert all("saved while the run was in trouble" in found[name]["reasons"][0] for name in bad)
    last = last_good_checkpoint(tmp_path)
    assert last is not None
    assert last.name == "step=100.ckpt"
    # The windows of the other callbacks do not know the spike any more.
    assert others[1].statistics()["mean_100"] < 2.0
    assert [callback.next_step() for callback in (*others, guard)] == [100] * 3


class Attached(StabilizerCallback):
    """Counts what it is given anew when a run goes on from a checkpoint."""

    num_views = 0

    def attach_view(self, optimizer_index: int, view: Any) -> None:
        super().attach_view(optimizer_index, view)
        self.num_views += 1


def test_a_save_right_after_going_back(tmp_path: Path) -> None:
    data = Line(LENGTH, bad=bad_batches(37, 39))
    attached = Attached()
    there, guard, _ = train(tmp_path, data=data, shuffles=True, top=-1, more=[attached])
    assert [entry.step for entry in guard.recovery.history] == [39]
    assert attached.num_views == 2
    # Of the batch at whose end the run went back: healthy, and with the numbers of the steps that go on.
    before, after = (torch.load(tmp_path / f"step={step}.ckpt", weights_only=True) for step in (35, 40))
    assert all(torch.equal(after["state_dict"][name], value) for name, value in before["state_dict"].items())
    assert after["global_step"] == 40
    steps = {key: state["steps"] for key, state in after["callbacks"].items() if "steps" in state}
    assert set(steps) == {"Attached", "GradNormCallback", "LossMeanVarCallback", "CheckpointGuardCallback"}
    assert all(found == {"0": 40} for found in steps.values())
    options: dict[str, Any] = {"data": data, "shuffles": True, "more": [Attached()]}
    resumed, _, _ = train(tmp_path, resume_from=tmp_path / "step=40.ckpt", **options)
    assert resumed.seen == there.seen[40:]
    assert same_parameters(there, resumed)


def test_a_restart_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": Line(LENGTH, bad=bad_batches(33, 35)), "shuffles": True}
    there, guard, _ = train(tmp_path / "there", **options)
    assert "step=30.ckpt (step 30)" in guard.recovery.history[0].outcome

    class Killed(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 36:  # right after the rollback
                raise KeyError("killed")

    with pytest.raises(KeyError):
        train(tmp_path / "killed", more=[Killed()], **options)
    good = last_good_checkpoint(tmp_path / "killed")
    assert good is not None
    assert good.name == "step=30.ckpt"
    resumed, _, _ = train(tmp_path / "killed", resume_from=good, **options)
    assert resumed.seen == there.seen[36:]
    assert same_parameters(there, resumed)


def test_accelerate_goes_back_to_what_save_state_has_saved(tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    configuration = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=3)
    accelerator = make_accelerator("single", project_config=configuration)
    net = make_net()
    data = Line(LENGTH, bad=range(33 * BATCH, 36 * BATCH))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), loader
    )
    guard = CheckpointGuardCallback(ladder=[ROLL_BACK, "stop"], strict=True)
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=[guard], log=lambda *row: None):
        for step, (inputs, targets) in enumerate(guard.batches(loader, epoch=0)):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                accelerator.save_state()
    [entry] = guard.recovery.history
    assert "checkpoints/checkpoint_2 (step 30)" in entry.outcome
    # Among the numbered folders Accelerate would take it for one of them, and fail.
    [listed] = json.loads((tmp_path / "skip_list.json").read_text())["entries"]
    accelerator.load_state()
    assert (listed["first_batch"], listed["last_batch"]) == (30, 35)
    assert listed["sample_ids"] == [list(range(30 * BATCH, 36 * BATCH))]
    assert test_loss(net) < 0.3
