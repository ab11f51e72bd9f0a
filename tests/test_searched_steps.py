"""A step that was searched is logged in full, whatever the intervals: it is the one that people look for."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from stabilizer.callbacks import GradNormCallback, LayerClipCallback, StabilizerCallback
from tests.launcher import run_distributed
from tests.localize_loops import Plan, grad_loc, run

pytestmark = pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning")

INTERVAL, FAULTY = 10, 37


def logged(folder: str, *, rank: int = 0, strategy: str = "single", faulty: int = FAULTY) -> dict[str, list[int]]:
    """Tag -> steps."""
    found: dict[str, list[int]] = defaultdict(list)

    def log(values: dict[str, float], step: int) -> None:
        for tag in values:
            found[tag].append(step)

    clip = LayerClipCallback(rule={"name": "robust_log", "warmup_steps": 20}, every_n_steps=INTERVAL)
    callbacks: list[StabilizerCallback] = [GradNormCallback(layer_every_n_steps=INTERVAL), clip, grad_loc(folder)]
    run(Plan(strategy=strategy, faulty=faulty, steps=45, bad=((0, 0, 1, 7),)), callbacks, rank=rank, log=log)
    return dict(found)


def test_layers_and_their_clip_are_logged_at_the_step_and_once(tmp_path: Path) -> None:
    found = logged(str(tmp_path))
    assert found["gradloc/incidents"] == [FAULTY]
    regular = list(range(0, 45, INTERVAL))
    assert found["grad_norm/layer/lm_head"] == sorted([*regular, FAULTY])
    assert found["clip/layer_coefficient/lm_head"] == sorted([*regular, FAULTY])
    assert found["grad_norm/total"] == list(range(45))


def test_a_step_that_is_due_is_logged_once(tmp_path: Path) -> None:
    found = logged(str(tmp_path), faulty=40)
    assert found["gradloc/incidents"] == [40]
    assert found["grad_norm/layer/lm_head"] == list(range(0, 45, INTERVAL))


@pytest.mark.timeout(120)
def test_ranks_go_on_together(tmp_path: Path) -> None:
    first, second = run_distributed(_rank, str(tmp_path), world_size=2)
    assert FAULTY in first["grad_norm/layer/lm_head"]
    assert second == {}


def _rank(rank: int, world_size: int, folder: str) -> dict[str, list[int]]:
    return logged(folder, rank=rank, strategy="ddp")
