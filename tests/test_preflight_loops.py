"""What Accelerate and plain loops tell preflight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stabilizer.callbacks import GradNormCallback
from stabilizer.callbacks.accelerate_setting import accelerate_setting
from tests.accelerate_loops import make_accelerator
from tests.launcher import run_distributed
from tests.models import make_mlp
from tests.preflight_settings import rows_of


def _accelerated(**options: Any) -> tuple[Any, list[Any]]:
    accelerator = make_accelerator(**options)
    model = make_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    return accelerator, list(accelerator.prepare(model, optimizer, scheduler))


@pytest.fixture
def _fresh_accelerate() -> Any:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_fresh_accelerate")
def test_an_accelerator_is_asked() -> None:
    accelerator, (model, optimizer, scheduler) = _accelerated(mixed_precision="bf16")
    setting = accelerate_setting(accelerator, model, [optimizer], [GradNormCallback()], num_steps=100)
    assert setting.host == "Accelerate"
    assert setting.clipping.startswith("your loop, if it calls accelerator.clip_grad_norm_")
    assert setting.precision == "mixed_precision=bf16"
    assert type(setting.optimizers[0]) is torch.optim.AdamW
    assert setting.schedulers == [(scheduler.scheduler, 1.0)]
    rows = rows_of(setting)
    assert rows["learning rate"].value == "LinearLR: warm-up 10.0 % of 100 steps, peak 0.001, does not decay"
    assert not rows["gradient clipping"].advice
    assert "unknown to the model" not in rows
    unplanned = accelerate_setting(accelerator, model, [optimizer], [])
    assert rows_of(unplanned)["learning rate"].value.endswith("pass num_steps=")


@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_prepared_scheduler_that_the_loop_moves() -> None:
    accelerator, (model, optimizer, _) = _accelerated(step_scheduler_with_optimizer=False)
    setting = accelerate_setting(accelerator, model, [optimizer], [], num_steps=100)
    assert "up to the training loop" in rows_of(setting)["learning rate"].value


def _accelerate_rates(rank: int, world_size: int, split_batches: bool) -> tuple[str, int, str]:
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    options = DataLoaderConfiguration(split_batches=split_batches)
    accelerator, (model, optimizer, scheduler) = _accelerated(dataloader_config=options)
    setting = accelerate_setting(accelerator, model, [optimizer], [], num_steps=40)
    rows = rows_of(setting)
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    warm = next(step for step, rate in enumerate(rates) if rate >= max(rates) * (1 - 1e-6))
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return rows["learning rate"].value, warm, rows["gradient reduction"].value


@pytest.mark.parametrize(("split_batches", "num_warm"), [(False, 5), (True, 10)])
def test_accelerate_moves_a_scheduler_once_a_process(split_batches: bool, num_warm: int) -> None:
    for value, warm, reduction in run_distributed(_accelerate_rates, split_batches):
        assert warm == num_warm
        assert value.startswith(f"LinearLR: warm-up {100 * num_warm / 40:.1f} % of 40 steps")
        assert reduction == "DDP: float32"


def test_a_plain_loop() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    setting = accelerate_setting(None, model, [optimizer], [GradNormCallback()])
    assert setting.host == "plain loop"
    assert setting.clipping.startswith("your loop, if it calls torch.nn.utils.clip_grad_norm_")
    assert rows_of(setting)["learning rate"].value == "constant: 0.1, no scheduler"
    scheduler = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    told = accelerate_setting(None, model, [optimizer], [], num_steps=40, schedulers=[scheduler])
    assert rows_of(told)["learning rate"].value.startswith("LinearLR: warm-up 10.0 % of 40 steps")
