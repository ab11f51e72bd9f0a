"""Ways of using Lightning that people find by accident, and faults that must stay small."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import GradNormCallback, StabilizerCallback, StepContext
from stabilizer.errors import StabilizerWarning
from stabilizer.view import LayerView
from tests.event_files import Run, read_run
from tests.lightning_models import make_module, make_trainer
from tests.lightning_variants import Manual, Plain, TwoOptimizers
from tests.models import loss_of, make_transformer


def _fit(module: Any, folder: Path, *, max_steps: int = 4, **options: Any) -> Run:
    from lightning.pytorch.loggers import TensorBoardLogger

    options.setdefault("callbacks", [GradNormCallback(layer_every_n_steps=1, heatmap_every_n_steps=None)])
    make_trainer(max_steps=max_steps, logger=TensorBoardLogger(folder, name="", version="run"), **options).fit(module)
    return read_run(folder / "run")


def _gradients(module: Any) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


class Clips(Plain):
    """Does what it is told where Lightning clips, and notes what the optimizer gets."""

    def __init__(self, clip: Any, *, before: Any = None) -> None:
        super().__init__(optimizer=self._make)
        self.clip, self.before = clip, before
        self.received: list[float] = []

    def _make(self, parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        note = lambda *_: self.received.append(torch.nn.utils.get_total_norm(_gradients(self)).item())  # noqa: E731
        optimizer.register_step_post_hook(note)
        return optimizer

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip(self, optimizer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.before is not None:
            self.before(self)


def _twice(module: Any, optimizer: Any) -> None:
    module.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    module.clip_gradients(optimizer, gradient_clip_val=10.0, gradient_clip_algorithm="norm")


def _by_norm(module: Any, optimizer: Any) -> None:
    module.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def _halve_the_head(module: Any) -> None:
    module.model.lm_head.weight.grad.mul_(0.5)


@pytest.mark.parametrize(("clip", "before"), [(_twice, None), (_by_norm, None), (_by_norm, _halve_the_head)])
def test_after_is_what_the_optimizer_gets_whoever_changes_gradients(clip: Any, before: Any, tmp_path: Path) -> None:
    module = Clips(clip, before=before)
    run = _fit(module, tmp_path)
    assert list(run.scalars["grad_norm/total_after"].values()) == pytest.approx(module.received, rel=1e-5)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_manual_clip_of_scaled_gradients(algorithm: str, tmp_path: Path) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    module = Manual(clip=1.0, algorithm=algorithm)
    received: list[float] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        note = lambda *_: received.append(torch.nn.utils.get_total_norm(_gradients(module)).item())  # noqa: E731
        optimizer.register_step_post_hook(note)
        return optimizer

    module.make_optimizer = make
    run = _fit(module, tmp_path, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    assert list(run.scalars["grad_norm/total_after"].values()) == pytest.approx(received, rel=1e-3)
    assert run.scalars["grad_norm/total"][0] > 10 * received[0]


class OwnOptimizer(Plain):
    """Clips and steps an optimizer that Lightning does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num_moves = 0

    def training_step(self, batch: Any, batch_index: int) -> None:
        own = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.manual_backward(loss_of(self.model, batch))
        self.clip_gradients(own, 1.0, "norm")
        own.step()
        self.num_moves += 1
        self.optimizers().step()


def test_an_optimizer_that_lightning_does_not_know_is_said_and_trains(tmp_path: Path) -> None:
    module = OwnOptimizer()
    with pytest.warns(StabilizerWarning, match="configure_optimizers did not return") as caught:
        _fit(module, tmp_path)
    assert module.num_moves == 4
    assert sum(isinstance(warning.message, StabilizerWarning) for warning in caught) == 1


def test_an_optimizer_whose_parameters_are_frozen_for_now(tmp_path: Path) -> None:
    class Frozen(TwoOptimizers):
        def training_step(self, batch: Any, batch_index: int) -> None:
            first, second = self.optimizers()
            for parameter in self.parts()[1]:
                parameter.requires_grad_(batch_index >= 2)
            self.manual_backward(loss_of(self.model, batch))
            first.step()
            second.step()

    with pytest.warns(StabilizerWarning, match=r"optimizer 1 \(SGD\) has no parameter that requires a gradient"):
        run = _fit(Frozen(), tmp_path, max_steps=8)
    assert list(run.scalars["opt1/grad_norm/total"]) == [2, 3]
    assert list(run.scalars["grad_norm/total"]) == [0, 1, 2, 3]


