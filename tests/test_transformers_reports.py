"""Metrics go to what `report_to` names, under the trainer's own step; a hidden NaN is told as what it is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from stabilizer import tags
from stabilizer.callbacks import (
    GradNormCallback,
    LossMeanVarCallback,
    StabilizerTrainerCallback,
    recommended,
)
from stabilizer.errors import StabilizerWarning
from tests.trainer_runs import make_llama, make_trainer


class _Reporter(TrainerCallback):
    """A reporter of transformers that keeps what it is given."""

    rows: list[tuple[int, dict[str, float]]]

    def __init__(self) -> None:
        self.rows = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append((state.global_step, dict(logs)))


def _points(rows: list[tuple[int, dict[str, float]]]) -> dict[tuple[str, int], float]:
    return {(tag, step): value for step, values in rows for tag, value in values.items()}


def _scalars(file: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    return {(tag, one.step): one.value for tag in events.Tags()["scalars"] for one in events.Scalars(tag)}


def test_every_reporter_gets_every_value_under_the_trainer_s_step(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "recorder", _Reporter)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    norms = GradNormCallback(layer_every_n_steps=2, heatmap_every_n_steps=None)
    losses = LossMeanVarCallback(windows=(2,), every_n_steps=1, warmup_steps=0)
    own: list[tuple[int, dict[str, float]]] = []
    trainer = make_trainer(
        "single",
        tmp_path,
        callbacks=[StabilizerTrainerCallback([norms, losses], log=lambda values, step: own.append((step, values)))],
        report_to=["tensorboard", "recorder"],
        max_steps=5,
    )
    trainer.train()
    (reporter,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, _Reporter))
    expected = _points(own)
    totals = norms.norm_history().totals.tolist()
    assert [expected["grad_norm/total", step] for step in range(1, 6)] == pytest.approx(totals)
    assert ("grad_norm/layer/model.layers.0", 3) in expected
    assert ("grad_norm/layer/model.layers.0", 2) not in expected
    theirs = {key: value for key, value in _points(reporter.rows).items() if key in expected}
    assert theirs == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    # One file: nothing came after the writer was closed.
    (file,) = (tmp_path / "runs").rglob("events*")
    scalars = _scalars(file)
    assert {key: scalars[key] for key in expected} == pytest.approx(expected, rel=1e-6, nan_ok=True)
    # The trainer's own values are where they were.
    assert {("train/loss", 5), ("train/grad_norm", 5)} <= set(scalars)


def test_without_a_reporter_it_is_told_once(tmp_path: Path) -> None:
    trainer = make_trainer("single", tmp_path, callbacks=[StabilizerTrainerCallback([GradNormCallback()])])
    with pytest.warns(StabilizerWarning, match="report_to names no reporter") as caught:
        trainer.train()
    assert sum("report_to" in str(one.message) for one in caught) == 1


class _Bad(nn.Module):
    """Gives NaN in one block at one forward."""

    def __init__(self, inner: nn.Module, at: int) -> None:
        super().__init__()
        self.inner, self.at, self.num = inner, at, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num += self.training
        output = self.inner(*args, **kwargs)
        return output * torch.nan if self.num == self.at else output


def test_a_loss_that_the_filter_hides_is_reported_with_its_step_and_its_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_llama()
    model.model.layers[1].mlp = _Bad(model.model.layers[1].mlp, at=3)
    own: list[tuple[int, dict[str, float]]] = []
    suite = [*recommended(), LossMeanVarCallback(every_n_steps=1, name="each")]
    trainer = make_trainer(
        "single",
        tmp_path,
        model=model,
        callbacks=[StabilizerTrainerCallback(suite, log=lambda values, step: own.append((step, values)))],
        max_steps=5,
    )
    with caplog.at_level(logging.WARNING, "stabilizer"), pytest.warns(StabilizerWarning) as caught:
        trainer.train()
    # transformers shows an average of other losses, as if nothing had happened.
    shown = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(value == value for value in shown)
    assert _points(own)["each/" + tags.LOSS_NONFINITE, 3] == 1
    assert _points(own)[tags.SKIP_COUNT, 3] == 1
    said = [str(one.message) for one in caught] + [record.getMessage() for record in caplog.records]
    assert any("step 2" in message and "model.layers.1" in message for message in said), said
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stabilizer.yaml"
    path.write_text("grad_norm: {every_n_steps: 2}\nloss_mean_var: true\n")
    callback = StabilizerTrainerCallback.from_yaml(path, log=lambda *_: None)
    assert [type(one).__name__ for one in callback.callbacks] == ["GradNormCallback", "LossMeanVarCallback"]
    make_trainer("single", tmp_path, callbacks=[callback]).train()
    path.write_text("grad_nom: true\n")
    with pytest.raises(ValueError, match="grad_norm"):
        StabilizerTrainerCallback.from_yaml(path)


def test_what_is_no_callback_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a list of StabilizerCallback"):
        StabilizerTrainerCallback([TrainerCallback()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"callbacks=\[StabilizerTrainerCallback\(\[GradNormCallback\(\.\.\.\)\]\)\]"):
        make_trainer("single", tmp_path, callbacks=[GradNormCallback()])
    late = make_trainer("single", tmp_path)
    late.add_callback(GradNormCallback())
    with pytest.raises(ValueError, match="StabilizerTrainerCallback"):
        late.train()
    with pytest.warns(StabilizerWarning, match="nothing to do"):
        callback = StabilizerTrainerCallback([])
    trainer = make_trainer("single", tmp_path, callbacks=[callback])
    trainer.train()
    assert trainer.args.max_grad_norm == 1.0


def test_turned_off_by_the_environment(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("STABILIZER_DISABLE", "1")
    norms = GradNormCallback()
    trainer = make_trainer("single", tmp_path, callbacks=[StabilizerTrainerCallback([norms])])
    with pytest.warns(StabilizerWarning, match="STABILIZER_DISABLE"):
        trainer.train()
    assert norms.next_step() == 0


def test_a_callback_that_no_trainer_has(tmp_path: Path) -> None:
    callback = StabilizerTrainerCallback([GradNormCallback()])
    trainer = make_trainer("single", tmp_path)
    with pytest.raises(ValueError, match=r"Trainer\(callbacks=\[\.\.\.\]\)"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_the_trainer_s_own(tmp_path: Path, accumulation: int) -> None:
    """Of a loss that knows nothing of the step's tokens, too."""
    own: list[tuple[int, dict[str, float]]] = []
    losses = LossMeanVarCallback(windows=(2,), every_n_steps=1, warmup_steps=0, weight="samples")

    def plain(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss / accumulation

    for kwargs in ({}, {"compute_loss_func": plain}):
        own.clear()
        trainer = make_trainer(
            "single",
            tmp_path,
            callbacks=[StabilizerTrainerCallback([losses], log=lambda values, step: own.append((step, values)))],
            gradient_accumulation_steps=accumulation,
            kwargs=dict(kwargs),
        )
        if not kwargs:
            trainer.model_accepts_loss_kwargs = False  # each loss is a mean, which the trainer divides
        trainer.train()
        shown = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        for step in (2, 3):
            mean = (shown[step - 1] + shown[step]) / 2
            assert _points(own)["loss/mean_2", step] == pytest.approx(mean, rel=1e-5)
