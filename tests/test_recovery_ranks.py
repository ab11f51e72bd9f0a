"""Recovery on two ranks: all of them go back together, whichever one was in trouble."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.errors import TrainingStoppedError
from tests.launcher import run_distributed
from tests.recovery_runs import BATCH, Guard, Line, Shuffled, fit, loop, quiet, test_loss
from tests.test_recovery_lightning import LADDER

LENGTH = 200 * BATCH  # a hundred batches on each rank


def of_rank(rank: int, first: int, last: int) -> list[int]:
    """One sample of every batch of a rank in the first epoch from one to another."""
    order = list(Shuffled(LENGTH, rank=rank, num_ranks=2))
    return [order[batch * BATCH] for batch in range(first, last + 1)]


def weights(net: Any) -> list[Tensor]:
    return [getattr(value, "_local_tensor", value).detach().clone() for value in net.parameters()]


def lightning(rank: int, world_size: int, strategy: str, folder: Path, *, resumes: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": strategy, "devices": world_size, "shuffles": True, "max_epochs": 2}
    found: dict[str, Any] = {}
    with quiet():
        if resumes:
            options["resume_from"] = next(folder.rglob("at_30.ckpt"))
        guard = Guard(ladder=LADDER, save_every=1000 if resumes else 10)
        run = fit(guard, folder, data=Line(LENGTH, bad=of_rank(1, 33, 35)), **options)
        found = {
            "weights": weights(run.net),
            "seen": run.seen,
            "told": guard.recovery.ladder.told(),
            "steps": run.trainer.global_step,
        }
    return found


@pytest.mark.parametrize(
    "strategy",
    # FSDP1's own sharded states warn of what torch will drop.
    ["ddp", "fsdp2", pytest.param("fsdp1", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")])],
)
def test_lightning(tmp_path: Path, strategy: str) -> None:
    there = run_distributed(lightning, strategy, tmp_path, resumes=False, timeout=90)
    for result in there:
        assert result["told"].startswith("step 35: roll_back, because 3 of the last 10 steps were not finite")
        assert "at_30.ckpt (step 30)" in result["told"]
        assert result["steps"] == 200
    [file] = tmp_path.rglob("skip_list.json")
    [listed] = json.loads(file.read_text())["entries"]
    samples = [list(Shuffled(LENGTH, rank=rank, num_ranks=2))[30 * BATCH : 36 * BATCH] for rank in range(2)]
    assert (listed["num_ranks"], listed["sample_ids"]) == (2, samples)
    again = run_distributed(lightning, strategy, tmp_path, resumes=True, timeout=90)
    for first, second in zip(there, again, strict=True):
        assert second["told"] == ""
        assert second["seen"] == first["seen"][36:]
        assert all(torch.equal(one, other) for one, other in zip(first["weights"], second["weights"], strict=True))


def accelerate(rank: int, world_size: int, strategy: str, folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": strategy, "rank": rank, "num_ranks": world_size, "shuffles": True}
    options["learning_rate"] = 0.02
    data, found = Line(LENGTH, bad=of_rank(1, 33, 35)), {}
    with quiet():
        guard = Guard(ladder=LADDER)
        run = loop(guard, folder, data=data, max_epochs=2, **options)
        healthy = loop(Guard(), folder / "healthy", data=Line(LENGTH), max_epochs=2, **options)
        found["told"], found["weights"] = guard.recovery.ladder.told(), weights(run.net)
        found["losses"] = [test_loss(run.net), test_loss(healthy.net)]
        start = next(path for path in folder.rglob("at_30") if "healthy" not in str(path))
        again = loop(Guard(), folder, data=data, max_epochs=2, resume_from=start, first=(0, 30), **options)
        found["is_same"] = run.seen[36:] == again.seen and all(
            torch.equal(one, other) for one, other in zip(weights(run.net), weights(again.net), strict=True)
        )
    return found


def test_accelerate(tmp_path: Path) -> None:
    results = run_distributed(accelerate, "ddp", tmp_path, timeout=120)
    for result in results:
        assert result["told"].startswith("step 35: roll_back")
        assert result["is_same"]
        faulty, healthy = result["losses"]
        assert faulty == pytest.approx(healthy, rel=0.02)
    pairs = zip(results[0]["weights"], results[1]["weights"], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def broken(rank: int, world_size: int, folder: Path, what: str) -> str:
    guard = Guard(ladder=LADDER)
    if what == "load" and rank == 1:
        # Its view of the file system differs.
        latest = guard.good.latest

        def elsewhere(before_step: int) -> Any:
            found = latest(before_step)
            found.path = found.path.with_name("gone.ckpt")
            return found

        guard.good.latest = elsewhere  # type: ignore[method-assign]
    if what == "write" and rank == 0:
        guard.recovery._keeper.write = lambda: (_ for _ in ()).throw(OSError("disk full"))  # type: ignore[method-assign]
    try:
        with quiet():
            fit(guard, folder, data=Line(LENGTH, bad=of_rank(1, 33, 35)), shuffles=True, strategy="ddp", devices=2)
    except (TrainingStoppedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("what", "where"), [("load", "loading .* failed on one rank"), ("write", "skip list failed on one rank")]
)
def test_what_fails_on_one_rank_ends_the_run_on_both(tmp_path: Path, what: str, where: str) -> None:
    for message in run_distributed(broken, tmp_path, what, timeout=60):
        assert message.startswith("TrainingStoppedError" if what == "load" else "RuntimeError")
        assert re.search(where, message), message