class Save(pl.Callback):
    """Saves before ours hears of the end of the batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)


def test_a_checkpoint_saved_before_our_hook_has_the_step(tmp_path: Path) -> None:
    callbacks = [Save(tmp_path / "a.ckpt"), GradNormCallback()]
    make_trainer(callbacks=callbacks, max_steps=4).fit(make_module("transformer"))
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["global_step"] == saved["callbacks"]["GradNormCallback"]["steps"]["0"] == 3
    assert saved["callbacks"]["GradNormCallback"]["extra"]["history"]["0"]["steps"] == [0, 1, 2]


def test_a_clip_of_every_micro_batch_is_no_step(tmp_path: Path) -> None:
    class Accumulates(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_index: int) -> None:
            self.manual_backward(loss_of(self.model, batch) / 2)
            self.clip_gradients(self.optimizers(), 100.0, "norm")
            if batch_index % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    run = _fit(Accumulates(), tmp_path, max_steps=3)
    assert list(run.scalars["grad_norm/total"]) == [0, 1, 2]


def test_an_exception_before_the_optimizer_moves_counts_no_step() -> None:
    class Breaks(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 2:
                raise RuntimeError("stop here")

    callback = GradNormCallback()
    with pytest.raises(RuntimeError, match="stop here"):
        make_trainer(callbacks=[callback, Breaks()], max_steps=5).fit(make_module("transformer"))
    assert callback.next_step() == 2


class LateFault(StabilizerCallback):
    """What it asked for arrives, and it cannot take it."""

    def on_gradients(self, context: StepContext) -> None:
        context.later(context.store.norms, lambda step, values: 1 / 0)

    def charts(self) -> dict[str, list[str]]:
        raise KeyError("charts")


def test_a_late_fault_is_that_callback_s_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = _fit(make_module("transformer"), tmp_path, max_steps=6, callbacks=[LateFault(), GradNormCallback()])
    assert list(run.scalars["grad_norm/total"]) == list(range(6))
    messages = [record.getMessage() for record in caplog.records if record.name == "stabilizer"]
    assert len(messages) == 2, "one for the charts, one for the values"
    assert "LateFault.later failed" in messages[1]


@pytest.mark.parametrize("strict", [False, True])
def test_measuring_that_fails_in_one_process(
    strict: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("cannot measure")

    monkeypatch.setattr("stabilizer.measurement.norms", broken)
    trainer = make_trainer(callbacks=[GradNormCallback(strict=strict)], max_steps=20)
    if strict:
        with pytest.raises(RuntimeError, match="cannot measure"):
            trainer.fit(make_module("transformer"))
        return
    trainer.fit(make_module("transformer"))
    errors = [record for record in caplog.records if record.name == "stabilizer" and record.levelno >= logging.ERROR]
    assert len(errors) == 1


def test_a_callback_that_failed_stays_off(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    class Fails(StabilizerCallback):
        def on_gradients(self, context: StepContext) -> None:
            seen.append(context.optimizer_index)
            raise RuntimeError("no")

    callback = Fails()
    for _ in range(2):
        make_trainer(callbacks=[callback], max_steps=4).fit(TwoOptimizers())
    assert seen == [0]


def test_layers_that_are_frozen_for_now_may_be_asked_for(tmp_path: Path) -> None:
    model = make_transformer()
    model.layers.requires_grad_(False)
    callback = GradNormCallback(layers=[0, "model.norm"], layer_every_n_steps=1)
    run = _fit(Plain(model), tmp_path, callbacks=[callback])
    assert {tag for tag in run.scalars if "layer/" in tag} == {"grad_norm/layer/model.norm"}


def test_another_trainer_with_the_same_callback_is_not_ours() -> None:
    callback = GradNormCallback()
    other = make_trainer(callbacks=[callback], limit_val_batches=1)

    class Validates(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                other.validate(make_module("transformer"), verbose=False)

    trainer = make_trainer(callbacks=[callback, Validates()], max_steps=6)
    trainer.fit(make_module("transformer"))
    assert callback.norm_history().steps == list(range(6))
    assert "clip_gradients" not in vars(trainer.precision_plugin)


def test_optimizers_that_are_made_anew_are_followed(tmp_path: Path) -> None:
    received: list[float] = []

    class Replaces(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                pl_module.model.layers.requires_grad_(False)
                trainer.strategy.setup_optimizers(trainer)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            received.append(torch.nn.utils.get_total_norm(gradients).item())

    run = _fit(Plain(), tmp_path, callbacks=[GradNormCallback(), Replaces()])
    assert list(run.scalars["grad_norm/total"].values()) == pytest.approx(received, rel=1e-5)


def test_every_n_steps_of_a_monitor_is_kept() -> None:
    seen: list[int] = []

    class Monitor(StabilizerCallback):
        def on_gradients(self, context: StepContext) -> None:
            seen.append(context.step)

    make_trainer(callbacks=[Monitor(every_n_steps=3)], max_steps=8).fit(make_module("transformer"))
    assert seen == [0, 3, 6]


def test_history_invents_no_rows() -> None:
    view = LayerView(["a", "b"], 2, ring=8, device=torch.device("cpu"))
    view.restore([4, 5, 6, 7], torch.arange(12.0).view(4, 3), ["a", "b"])
    view.restore([20, 21], torch.full((2, 3), 9.0), ["b", "gone"])
    steps, rows = view.past()
    assert steps == [6, 7, 20, 21]
    assert rows[:2].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert rows[2:, 0].isnan().all(), "a layer that was not there was not measured"
    assert rows[2:, 1:].tolist() == [[9, 9], [9, 9]]
    assert view.past(3)[0] == [7, 20, 21]
