"""The parts of a step under every strategy, against the gradients of one process in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher import run_distributed
from tests.part_loops import expected_parts, run_parts
from tests.spread import CASES

pytestmark = pytest.mark.norms

TOLERANCE = 1e-5


def _seen(strategy: str, num_micro_batches: int) -> list[Any]:
    if strategy == "single":
        return [run_parts(0, 1, strategy, num_micro_batches)]
    return run_distributed(run_parts, strategy, num_micro_batches, world_size=CASES[strategy].world_size)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize(
    "strategy", ["single", "ddp", "fsdp1", "fsdp1_hybrid", "fsdp2", "hsdp", "tp", "fsdp2_tp", "ddp_tp"]
)
def test_parts_are_those_of_one_process(strategy: str, num_micro_batches: int) -> None:
    ranks = _seen(strategy, num_micro_batches)
    assert all(rank == ranks[0] for rank in ranks)
    # The first steps have no sensors yet, or, under FSDP2, nothing to put them on.
    seen, expected = ranks[0][3], expected_parts(strategy, num_micro_batches, 3)
    assert seen["is_known"]
    for key, value in expected.items():
        assert seen[key] == pytest.approx(value, rel=TOLERANCE), key


def test_summands_of_sequence_parallelism_are_told_to_be_unknown() -> None:
    for rank in _seen("sp", 2):
        assert not rank[3]["is_known"]
        assert "SequenceParallel" in rank[3]["reason"]
