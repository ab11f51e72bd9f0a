"""Trainers that are used in unusual ways, and what must not happen to them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from stabilizer.callbacks import (
    AdaptiveClipThreshold,
    GradLocCallback,
    GradNoiseScaleCallback,
    GradNormCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    StabilizerTrainerCallback,
    StepContext,
)
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed
from tests.trainer_runs import Rows, make_trainer, reference

Points = dict[tuple[str, int], float]


def _run(
    folder: Path | str, *callbacks: StabilizerCallback, strategy: str = "single", before: Any = None, **options: Any
) -> tuple[Any, Points]:
    rows: list[tuple[dict[str, float], int]] = []
    trainer: Any = make_trainer(
        strategy,
        folder,
        callbacks=[StabilizerTrainerCallback(list(callbacks), log=lambda values, step: rows.append((values, step)))],
        **options,
    )
    if before is not None:
        before(trainer)
    trainer.train()
    return trainer, {(tag, step): value for values, step in rows for tag, value in values.items()}


def _losses() -> LossMeanVarCallback:
    return LossMeanVarCallback(windows=(2,), every_n_steps=1, warmup_steps=0)


class _Stops(StabilizerCallback):
    def on_gradients(self, context: StepContext) -> None:
        if context.step == 2:
            raise KeyboardInterrupt


def test_an_exception_where_the_callback_was_added_later(tmp_path: Path) -> None:
    clip, rows = AdaptiveClipThreshold(), list[int]()
    trainer = make_trainer("single", tmp_path)
    callback = StabilizerTrainerCallback(
        [clip, GradNormCallback(), _Stops()], log=lambda values, step: rows.append(step)
    )
    trainer.add_callback(callback)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (clip.max_threshold, clip.driver, trainer.args.max_grad_norm) == (None, None, 1.0)
    assert not {"compute_loss", "_run_epoch", "_save_checkpoint", "save_model"} & vars(trainer).keys()
    assert {1, 2} <= set(rows)  # nothing of what was measured is lost


def test_resumed_from_a_path(tmp_path: Path) -> None:
    _run(tmp_path, GradNormCallback(), max_steps=2, save_strategy="steps", save_steps=2)
    norms = GradNormCallback()
    trainer = make_trainer("single", tmp_path, callbacks=[StabilizerTrainerCallback([norms], log=print)], max_steps=4)
    trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-2")  # type: ignore[arg-type]
    assert norms.next_step() == 4


def test_the_arguments_of_a_checkpoint_have_the_limit(tmp_path: Path) -> None:
    trainer, _ = _run(tmp_path, GradNormCallback(), max_steps=2, save_strategy="steps", save_steps=2)
    saved = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert saved.max_grad_norm == trainer.args.max_grad_norm == 1.0


def test_a_limit_that_somebody_sets_during_the_run_stays(tmp_path: Path) -> None:
    class Sets(StabilizerCallback):
        def on_step_end(self, context: StepContext) -> None:
            self.driver._trainer.args.max_grad_norm = 0.25

    with pytest.warns(StabilizerWarning, match="two clips act"):
        trainer, _ = _run(tmp_path, Sets())
    assert trainer.args.max_grad_norm == 0.25


class _Masked(Rows):
    """Rows of which some have no label at all, as prompts that fill a row have."""

    def __init__(self, *masked: int) -> None:
        super().__init__(64)
        self.masked = masked

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if index in self.masked:
            sample["labels"][:] = -100
        return sample


def _masked_loss(rank: int, world_size: int, strategy: str, folder: str) -> bool:
    accumulation = 2 if strategy == "single" else 1
    trainer, points = _run(
        folder,
        _losses(),
        strategy=strategy,
        dataset=_Masked(2, 3),
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        max_grad_norm=0.0,
    )
    if rank:
        return True
    shown = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    assert points["loss/nonfinite", 1] == 0
    assert points["loss/mean_2", 2] == pytest.approx((shown[1] + shown[2]) / 2, rel=1e-5)
    return True


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_micro_batch_without_labels_is_no_nan(tmp_path: Path, strategy: str) -> None:
    if strategy == "single":
        assert _masked_loss(0, 1, strategy, str(tmp_path))
    else:
        assert run_distributed(_masked_loss, strategy, str(tmp_path), world_size=2) == [True, True]


class _Corrupted(Rows):
    """Labels that are no copy of the inputs: one of each row is another token."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["labels"] = self.ids[index].clone()
        sample["labels"][6] = (sample["labels"][6] + 1) % 60
        sample["labels"][: index % 3] = -100
        return sample


