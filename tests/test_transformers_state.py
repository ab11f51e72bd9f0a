"""Checkpoints of a trainer hold our callbacks' states, and training that is resumed goes on with them unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradLocCallback,
    GradNormCallback,
    LayerClipCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    StabilizerTrainerCallback,
)
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed
from tests.states import same
from tests.trainer_runs import make_trainer

NUM_STEPS = 8


def _suite() -> list[StabilizerCallback]:
    rule = {"name": "robust_log", "warmup_steps": 3}
    return [
        GradNormCallback(layer_every_n_steps=1),
        LossMeanVarCallback(windows=(3,), every_n_steps=1, warmup_steps=0),
        LayerClipCallback(rule=rule),
        AdaptiveClipThreshold(rule=rule),
        GradLocCallback(),
    ]


def _run(
    strategy: str, folder: str, *, resume: str | None = None, stops_at: int = NUM_STEPS, **options: Any
) -> dict[str, Any]:
    rows: list[tuple[dict[str, float], int]] = []
    callbacks = _suite()
    trainer = make_trainer(
        strategy,
        folder,
        callbacks=[StabilizerTrainerCallback(callbacks, log=lambda values, step: rows.append((values, step)))],
        optimizer="adamw_torch",
        max_steps=stops_at,
        save_strategy="steps",
        save_steps=4,
        learning_rate=1e-2,
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return {
        "weights": [_whole(parameter) for parameter in trainer.model.parameters()],
        "states": {callback.state_key: callback.state_dict() for callback in callbacks},
        "values": {(tag, step): value for row, step in rows for tag, value in row.items()},
    }


def _whole(parameter: Any) -> Tensor:
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


def _both(rank: int, world_size: int, strategy: str, folder: str) -> bool:
    straight = _run(strategy, f"{folder}/straight")
    _run(strategy, f"{folder}/parts", stops_at=4)
    resumed = _run(strategy, f"{folder}/parts", resume=f"{folder}/parts/checkpoint-4")
    assert all(torch.equal(a, b) for a, b in zip(straight["weights"], resumed["weights"], strict=True))
    assert same(straight["states"], resumed["states"])
    late = {key: value for key, value in straight["values"].items() if key[1] > 4}
    if rank == 0:
        assert {key for key in late if key in resumed["values"]} == set(late)
        assert all(resumed["values"][key] == value for key, value in late.items())
        assert ("grad_norm/total", 8) in late
    return True


@pytest.mark.covers(feature="checkpoint and resume", strategy="single", host="transformers")
def test_resumed_is_bit_for_bit_uninterrupted(tmp_path: Path) -> None:
    assert _both(0, 1, "single", str(tmp_path))


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            strategy, marks=pytest.mark.covers(feature="checkpoint and resume", strategy=strategy, host="transformers")
        )
        for strategy in ("ddp", "fsdp2")
    ],
)
def test_resumed_on_two_ranks(tmp_path: Path, strategy: str) -> None:
    assert run_distributed(_both, strategy, str(tmp_path), world_size=2, timeout=100) == [True, True]


def test_the_files_hold_plain_types_and_tensors_only(tmp_path: Path) -> None:
    _run("single", str(tmp_path), stops_at=4)
    folder = tmp_path / "checkpoint-4"
    assert set(json.loads((folder / "stabilizer.json").read_text())) == {one.state_key for one in _suite()}
    assert (folder / "stabilizer.safetensors").is_file()


def test_resumed_from_the_last_checkpoint_that_the_trainer_finds(tmp_path: Path) -> None:
    _run("single", str(tmp_path), stops_at=4)
    callbacks = _suite()
    trainer = make_trainer(
        "single", tmp_path, callbacks=[StabilizerTrainerCallback(callbacks)], optimizer="adamw_torch", max_steps=5
    )
    trainer.train(resume_from_checkpoint=True)
    assert callbacks[0].next_step() == 5


def test_a_checkpoint_without_states_is_told(tmp_path: Path) -> None:
    _run("single", str(tmp_path), stops_at=4)
    (tmp_path / "checkpoint-4" / "stabilizer.json").unlink()
    norms, rows = GradNormCallback(), list[int]()
    trainer = make_trainer(
        "single",
        tmp_path,
        callbacks=[StabilizerTrainerCallback([norms], log=lambda values, step: rows.append(step))],
        optimizer="adamw_torch",
        max_steps=6,
    )
    with pytest.warns(StabilizerWarning, match="has no states of stabilizer's callbacks: they start anew"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    # Still under the trainer's own steps.
    assert norms.next_step() == 2
    assert set(rows) == {5, 6}


def test_old_checkpoints_go_and_the_best_one_is_loaded(tmp_path: Path) -> None:
    norms = GradNormCallback()
    trainer = make_trainer(
        "single",
        tmp_path,
        callbacks=[StabilizerTrainerCallback([norms])],
        max_steps=6,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        kwargs={"eval_dataset": make_trainer("single", tmp_path).train_dataset},
    )
    trainer.train()
    # Forward passes of evaluations are no steps.
    assert len(norms.norm_history().totals) == 6
    best = Path(str(trainer.state.best_model_checkpoint))
    assert (best / "stabilizer.json").is_file()
    shutil.rmtree(best)


def test_an_alarm_saves_a_checkpoint_that_can_be_resumed(tmp_path: Path) -> None:
    class Asks(StabilizerCallback):
        saved: str | None = None

        def on_step_end(self, context: Any) -> None:
            if context.step == 2:
                context.defer(self._save)

        def _save(self) -> None:
            self.saved = self.driver.save_checkpoint("spike")

    asks = Asks()
    trainer = make_trainer(
        "single", tmp_path, callbacks=[StabilizerTrainerCallback([asks, GradNormCallback()])], max_steps=4
    )
    trainer.train()
    assert asks.saved == str(tmp_path / "alarms" / "spike" / "checkpoint-3")
    assert (Path(asks.saved) / "stabilizer.json").is_file()
    assert not list(tmp_path.glob("checkpoint-*"))
    again = make_trainer("single", tmp_path, callbacks=[StabilizerTrainerCallback([Asks(), GradNormCallback()])])
    again.args.max_steps = 4
    again.train(resume_from_checkpoint=asks.saved)
    pairs = zip(trainer.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
