"""CheckpointGuardCallback on two processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import CheckpointGuardCallback, StabilizerCallback, StepContext
from stabilizer.checkpoints import Expected, Weight, last_good_checkpoint, verify_checkpoint
from stabilizer.checkpoints.expecting import weights_of
from tests.checkpoint_runs import accelerate_run, guards_below, lightning_run
from tests.launcher import run_distributed


class _Asks(StabilizerCallback):
    """What every rank is told when all are asked at one step."""

    def __init__(self, guard: CheckpointGuardCallback, *, at: int, before: int) -> None:
        super().__init__()
        self.guard, self.at, self.before = guard, at, before
        self.answers: list[Any] = []

    def on_step_end(self, context: StepContext) -> None:
        if context.step == self.at:
            found = self.guard.latest(self.before)
            self.answers.append(None if found is None else (found.path.name, found.step))
            assert self.guard._saves is not None
            self.answers.append([weight.names for weight in self.guard._saves.expected().weights])


def _all_wrong(names: Sequence[Any]) -> Expected:
    """What no checkpoint can have: whoever compares by these names finds each of them."""
    return Expected(tuple(Weight(tuple(each), (99,)) for each in names))


def _fit(rank: int, world_size: int, folder: str, strategy: str, **options: Any) -> Any:
    guard = CheckpointGuardCallback()
    asks = _Asks(guard, at=4, before=4)
    lightning_run(Path(folder), guard, strategy=strategy, devices=world_size, more=[asks], **options)
    return asks.answers


# torch: what it says of its own ways when FSDP1 saves.
_QUIET = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp1", marks=[pytest.mark.slow, _QUIET]), "fsdp2"])
def test_lightning_folders_and_files_are_verified_and_kept(strategy: str, tmp_path: Path) -> None:
    [answer, names], [other, _] = run_distributed(_fit, str(tmp_path), strategy, num_steps=5)
    assert answer == other == ("step=4.ckpt", 4)
    guards = guards_below(tmp_path)
    assert {name: (guard.verdict, guard.step) for name, guard in guards.items()} == {
        "step=4.ckpt": ("good", 4),
        "step=5.ckpt": ("good", 5),
    }
    saved = tmp_path / "step=5.ckpt"
    assert saved.is_dir() == (strategy != "ddp")
    assert last_good_checkpoint(tmp_path) == saved
    reasons = verify_checkpoint(saved, expected=_all_wrong(names)).reasons
    assert len(reasons) == min(len(names), 21) > 10, "the model's names are not those of the file"
    assert "the model's has [99]" in reasons[0]
    if saved.is_dir():
        names = [file.name for file in guards["step=5.ckpt"].files]
        assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
        (piece,) = saved.glob("__1_*")
        whole = piece.read_bytes()
        piece.write_bytes(whole[: len(whole) - 10])
        [reason, *_] = verify_checkpoint(saved).reasons
        assert reason.startswith("__1_0.distcp is cut off: ")
        with pytest.warns(UserWarning, match="__1_0.distcp has .* bytes instead of"):
            assert last_good_checkpoint(tmp_path) == tmp_path / "step=4.ckpt"


def _resume(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    found, guard = last_good_checkpoint(folder), CheckpointGuardCallback()
    asks = _Asks(guard, at=-1, before=0)
    lightning_run(Path(folder), guard, strategy="fsdp2", devices=world_size, num_steps=4, resume=found, more=[asks])
    assert found is not None
    return found.name, guard.next_step()


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory:UserWarning", "ignore:You.re resuming from a checkpoint:UserWarning"
)
def test_a_distributed_folder_without_a_guard_file_serves_to_resume(tmp_path: Path) -> None:
    run_distributed(_fit, str(tmp_path), "fsdp2", num_steps=3)
    (tmp_path / "step=3.ckpt.guard.json").unlink()
    assert run_distributed(_resume, str(tmp_path)) == [("step=3.ckpt", 4)] * 2
    assert guards_below(tmp_path)["step=3.ckpt"].verdict == "good"


def _loop(rank: int, world_size: int, folder: str, strategy: str, first_only: bool = False) -> list[str]:
    def save(accelerator: Any, step: int) -> None:
        if rank == 0 or not first_only:
            accelerator.save_state(f"{folder}/ckpt")

    guard = CheckpointGuardCallback()
    model = accelerate_run(guard, strategy=strategy, num_steps=4, save=save, rank=rank, num_ranks=world_size)
    return [weight.names[0] for weight in weights_of(model)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_accelerate_writes_over_nothing_that_is_good(strategy: str, tmp_path: Path) -> None:
    """Every rank writes its own file: none may be taken for, or moved away with, those of the save before."""
    names, _ = run_distributed(_loop, str(tmp_path), strategy)
    guards = guards_below(tmp_path)
    reasons = verify_checkpoint(tmp_path / "ckpt", expected=_all_wrong([[name] for name in names])).reasons
    assert len(reasons) == min(len(names), 21) > 10, "the model's names are not those of the file"
    assert {name: (guard.verdict, guard.step) for name, guard in guards.items()} == {
        "ckpt": ("good", 4),
        "kept/step3-ckpt": ("good", 3),
    }
    for guard in guards.values():
        assert {"random_states_0.pkl", "random_states_1.pkl"} <= {file.name for file in guard.files}
    (tmp_path / "ckpt" / "random_states_1.pkl").unlink()
    with pytest.warns(UserWarning, match=r"random_states_1.pkl is not there"):
        assert last_good_checkpoint(tmp_path) == tmp_path / "kept" / "step3-ckpt"


def test_a_loop_that_saves_on_one_rank_only_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_distributed(_one_rank_saves, str(tmp_path), timeout=60)
    [guard] = [guard for name, guard in guards_below(tmp_path).items() if name == "ckpt"]
    assert guard.verdict == "bad"
    assert guard.reasons == ("random_states_1.pkl is missing: the save broke off",)


def _one_rank_saves(rank: int, world_size: int, folder: str) -> list[str]:
    from stabilizer.callbacks import checkpoint_accelerate

    checkpoint_accelerate._SECONDS_FOR_RANKS = 0.2
    return _loop(rank, world_size, folder, "ddp", first_only=True)
