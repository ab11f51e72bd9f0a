"""What recovery costs a quiet step: a few numbers, which the host reads two steps later, and no collective."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import CheckpointGuardCallback, GradNormCallback, StepContext, attach
from stabilizer.callbacks.context import Position
from stabilizer.late import HostCopy
from stabilizer.tally import LossTally
from tests.counting import count_collectives, fake_cuda
from tests.launcher import run_distributed
from tests.models import loss_of, token_batch
from tests.recovery_runs import quiet
from tests.spread import spread
from tests.test_clipping_cost import fake_suite
from tests.tiny_loops import no_log

LADDER: list[Any] = ["alarm", "skip", "lower_lr"]


#: Of every kind.
CONDITIONS: list[Any] = ["nonfinite", "loss", lambda context: context.store.total_norm > 1e9, lambda context: False]


class Silent(CheckpointGuardCallback):
    """Logs nothing on a quiet step."""

    def on_step_end(self, context: StepContext) -> None:
        self.recovery.end_step(context)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_host_reads_what_has_had_two_steps_to_come() -> None:
    read: list[int] = []
    sent: list[Tensor] = []
    made = HostCopy.__init__

    def make(self: HostCopy, tensor: Tensor) -> None:
        made(self, tensor)
        sent.append(tensor)
        self.number = len(sent) - 1  # type: ignore[attr-defined]

    def see(self: HostCopy) -> Any:
        read.append(self.number)  # type: ignore[attr-defined]
        numbers = [0.0] * sent[self.number].numel()  # type: ignore[attr-defined]
        return types.SimpleNamespace(tolist=lambda: numbers)

    with fake_cuda(), mock.patch.object(HostCopy, "__init__", make), mock.patch.object(HostCopy, "read", see):
        suite = fake_suite([Silent(conditions=CONDITIONS, ladder=LADDER, strict=True)], fused=True)
        first = len(sent)
        for step in range(1, 9):
            tally = LossTally(["auto"])
            tally.begin({"labels": torch.zeros(2, 3, dtype=torch.int64, device="cuda")})
            tally.add(torch.ones((), device="cuda"))
            suite.run(losses=tally.take(0), position=Position(step, 1, 1))
            suite.before_step()
            suite.finish()
    rows = [number for number, tensor in enumerate(sent[first:], first) if tuple(tensor.shape) == (6,)]
    assert len(rows) == 8
    assert [number for number in read if number in rows] == rows[:6]  # two are still on their way


def collectives(rank: int, world_size: int, with_guard: bool) -> list[int]:
    model, _ = spread("fsdp2", rank, num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    callbacks = [GradNormCallback(), *([Silent(conditions=CONDITIONS, ladder=LADDER)] if with_guard else [])]
    counts = []
    with quiet(), attach(None, model=model, optimizer=optimizer, callbacks=callbacks, log=no_log) as handle:
        for step in range(3):
            loss = loss_of(model, token_batch(rank, step=step))
            handle.record_loss(loss.detach())
            loss.backward()
            with count_collectives() as calls:
                optimizer.step()
            counts.append(len(calls))
            optimizer.zero_grad()
    return counts[1:]


def test_a_quiet_step_has_the_one_collective_of_those_that_act() -> None:
    [without, _] = run_distributed(collectives, False, timeout=60)
    [with_guard, _] = run_distributed(collectives, True, timeout=60)
    # The five numbers by which ranks agree, whoever may skip; conditions have none of their own.
    assert [more - less for more, less in zip(with_guard, without, strict=True)] == [1] * 2
