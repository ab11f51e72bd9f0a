"""Field reports, area logging-tb: when points are written, and in whose name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stabilizer.callbacks import GradNormCallback
from tests.event_files import read_run
from tests.field_reports.helpers import TOLERANCE, covers, fit, norm_logger, reference_run, total_norm_of, train
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, make_module, make_trainer
from tests.lightning_variants import Manual, Plain


def test_B091_norms_are_those_at_the_step_whatever_validation_does(tmp_path: Path) -> None:
    received: list[float] = []

    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: received.append(total_norm_of(optimizer)))
        return optimizer

    class Clears(Plain):
        num_validations = 0

        def validation_step(self, batch: Any, batch_index: int) -> None:
            self.zero_grad()
            Clears.num_validations += 1

        val_dataloader = Plain.train_dataloader

    options: dict[str, Any] = {"val_check_interval": 3, "limit_val_batches": 2, "num_sanity_val_steps": 2}
    fit(Clears(optimizer=hooked), tmp_path, callbacks=[norm_logger()], max_steps=9, **options)
    assert Clears.num_validations == 2 + 3 * 2
    scalars = read_run(tmp_path / "run").scalars
    assert scalars["grad_norm/total"] == pytest.approx(dict(enumerate(received)), rel=TOLERANCE)
    assert len(received) == 9
    layers = [points for tag, points in scalars.items() if "grad_norm/layer/" in tag]
    assert layers
    assert all(list(points) == list(range(9)) and min(points.values()) > 0 for points in layers)


def fit_by_hand(rank: int, world_size: int, folder: str, strategy: str) -> None:
    options = {"max_steps": 4, "log_every_n_steps": 50}
    callbacks = [norm_logger(every_n_steps=2, strict=True)]
    fit(Manual(), folder, strategy=strategy, devices=world_size, callbacks=callbacks, **options)


@covers("single")
@covers("ddp")
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_B112_every_due_point_is_written_in_automatic_optimization(strategy: str, package: str, tmp_path: Path) -> None:
    world_size = 2 if strategy == "ddp" else 1
    options = {"callback_options": {"every_n_steps": 2, "strict": True}, "max_steps": 4, "log_every_n_steps": 50}
    run_distributed(train, str(tmp_path), strategy, package=package, world_size=world_size, **options)
    scalars = read_run(tmp_path / "run").scalars
    expected = reference_run(num_steps=4, num_ranks=world_size)
    assert scalars["grad_norm/total"] == pytest.approx({n: expected.totals[n] for n in (0, 2)}, rel=TOLERANCE)
    for layer, series in expected.series().items():
        assert scalars[f"grad_norm/layer/{layer}"] == pytest.approx(dict(enumerate(series)), rel=TOLERANCE)


@covers("single")
@covers("ddp")
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_B112_every_due_point_is_written_in_manual_optimization(strategy: str, tmp_path: Path) -> None:
    world_size = 2 if strategy == "ddp" else 1
    run_distributed(fit_by_hand, str(tmp_path), strategy, world_size=world_size)
    scalars = read_run(tmp_path / "run").scalars
    expected = reference_run("transformer", num_steps=4, num_ranks=world_size)
    assert scalars["grad_norm/total"] == pytest.approx({n: expected.totals[n] for n in (0, 2)}, rel=TOLERANCE)
    for layer, series in expected.series().items():
        assert scalars[f"grad_norm/layer/{layer}"] == pytest.approx(dict(enumerate(series)), rel=TOLERANCE)


def test_B128_names_keep_two_callbacks_apart(tmp_path: Path) -> None:
    largest = norm_logger(name="largest", norm_type="inf")
    callbacks = [norm_logger(), largest, norm_logger(name="parts", granularity="module")]
    fit(make_module("mlp"), tmp_path, callbacks=callbacks)
    scalars = read_run(tmp_path / "run").scalars
    expected, in_infinity = reference_run(), reference_run(norm_type=float("inf"))
    for prefix, wanted in (("", expected), ("parts/", expected), ("largest/", in_infinity)):
        assert list(scalars[f"{prefix}grad_norm/total"].values()) == pytest.approx(wanted.totals, rel=TOLERANCE)
    assert read_run(tmp_path / "run").layouts == 1


def test_B128_the_same_name_twice_is_refused_before_the_run() -> None:
    with pytest.raises(RuntimeError, match="Found more than one stateful callback of type `GradNormCallback`"):
        make_trainer(callbacks=[GradNormCallback(), GradNormCallback(every_n_steps=5)])
    make_trainer(callbacks=[GradNormCallback(), GradNormCallback(name="second")])


def test_B128_two_models_of_one_process_write_into_their_own_charts(tmp_path: Path) -> None:
    for name in ("student", "teacher"):
        fit(make_module("mlp", length=9 if name == "student" else 96), tmp_path, callbacks=[norm_logger(name=name)])
    scalars = read_run(tmp_path / "run").scalars
    for name in ("student", "teacher"):
        assert list(scalars[f"{name}/grad_norm/total"].values()) == pytest.approx(reference_run().totals, rel=TOLERANCE)