def test_losses_are_those_that_the_trainer_logs_whatever_the_labels(tmp_path: Path) -> None:
    trainer, points = _run(
        tmp_path, _losses(), dataset=_Corrupted(64), gradient_accumulation_steps=2, max_grad_norm=0.0
    )
    shown = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    for step in (2, 3):
        assert points["loss/mean_2", step] == pytest.approx((shown[step - 1] + shown[step]) / 2, rel=1e-5)


def test_a_training_step_that_changes_the_loss(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs, False, num_items_in_batch)
            loss = loss * 1.0
            self.accelerator.backward(loss)
            return loss.detach()

    localizer = GradLocCallback(warmup_steps=1)
    localizer.rule = {"name": "fixed", "threshold": 1e-3}
    _, points = _run(
        tmp_path,
        _losses(),
        localizer,
        kind=Own,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
    )
    expected = reference(num_steps=3, accumulation=2, num_ranks=1)
    mean = (expected[1]["loss"] + expected[2]["loss"]) / 2
    assert points["loss/mean_2", 3] == pytest.approx(mean, rel=1e-5)
    assert localizer.incidents
    assert all(incident.reproducible for incident in localizer.incidents), [i.error for i in localizer.incidents]


def test_a_loss_without_a_gradient_is_no_micro_batch(tmp_path: Path) -> None:
    class Looks(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            with torch.no_grad():
                self.compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)
            return super().training_step(model, inputs, num_items_in_batch)

    found = list[int]()

    class Counts(StabilizerCallback):
        localizes = True  # batches are kept

        def on_gradients(self, context: StepContext) -> None:
            found.append(len(self.driver._suites.replays.recorder.micro_batches))

    _run(tmp_path, Counts(), kind=Looks, gradient_accumulation_steps=2)
    assert found == [2, 2, 2]


def test_a_disk_that_is_full_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Asks(StabilizerCallback):
        def on_step_end(self, context: StepContext) -> None:
            if context.step == 0:
                context.defer(lambda: self.driver.save_checkpoint("spike"))

    (tmp_path / "alarms").write_text("no folder")
    with caplog.at_level(logging.ERROR, "stabilizer"):
        trainer, _ = _run(tmp_path, Asks())
    assert trainer.state.global_step == 3
    assert any("no checkpoint is saved in" in record.getMessage() for record in caplog.records)


def test_each_run_of_a_search_has_the_states_in_its_own_checkpoint(tmp_path: Path) -> None:
    for number in range(2):
        norms = GradNormCallback(name=f"run{number}")

        def own_folder(trainer: Any, number: int = number) -> None:
            trainer._get_output_dir = lambda trial: os.path.join(tmp_path, f"run-{number}")

        _run(tmp_path, norms, before=own_folder, max_steps=2, save_strategy="steps", save_steps=2)
        text = (tmp_path / f"run-{number}" / "checkpoint-2" / "stabilizer.json").read_text()
        assert f"GradNormCallback[run{number}]" in text


def test_sizes_of_parts_where_a_loss_is_the_trainer_s_own(tmp_path: Path) -> None:
    """Labels that the loss takes out of the batch count all the same: a sample has about ten tokens."""
    traces = []
    for unit in ("samples", "tokens"):
        noise = GradNoiseScaleCallback(every_n_steps=1, min_samples=2, batch_unit=unit)  # type: ignore[arg-type]
        options = {"label_smoothing_factor": 0.1, "max_steps": 4, "max_grad_norm": 0.0}
        _, points = _run(tmp_path, noise, gradient_accumulation_steps=2, **options)
        traces.append(points["gns/trace", 1])
    assert 7 < traces[1] / traces[0] < 12
