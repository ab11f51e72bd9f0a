"""What a trainer's loss is computed from beside its batch is given again, and no rank waits for another."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from stabilizer.callbacks.trainer_memory import Memory, Remembered, as_it_was, remember, undisturbed
from tests.accelerate_loops import reset
from tests.launcher import run_distributed
from tests.trainer_runs import make_trainer


def _alone(rank: int, world_size: int) -> list[list[float]]:
    reset()
    accelerator = Accelerator(cpu=True)
    memory = Memory(accelerator)

    kept = Remembered({}, syncs=True)

    def loss() -> list[Tensor]:
        own = torch.tensor([float(rank + 1)])
        return [accelerator.gather(own), accelerator.reduce(own, reduction="sum"), accelerator.gather(own + 10)]

    with memory.recording(kept):
        first = loss()
    for value in first:
        value.zero_()  # a loss may change what it was given
    found = []
    if rank == 0:
        # The other rank is not there: a collective would wait until the test's time is over.
        for _ in range(2):
            with memory.playing(kept):
                found = [value.tolist() for value in loss()]
        with memory.playing(kept), pytest.raises(RuntimeError, match="more than it did the first time"):
            loss(), accelerator.gather(torch.zeros(1))
    dist.barrier()
    memory.close()
    assert not {"gather", "reduce", "gather_for_metrics", "pad_across_processes"} & vars(accelerator).keys()
    return found


def test_collectives_are_given_again_on_one_rank_alone() -> None:
    first, _ = run_distributed(_alone, world_size=2, timeout=40)
    assert first == [[1.0, 2.0], [3.0], [11.0, 12.0]]


def test_a_trainer_is_as_it_was_and_then_as_it_is(tmp_path: Path) -> None:
    trainer: Any = make_trainer("single", tmp_path)
    trainer.coefficient, trainer.window = 0.5, None
    remembered = remember(trainer)
    trainer.coefficient, trainer.window = 2.0, torch.ones(2)
    trainer.accelerator.gradient_state._set_sync_gradients(not remembered.syncs)
    with as_it_was(trainer, remembered):
        assert (trainer.coefficient, trainer.window) == (0.5, None)
        assert trainer.accelerator.sync_gradients is remembered.syncs
        trainer.coefficient = 7.0
    assert trainer.coefficient == 2.0
    assert torch.equal(trainer.window, torch.ones(2))
    assert trainer.accelerator.sync_gradients is not remembered.syncs


def test_nothing_that_is_done_within_is_left(tmp_path: Path) -> None:
    trainer: Any = make_trainer("single", tmp_path, report_to=["tensorboard"])
    trainer.metrics = {"train": defaultdict(list, {"entropy": [1.0]}), "logs": {"prompt": deque(["a"], maxlen=2)}}
    trainer.names = [["one"], {"two": [2]}]
    kept, deep = trainer.metrics, trainer.metrics["train"]
    before = dict(vars(trainer))
    with undisturbed(trainer):
        trainer.metrics["train"]["entropy"].append(2.0)
        trainer.metrics["train"]["new"].append(3.0)
        trainer.metrics["logs"]["prompt"].append("b")
        trainer.names[1]["two"].append(3)
        trainer.state.num_input_tokens_seen += 5
        trainer.counter = 1
        # TRL sends the times of its methods to the reporters that are named here.
        assert trainer.args.report_to == []
    assert trainer.metrics is kept
    assert trainer.metrics["train"] is deep
    assert dict(deep) == {"entropy": [1.0]}
    assert list(kept["logs"]["prompt"]) == ["a"]
    assert trainer.names == [["one"], {"two": [2]}]
    assert trainer.state.num_input_tokens_seen == 0
    assert trainer.args.report_to == ["tensorboard"]
    assert vars(trainer).keys() == before.keys()
