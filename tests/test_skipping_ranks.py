"""A step that is skipped leaves no trace, on any rank, under any strategy, with any optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from stabilizer.callbacks import LayerClipCallback
from tests.launcher import run_distributed
from tests.skip_tools import INF, NAN, OPTIMIZERS, changed, train

STRATEGIES = ("ddp", "fsdp1", "fsdp2")
STEPS = 5
#: torch has no fused step of these for DTensors.
WHOLE_ONLY = {"sgd_fused", "adagrad_fused"}


def optimizers_of(strategy: str) -> list[str]:
    """What torch can step under a strategy."""
    return [name for name in OPTIMIZERS if strategy != "fsdp2" or name not in WHOLE_ONLY]


def compare(rank: int, world_size: int, strategy: str, bad_rank: int) -> dict[str, Any]:
    """Trainings with steps that one rank spoils, and others without these steps at all, for every optimizer."""
    faults, found = {(0, bad_rank): NAN, (3, bad_rank): INF}, {}
    setting: dict[str, Any] = {"num_steps": STEPS, "rank": rank, "num_ranks": world_size, "strategy": strategy}
    for name in optimizers_of(strategy):
        run = train("plain", [LayerClipCallback(every_n_steps=1)], faults=faults, optimizer=name, **setting)
        wanted = train("plain", [], left_out=[0, 3], optimizer=name, **setting)
        # A fused optimizer makes its state, all zeros, before it looks whether the step counts.
        first = changed(run.states[0], run.states[1], absent_is_zero=name.endswith("fused"))
        found[name] = {
            "moved": [first, *(run.moved(step) for step in range(1, STEPS))],
            "differs": changed(wanted.states[-1], run.states[-1]),
            "counts": [run.points.get(("skip/count", step)) for step in range(STEPS)],
            "rows": [run.points.get(("skip/consecutive", step)) for step in range(STEPS)],
            "num_warnings": len(run.warnings),
        }
    return found


@pytest.mark.parametrize("bad_rank", [1, 0])
@pytest.mark.covers(feature="skipped steps", host="plain")
@pytest.mark.parametrize("strategy", [pytest.param(s, marks=pytest.mark.covers(strategy=s)) for s in STRATEGIES])
def test_a_skipped_step_leaves_no_trace(strategy: str, bad_rank: int) -> None:
    """Weights, moments and step counts, bit by bit, and as if the data of these steps had never been."""
    for rank, results in enumerate(run_distributed(compare, strategy, bad_rank)):
        assert list(results) == optimizers_of(strategy)
        for name, found in results.items():
            assert found["moved"][0] == [], name
            assert found["moved"][3] == [], name
            assert all(found["moved"][step] for step in (1, 2, 4)), name
            assert found["differs"] == [], name
            assert found["num_warnings"] == (rank == 0), name
            if rank == 0:
                assert found["counts"] == [1, 1, 1, 2, 2], name
                assert found["rows"] == [1, 0, 0, 1, 0], name
