"""Recovery in Lightning: going back within the process, and the same after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from stabilizer.errors import StabilizerWarning, TrainingStoppedError
from tests.recovery_runs import BATCH, ROLL_BACK, Guard, Line, Module, Shuffled, fit, test_loss

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")

LADDER: list[Any] = [ROLL_BACK, "stop"]
LENGTH = 100 * BATCH


def bad_batches(first: int, last: int) -> list[int]:
    """One sample of every batch of the first epoch from one to another, where the order is shuffled."""
    order = list(Shuffled(LENGTH))
    return [order[batch * BATCH + batch % BATCH] for batch in range(first, last + 1)]


def same_parameters(first: Module, second: Module) -> bool:
    pairs = zip(first.net.state_dict().values(), second.net.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of a run without any fault."""
    return test_loss(fit(None, tmp_path_factory.mktemp("healthy"), data=Line(3 * LENGTH)).net)


@pytest.mark.parametrize(
    ("ladder", "bad"),
    [
        (LADDER, range(33, 38)),
        # Twenty bad steps: the cooldown waits for their end.
        (["alarm", "skip", {"name": "lower_lr", "num_steps": 10}, "roll_back", "stop"], range(50, 70)),
    ],
)
def test_batches_of_nan_are_left_behind(tmp_path: Path, healthy: float, ladder: list[Any], bad: range) -> None:
    samples = range(bad[0] * BATCH, (bad[-1] + 1) * BATCH)
    guard = Guard(ladder=ladder)
    module = fit(guard, tmp_path, data=Line(3 * LENGTH, bad=samples))
    assert test_loss(module.net) == pytest.approx(healthy, rel=0.02)
    rungs = [entry.rung for entry in guard.recovery.history]
    assert rungs[: len(ladder) - 1] == [rung if isinstance(rung, str) else rung["name"] for rung in ladder[:-1]]
    assert "stop" not in rungs
    # Steps go on and are never taken twice.
    steps = [step for step, _ in guard.losses]
    assert steps == list(range(300))
    assert module.trainer.global_step == 300


def test_a_jump_of_the_learning_rate_is_undone(tmp_path: Path, healthy: float) -> None:
    guard = Guard(conditions=[{"name": "loss", "num_steps": 5}], ladder=LADDER)
    module = fit(guard, tmp_path, data=Line(3 * LENGTH), jump=(120, 30.0))
    [entry] = guard.recovery.history
    assert (entry.rung, entry.step, entry.first_step) == ("roll_back", 127, 121)
    assert "alarms/at_120.ckpt (step 120)" in entry.outcome
    assert test_loss(module.net) == pytest.approx(healthy, rel=0.02)
    # What was saved in the meantime counts for nothing any more.
    assert guard.good.latest(before_step=125).step == 120


def test_a_checkpoint_of_a_run_that_was_lost_already_is_left_for_an_older_one(tmp_path: Path, healthy: float) -> None:
    guard = Guard(conditions=[{"name": "loss", "num_steps": 5}], ladder=LADDER, save_every=11)
    module = fit(guard, tmp_path, data=Line(3 * LENGTH), jump=(120, 30.0))
    # The first has the rate that has just jumped, and its loss was not over the limit yet.
    outcomes = [entry.outcome.split("(")[1].split(")")[0] for entry in guard.recovery.history]
    assert outcomes == ["step 121", "step 110"]
    assert test_loss(module.net) == pytest.approx(healthy, rel=0.02)


def test_the_learning_rate_stays_lower_for_a_while(tmp_path: Path) -> None:
    rung = {**ROLL_BACK, "lr_factor": 0.25, "lr_steps": 7}
    used: list[float] = []

    class Rates(pl.Callback):
        """What a step has moved an element by, over its gradient."""

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.before = pl_module.net[2].bias.item()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.gradient = pl_module.net[2].bias.grad.item()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            used.append((self.before - pl_module.net[2].bias.item()) / self.gradient)

    guard = Guard(ladder=[rung])
    data = Line(LENGTH, bad=bad_batches(33, 35))
    fit(None, tmp_path, data=data, shuffles=True, optimizer="plain", callbacks=[Rates(), guard])
    assert used[:33] == [pytest.approx(0.1, rel=0.01)] * 33
    assert used[36:43] == [pytest.approx(0.025, rel=0.01)] * 7
    assert used[43:45] == [pytest.approx(0.1, rel=0.01)] * 2


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_restart_leaves_out_what_the_run_itself_left_out(tmp_path: Path, workers: int) -> None:
    data = Line(LENGTH, bad=bad_batches(33, 35))
    options: dict[str, Any] = {"data": data, "shuffles": True, "max_epochs": 2, "workers": workers}
    guard = Guard(ladder=LADDER)
    there = fit(guard, tmp_path, **options)
    [entry] = guard.recovery.history
    assert (entry.step, entry.first_step) == (35, 33)
    file = tmp_path / "alarms" / "skip_list.json"
    [listed] = json.loads(file.read_text())["entries"]
    assert (listed["epoch"], listed["first_batch"], listed["last_batch"]) == (0, 30, 35)
    order = list(Shuffled(LENGTH))[30 * BATCH : 36 * BATCH]
    assert listed["sample_ids"] == [order]

    again = Guard(ladder=LADDER)
    resumed = fit(again, tmp_path, resume_from=tmp_path / "alarms" / "at_30.ckpt", **options)
    assert resumed.seen == there.seen[36:]
    assert same_parameters(there, resumed)
    assert again.losses == guard.losses[36:]
    assert resumed.trainer.global_step == there.trainer.global_step == 200
    # Listed samples have not come again, and every batch has its size.
    bad = {float(data.inputs[sample, 0]) for sample in order}
    second = [seen for epoch, _, seen in there.seen if epoch == 1]
    assert not bad & {value for batch in second for value in batch}
    assert {len(batch) for batch in second} == {BATCH}


