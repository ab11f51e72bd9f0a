"""What real Trainers of both packages tell preflight."""

from __future__ import annotations

import contextlib
import importlib
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import lr_scheduler

from stabilizer.callbacks import GradNormCallback
from stabilizer.callbacks.lightning_setting import lightning_setting
from stabilizer.callbacks.preflight import Fact, Setting, preflight
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, make_loader, make_module, make_trainer
from tests.lightning_variants import Manual, Plain, TwoOptimizers
from tests.models import make_mlp, make_transformer
from tests.preflight_settings import rows_of

BATCHES = 32  # of 3 samples, 96 in all


class Look:
    """What a callback sees at a hook, for both packages."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.setting: Setting | None = None
        self.has_loader = False

    def callback(self, package: str = PACKAGES[0]) -> Any:
        def look(callback: Any, trainer: Any, module: Any) -> None:
            self.has_loader = trainer.train_dataloader is not None
            self.setting = lightning_setting(trainer, [GradNormCallback()])
            assert (trainer.train_dataloader is not None) == self.has_loader

        base = importlib.import_module(package).Callback
        return type("LookCallback", (base,), {self.hook: look, "__module__": __name__})()


def _seen(
    module: Any, *, hook: str = "on_train_start", package: str = PACKAGES[0], max_steps: int = 2, **options: Any
) -> Setting:
    look = Look(hook)
    trainer = make_trainer(package=package, callbacks=[look.callback(package)], max_steps=max_steps, **options)
    trainer.fit(module)
    assert look.setting is not None
    assert look.has_loader == (hook == "on_train_start")
    return look.setting


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("options", "clipping"),
    [
        ({}, ""),
        ({"gradient_clip_val": 0}, ""),
        ({"gradient_clip_val": 1.0}, "the Trainer, by total norm at 1.0, after the callbacks have measured"),
        (
            {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
            "the Trainer, by value at 0.5, after the callbacks have measured",
        ),
        (
            {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"},
            "the Trainer, by total norm at 0.5, after the callbacks have measured",
        ),
    ],
)
def test_what_a_trainer_clips(package: str, options: dict[str, Any], clipping: str) -> None:
    setting = _seen(make_module("mlp", package=package), package=package, **options)
    assert setting.clipping == clipping
    assert setting.host == "Lightning"
    assert setting.precision == "32-true"
    assert setting.num_steps == 2
    assert isinstance(setting.optimizers[0], torch.optim.SGD)
    is_marked = not clipping or "value" in clipping
    assert bool(rows_of(setting)["gradient clipping"].advice) == is_marked


class OwnClip(Plain):
    """Clips as it likes."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="norm")


def test_a_module_that_clips_in_its_own_way() -> None:
    assert _seen(OwnClip()).clipping == "OwnClip.configure_gradient_clipping, in its own way"
    given = _seen(OwnClip(), gradient_clip_val=2.0).clipping
    assert given.endswith("(it is given gradient_clip_val=2.0, by total norm)")


def test_manual_optimization() -> None:
    setting = _seen(Manual(clip=0.5))
    assert setting.clipping.startswith("Manual.training_step, if it calls clip_gradients")
    assert setting.num_steps == 2
    assert not rows_of(setting)["gradient clipping"].advice
    # Lightning counts the steps of both, and how they share them is the module's business.
    assert _seen(TwoOptimizers(), max_steps=4).num_steps is None
    assert _seen(Manual(steps_per_batch=2), max_steps=-1, max_epochs=1).num_steps is None


@pytest.mark.parametrize(
    ("options", "at_start", "before_data"),
    [
        ({"max_steps": 5}, 5, 5),
        ({"max_steps": -1, "max_epochs": 2}, 2 * BATCHES, None),
        ({"max_steps": -1, "max_epochs": 2, "accumulate_grad_batches": 5}, 2 * 7, None),
        ({"max_steps": 3, "max_epochs": 9}, 3, None),
        ({"max_steps": -1, "max_epochs": 1, "limit_train_batches": 4}, 4, None),
    ],
)
def test_how_many_steps_are_planned(options: dict[str, Any], at_start: int, before_data: int | None) -> None:
    assert _seen(make_module("mlp"), **options).num_steps == at_start
    assert _seen(make_module("mlp"), hook="on_fit_start", **options).num_steps == before_data


def test_a_run_without_an_end() -> None:
    class Ending(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = True

    look = Look("on_train_start")
    trainer = make_trainer(callbacks=[look.callback(), Ending()], max_steps=-1, max_epochs=-1)
    trainer.fit(make_module("mlp"))
    assert look.setting is not None
    assert look.setting.num_steps is None


class Scheduled(Plain):
    """With a scheduler that Lightning moves, and a record of the rates."""

    def __init__(self, rule: Any, **config: Any) -> None:
        super().__init__(make_mlp())
        self.rule, self.config = rule, config
        self.make_loss = lambda module, batch, number: module.model(batch[0]).square().mean()
        self.rates: list[float] = []

    def train_dataloader(self) -> Any:
        return make_loader("mlp", length=96)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda o, args, kwargs: self.rates.append(o.param_groups[0]["lr"]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.rule(optimizer), **self.config}}


