"""Callbacks in transformers' Trainer: what they see is raw and right, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, StabilizerTrainerCallback
from tests.launcher import run_distributed
from tests.trainer_runs import make_trainer, reference

TOLERANCE = 1e-5
NUM_STEPS = 3
#: Smaller than any norm here, so that every step is clipped.
LIMIT = 0.5


def _train(
    rank: int, world_size: int, folder: str, *, strategy: str, accumulation: int, limit: float
) -> dict[str, Any]:
    rows: list[tuple[dict[str, float], int]] = []
    norms = GradNormCallback(layer_every_n_steps=1, granularity="parameter", heatmap_every_n_steps=None)
    losses = LossMeanVarCallback(windows=(2, 3), every_n_steps=1, warmup_steps=0)
    trainer = make_trainer(
        strategy,
        folder,
        callbacks=[StabilizerTrainerCallback([losses, norms], log=lambda values, step: rows.append((values, step)))],
        gradient_accumulation_steps=accumulation,
        max_grad_norm=limit,
        max_steps=NUM_STEPS,
    )
    trainer.train()
    history = norms.norm_history()
    values = {(tag, step): value for row, step in rows for tag, value in row.items()}
    return {
        "totals": history.totals.tolist(),
        "norms": dict(zip(history.layer_names, history.norms.T.tolist(), strict=True)),
        "values": values,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "limit": trainer.args.max_grad_norm,
        "kind": type(trainer.model_wrapped).__name__,
    }


def _cases() -> list[Any]:
    return [
        pytest.param(
            strategy,
            accumulation,
            marks=pytest.mark.covers(
                feature=["gradient norms", "loss windows", "total clip"], strategy=strategy, host="transformers"
            ),
            id=f"{strategy}-{accumulation}",
        )
        for strategy in ("single", "ddp", "fsdp2")
        for accumulation in (1, 2)
    ]


@pytest.mark.parametrize(("strategy", "accumulation"), _cases())
def test_what_is_logged_equals_a_float64_training(tmp_path: Path, strategy: str, accumulation: int) -> None:
    num_ranks = 1 if strategy == "single" else 2
    options = {"strategy": strategy, "accumulation": accumulation, "limit": LIMIT}
    if num_ranks == 1:
        ranks = [_train(0, 1, str(tmp_path), **options)]
    else:
        ranks = run_distributed(_train, str(tmp_path), world_size=2, **options)
    expected = reference(num_steps=NUM_STEPS, accumulation=accumulation, num_ranks=num_ranks, max_norm=LIMIT)
    if strategy == "fsdp2":
        assert ranks[0]["kind"] == "FSDPLlamaForCausalLM"
    for found in ranks:
        assert found["totals"] == pytest.approx([step["total"] for step in expected], rel=TOLERANCE)
        for name, norms in found["norms"].items():
            assert norms == pytest.approx([step["norms"][name] for step in expected], rel=TOLERANCE, abs=1e-9), name
        assert found["limit"] == LIMIT  # put back
        # The trainer's own log still has the norm before the clip, and its loss is ours.
        assert [entry["grad_norm"] for entry in found["log"]] == pytest.approx(
            [step["total"] for step in expected], rel=TOLERANCE
        )
    values = ranks[0]["values"]
    for number, step in enumerate(expected):
        # The trainer counts a step when it is done.
        at = number + 1
        assert values["grad_norm/total", at] == pytest.approx(step["total"], rel=TOLERANCE)
        assert values["grad_norm/total_after", at] == pytest.approx(LIMIT, rel=TOLERANCE)
        if number:
            last_two = [expected[number - 1]["loss"], step["loss"]]
            assert values["loss/mean_2", at] == pytest.approx(sum(last_two) / 2, rel=TOLERANCE)