def test_a_checkpoint_after_the_bad_batches_drops_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": Line(LENGTH, bad=bad_batches(33, 35)), "shuffles": True}
    guard = Guard(ladder=LADDER)
    there = fit(guard, tmp_path, **options)
    resumed = fit(Guard(ladder=LADDER), tmp_path, resume_from=tmp_path / "alarms" / "at_60.ckpt", **options)
    assert resumed.seen == there.seen[60:]
    assert same_parameters(there, resumed)


def test_bad_batches_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """Validation, and what else follows the last batch, comes after one that is left out too."""
    validated: list[tuple[int, int]] = []

    class Validated(pl.Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            validated.append((trainer.current_epoch, trainer.global_step))

    class Validating(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    options: dict[str, Any] = {"data": Line(LENGTH, bad=bad_batches(97, 99)), "shuffles": True, "max_epochs": 2}
    there = fit(Guard(ladder=LADDER), tmp_path, callbacks=[Validated()], kind=Validating, **options)
    assert validated == [(0, 100), (1, 200)]
    resume_from = tmp_path / "alarms" / "at_90.ckpt"
    resumed = fit(
        Guard(ladder=LADDER), tmp_path, callbacks=[Validated()], kind=Validating, resume_from=resume_from, **options
    )
    assert validated[2:] == [(0, 100), (1, 200)]
    assert resumed.seen == there.seen[100:]
    assert same_parameters(there, resumed)


def test_windows_of_accumulation(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data": Line(LENGTH, bad=bad_batches(30, 35)),
        "shuffles": True,
        "trainer_options": {"accumulate_grad_batches": 2},
    }
    guard = Guard(ladder=LADDER)
    there = fit(guard, tmp_path, **options)
    [listed] = json.loads((tmp_path / "alarms" / "skip_list.json").read_text())["entries"]
    assert (listed["first_step"], listed["last_step"]) == (10, 17)
    assert (listed["first_batch"], listed["last_batch"]) == (20, 35)
    resumed = fit(Guard(ladder=LADDER), tmp_path, resume_from=tmp_path / "alarms" / "at_10.ckpt", **options)
    assert same_parameters(there, resumed)
    assert resumed.trainer.global_step == there.trainer.global_step == 50


def test_the_ladder_goes_on_after_a_kill_between_two_rungs(tmp_path: Path) -> None:
    ladder = ["alarm", "skip", {"name": "lower_lr", "num_steps": 10}, "stop"]
    options: dict[str, Any] = {"data": Line(LENGTH, bad=range(20 * BATCH, LENGTH))}
    whole = Guard(ladder=ladder, save_every=25)
    with pytest.raises(TrainingStoppedError):
        fit(whole, tmp_path, **options)
    assert [entry.step for entry in whole.recovery.history] == [22, 25, 28, 31]
    rest = Guard(ladder=ladder, save_every=25)
    with pytest.raises(TrainingStoppedError) as stopped:
        fit(rest, tmp_path, resume_from=tmp_path / "alarms" / "at_25.ckpt", **options)
    assert rest.recovery.history == whole.recovery.history
    assert [line.split(",")[0] for line in str(stopped.value).splitlines()[1:]] == [
        "step 22: alarm",
        "step 25: skip",
        "step 28: lower_lr",
        "step 31: stop",
    ]


def test_after_the_last_rollback_the_run_stops_with_its_history(tmp_path: Path) -> None:
    guard = Guard(ladder=[{**ROLL_BACK, "max_rollbacks": 2}])
    with pytest.raises(TrainingStoppedError, match=r"step 41: stop") as stopped:
        fit(guard, tmp_path, data=Line(LENGTH, bad=range(33 * BATCH, LENGTH)))
    assert [entry.rung for entry in guard.recovery.history] == ["roll_back", "roll_back", "stop"]
    assert str(stopped.value).count("roll_back, because 3 of the last 10 steps were not finite") == 2


def test_without_a_good_checkpoint_the_next_rung_is_taken(tmp_path: Path) -> None:
    guard = Guard(ladder=LADDER, save_every=1000)
    with (
        pytest.warns(StabilizerWarning, match="not done: no checkpoint of step 33 or before is known to be good"),
        pytest.raises(TrainingStoppedError, match="step 35: stop"),
    ):
        fit(guard, tmp_path, data=Line(LENGTH, bad=bad_batches(33, 35)), shuffles=True)
    lenient = Guard(ladder=[ROLL_BACK], save_every=1000)
    fit(lenient, tmp_path, data=Line(LENGTH, bad=bad_batches(33, 35)), shuffles=True)  # it can only tell


def test_more_than_max_skips_is_not_left_out(tmp_path: Path) -> None:
    guard = Guard(ladder=LADDER, max_skips=5)
    with pytest.raises(TrainingStoppedError, match="6 micro-batches would be left out, more than max_skips=5"):
        fit(guard, tmp_path, data=Line(LENGTH, bad=bad_batches(33, 35)), shuffles=True)
    assert len(guard.recovery.skips) == 0