def _rise(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 4))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"interval": "step"}, {"max_epochs": 1}),
        ({"interval": "step", "frequency": 4}, {"max_epochs": 1}),
        ({"interval": "step", "frequency": 2}, {"max_epochs": 1, "accumulate_grad_batches": 2}),
        ({"interval": "step", "frequency": 6}, {"max_epochs": 1, "accumulate_grad_batches": 4}),
        ({"interval": "epoch"}, {"max_epochs": 6, "limit_train_batches": 4}),
        ({"interval": "epoch", "frequency": 2}, {"max_epochs": 9, "limit_train_batches": 5}),
        ({"interval": "epoch"}, {"max_epochs": 6, "limit_train_batches": 4, "accumulate_grad_batches": 3}),
    ],
)
def test_the_table_tells_the_rates_that_the_run_then_has(config: dict[str, Any], options: dict[str, Any]) -> None:
    module = Scheduled(_rise, **config)
    setting = _seen(module, max_steps=-1, **options)
    assert setting.num_steps == len(module.rates)
    warm = next((step for step, rate in enumerate(module.rates) if rate >= max(module.rates)), 0)
    expected = f"LambdaLR: warm-up {100 * warm / len(module.rates):.1f} % of {len(module.rates)} steps, peak "
    assert warm > 0
    assert rows_of(setting)["learning rate"].value.startswith(f"{expected}{max(module.rates):.3g}")


class OwnStep(Scheduled):
    """Moves its scheduler itself."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


def test_schedulers_that_nobody_can_foresee() -> None:
    assert "up to the training loop" in rows_of(_seen(OwnStep(_rise, interval="step")))["learning rate"].value
    module = Scheduled(lr_scheduler.ReduceLROnPlateau, monitor="loss", interval="epoch", strict=False)
    assert "ReduceLROnPlateau, not known" in rows_of(_seen(module, max_epochs=1))["learning rate"].value


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision(precision: str) -> None:
    if precision == "64-true":
        setting = _seen(Plain(), precision=precision)
    else:
        setting = _seen(make_module("transformer"), precision=precision)
    assert setting.precision == precision
    dtype = {"bf16-mixed": "float32", "bf16-true": "bfloat16", "64-true": "float64"}[precision]
    assert rows_of(setting)["precision"].value == f"{precision}; trainable parameters are {dtype}"


def test_a_scaler_is_told() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    assert _seen(make_module("mlp"), plugins=plugin).precision == "16-mixed, loss scaled"


class Compressed(pl.strategies.DDPStrategy):
    """Reduces in 16 bits; with `ddp_comm_hook=` Lightning does so on a GPU only."""

    def _register_ddp_hooks(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        self.model.register_comm_hook(None, fp16_compress_hook)


def _strategy_rows(rank: int, world_size: int, strategy: str) -> tuple[dict[str, Fact], str]:
    chosen = Compressed() if strategy == "compressed" else strategy
    output = io.StringIO()

    class Show(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.rows = rows_of(lightning_setting(trainer, callbacks))
            with contextlib.redirect_stdout(output):
                preflight(lambda: lightning_setting(trainer, callbacks))

    callbacks, shower = [GradNormCallback()], Show()
    clip = {} if strategy == "fsdp1" else {"gradient_clip_val": 1.0}
    trainer = make_trainer(chosen, devices=world_size, callbacks=[shower, *callbacks], max_steps=1, **clip)
    trainer.fit(make_module("transformer", optimizer="adamw"))
    return shower.rows, output.getvalue()


@pytest.mark.parametrize(
    ("strategy", "reduction"),
    [
        ("ddp", Fact("gradient reduction", "DDP: float32")),
        ("fsdp1", Fact("gradient reduction", "FSDP1: float32")),
        ("fsdp2", Fact("gradient reduction", "FSDP2: float32")),
        ("compressed", None),
    ],
)
def test_two_processes(strategy: str, reduction: Fact | None) -> None:
    (rows, output), (others, nothing) = run_distributed(_strategy_rows, strategy)
    if reduction is None:
        assert rows["gradient reduction"].value == "DDP: float16"
        assert "compressing hook" in rows["gradient reduction"].advice
    else:
        assert rows["gradient reduction"] == reduction
    assert rows == others  # all of it is the same on every rank
    assert "in no optimizer" not in rows
    assert "unknown to the model" not in rows
    num_parameters = sum(parameter.numel() for parameter in make_transformer().parameters())
    assert rows["parameters"].value == f"{num_parameters / 1000:.1f} k trainable, 0 frozen"
    assert "GradNormCallback" in output
    assert not nothing
