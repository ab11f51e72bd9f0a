"""Recovery in Accelerate loops: going back within the process, after a restart, and where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import attach
from stabilizer.errors import StabilizerWarning, TrainingStoppedError
from tests.accelerate_loops import make_accelerator
from tests.recovery_runs import BATCH, ROLL_BACK, Guard, Line, Shuffled, loop, make_net, test_loss
from tests.test_recovery_lightning import LADDER, LENGTH, bad_batches

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")


def equal(first: Any, second: Any) -> bool:
    pairs = zip(first.net.state_dict().values(), second.net.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_a_loop_goes_back_and_a_restart_leaves_out_the_same(tmp_path: Path) -> None:
    data = Line(LENGTH, bad=bad_batches(33, 35))
    options: dict[str, Any] = {"data": data, "shuffles": True, "max_epochs": 2}
    guard = Guard(ladder=LADDER)
    there = loop(guard, tmp_path, **options)
    [entry] = guard.recovery.history
    assert (entry.step, entry.first_step) == (35, 33)
    assert [step for step, _ in guard.losses] == list(range(200))
    [folder] = tmp_path.rglob("at_30")
    [listed] = json.loads((folder.parent / "skip_list.json").read_text())["entries"]
    order = list(Shuffled(LENGTH))[30 * BATCH : 36 * BATCH]
    assert (listed["epoch"], listed["first_batch"], listed["last_batch"]) == (0, 30, 35)
    assert listed["sample_ids"] == [order]

    again = Guard(ladder=LADDER)
    resumed = loop(again, tmp_path, resume_from=folder, first=(0, 30), **options)
    assert resumed.seen == there.seen[36:]
    assert equal(there, resumed)
    assert again.losses == guard.losses[36:]  # with their numbers
    bad = {float(data.inputs[sample, 0]) for sample in order}
    assert not bad & {value for epoch, batch in there.seen if epoch == 1 for value in batch}


@pytest.mark.slow
def test_faults_end_near_the_faultless_loss(tmp_path: Path) -> None:
    healthy = test_loss(loop(Guard(), tmp_path / "healthy", data=Line(3 * LENGTH), learning_rate=0.02).net)
    guard = Guard(ladder=LADDER)
    samples = range(33 * BATCH, 38 * BATCH)
    run = loop(guard, tmp_path / "nan", data=Line(3 * LENGTH, bad=samples), learning_rate=0.02)
    assert test_loss(run.net) == pytest.approx(healthy, rel=0.02)

    def jump(step: int, optimizer: Any) -> None:
        if step == 120:
            optimizer.param_groups[0]["lr"] *= 50

    guard = Guard(conditions=[{"name": "loss", "num_steps": 5}], ladder=LADDER)
    run = loop(guard, tmp_path / "jump", data=Line(3 * LENGTH), learning_rate=0.02, after_step=jump)
    [entry] = guard.recovery.history
    assert "at_120 (step 120)" in entry.outcome
    assert test_loss(run.net) == pytest.approx(healthy, rel=0.02)


def test_windows_of_accumulation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": Line(LENGTH, bad=bad_batches(30, 35)), "shuffles": True, "accumulate": 2}
    there = loop(Guard(ladder=LADDER), tmp_path, **options)
    [folder] = tmp_path.rglob("at_10")
    [listed] = json.loads((folder.parent / "skip_list.json").read_text())["entries"]
    assert (listed["first_batch"], listed["last_batch"]) == (20, 35)
    resumed = loop(Guard(ladder=LADDER), tmp_path, resume_from=folder, first=(0, 20), **options)
    assert resumed.seen == there.seen[36:]
    assert equal(there, resumed)


def test_a_list_that_nobody_honours_is_told_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": Line(LENGTH, bad=bad_batches(33, 35)), "shuffles": True}
    loop(Guard(ladder=LADDER), tmp_path, **options)
    [folder] = tmp_path.rglob("at_30")
    with pytest.warns(StabilizerWarning, match="1 entries, and nobody leaves them out: iterate over") as warned:
        loop(Guard(), tmp_path, resume_from=folder, first=(0, 30), with_batches=False, **options)
    assert sum("nobody leaves them out" in str(one.message) for one in warned) == 1


def test_without_batches_the_steps_alone_are_listed(tmp_path: Path) -> None:
    guard = Guard(ladder=LADDER)
    loop(guard, tmp_path, data=Line(LENGTH, bad=bad_batches(33, 35)), shuffles=True, with_batches=False)
    [listed] = guard.recovery.skips.entries
    assert (listed.first_step, listed.last_step, listed.epoch, listed.first_batch) == (30, 35, -1, -1)


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_a_loop_that_cannot_go_back_is_refused_at_the_start(num_optimizers: int) -> None:
    model = make_net()
    accelerator = None if num_optimizers == 1 else make_accelerator()
    optimizers: list[Any] = [
        torch.optim.SGD(model[2 * number].parameters(), lr=0.1) for number in range(num_optimizers)
    ]
    if accelerator is not None:
        model, *optimizers = accelerator.prepare(model, *optimizers)
    why = "a plain loop cannot be put back" if num_optimizers == 1 else "a loop with 2 optimizers has no place"
    with pytest.raises(ValueError, match=f"Guard: ladder has 'roll_back', but {why}.* Leave this rung out"):
        attach(accelerator, model=model, optimizer=optimizers, callbacks=[Guard(ladder=[ROLL_BACK])])


@pytest.mark.parametrize("kind", ["bool", "tensor"])
def test_a_function_of_the_user_s_own(tmp_path: Path, kind: str) -> None:
    def is_lost(context: Any) -> Any:
        found = context.step == 40
        return torch.tensor(found) if kind == "tensor" else found

    guard = Guard(conditions=[is_lost], ladder=LADDER)
    loop(guard, tmp_path, data=Line(LENGTH))
    [entry] = guard.recovery.history
    assert (entry.step, entry.first_step) == (40, 40)
    assert "is_lost says so at step 40" in entry.reason
    assert "at_40 (step 40)" in entry.outcome


def test_a_checkpoint_that_cannot_be_loaded_ends_the_run(tmp_path: Path) -> None:
    guard = Guard(ladder=LADDER)

    def spoil(step: int, optimizer: Any) -> None:
        if step == 32:
            next(guard.good.all[-1].path.glob("*.safetensors")).write_bytes(b"x")

    with pytest.raises(TrainingStoppedError, match=r"loading .*at_30 failed on one rank.*start again from .*at_30"):
        loop(guard, tmp_path, data=Line(LENGTH, bad=bad_batches(33, 35)), shuffles=True, after_step=spoil)
