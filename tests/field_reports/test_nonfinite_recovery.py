"""Field reports, area nonfinite-skip: skips that follow a loss, of one rank of two."""

from __future__ import annotations

import pytest
import torch

from stabilizer.callbacks import CheckpointGuardCallback, attach
from tests.counting import count_collectives
from tests.field_reports.helpers import our_warnings
from tests.launcher import run_distributed
from tests.models import loss_of, token_batch
from tests.skip_tools import INF, NAN, Faults, changed, snapshot
from tests.spread import spread
from tests.tiny_loops import no_log

#: The first fault is what the ladder needs to begin with skips.
FIRST = 24


def agree(rank: int, world_size: int, faults: Faults) -> tuple[list[bool], list[int], list[int]]:
    """Which steps move anything, the collectives of each, and the steps of the history."""
    model, _ = spread("fsdp2", rank, num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    conditions = [{"name": "nonfinite", "num": 1}, {"name": "loss", "num_steps": 1}]
    callback = CheckpointGuardCallback(conditions=conditions, ladder=["skip"], strict=True)
    moved, counts = [], []
    with our_warnings(), attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=no_log) as handle:
        for step in range(FIRST + 6):
            before = snapshot(model, optimizer)
            loss = loss_of(model, token_batch(rank, step=step))
            # What is told of the loss is bad, the gradient is not.
            handle.record_loss(loss.detach() * faults.get((step, rank), 1.0))
            loss.backward()
            with count_collectives() as calls:
                optimizer.step()
            counts.append(len(calls))
            optimizer.zero_grad()
            moved.append(bool(changed(before, snapshot(model, optimizer))))
    return moved, counts, [entry.step for entry in callback.recovery.history]


@pytest.mark.parametrize(("value", "bad_rank"), [(NAN, 0), (INF, 1), (1e6, 1)])
def test_B042_a_bad_loss_of_one_rank_skips_the_step_of_all(value: float, bad_rank: int) -> None:
    faults = {(FIRST, 1 - bad_rank): NAN, (FIRST + 3, bad_rank): value}
    first, second = run_distributed(agree, faults, timeout=60)
    assert first == second
    moved, counts, history = first
    assert [step for step, has_moved in enumerate(moved) if not has_moved] == [FIRST + 3]
    assert history == [FIRST, FIRST + 3]
    assert set(counts[1:]) == {counts[1]}
