"""GradNormCallback in real Trainers: what reaches TensorBoard, under every strategy, equals a reference."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from stabilizer.callbacks import GradNormCallback
from stabilizer.errors import StabilizerWarning
from tests import reference
from tests.event_files import Run, read_run
from tests.launcher import run_distributed
from tests.lightning_models import expected_batches, make_module, make_trainer
from tests.models import make_transformer, reference_gradients
from tests.reference_run import reference_run

TOLERANCE = 1e-5
WORLD_SIZES = {"single": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "tp": 2, "sp": 2, "fsdp2_tp": 4}
DATA_RANKS = {"single": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "tp": 1, "sp": 1, "fsdp2_tp": 2}


def fit(
    rank: int,
    world_size: int,
    folder: str,
    *,
    strategy: str = "single",
    package: str = "lightning.pytorch",
    module_options: dict[str, Any] | None = None,
    callback_options: dict[str, Any] | None = None,
    trainer_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One fit with TensorBoard; the norms as the callback remembers them."""
    import importlib

    logger = importlib.import_module(f"{package}.loggers").TensorBoardLogger(folder, name="", version="run")
    callback = GradNormCallback(**{"layer_every_n_steps": 1, "heatmap_every_n_steps": None, **(callback_options or {})})
    trainer = make_trainer(
        strategy, devices=world_size, package=package, logger=logger, callbacks=[callback], **(trainer_options or {})
    )
    style = "sp" if strategy == "sp" else "tp"
    module = make_module("transformer", package=package, tensor_style=style, **(module_options or {}))
    trainer.fit(module)
    history = callback.norm_history()
    return {
        "steps": history.steps,
        "norms": dict(zip(history.layer_names, history.norms.T.tolist(), strict=True)),
        "totals": history.totals.tolist(),
        "progress": sorted(trainer.progress_bar_metrics),
    }


def _reference(
    num_steps: int, *, num_ranks: int, num_micro_batches: int = 1, **options: Any
) -> tuple[list[dict[str, float]], list[float]]:
    """Norms of a single-process float64 run of plain SGD."""
    steps = [
        expected_batches("transformer", step, num_ranks=num_ranks, num_micro_batches=num_micro_batches)
        for step in range(num_steps)
    ]
    layers, totals, _ = reference_run(steps, prefix="model.", **options)
    return layers, totals


def _check(result: dict[str, Any], run: Run, layers: list[dict[str, float]], totals: list[float]) -> None:
    assert result["steps"] == list(range(len(totals)))
    assert result["totals"] == pytest.approx(totals, rel=TOLERANCE)
    assert list(run.scalars["grad_norm/total"].values()) == pytest.approx(totals, rel=TOLERANCE)
    for layer in layers[0]:
        expected = [step[layer] for step in layers]
        assert result["norms"][layer] == pytest.approx(expected, rel=TOLERANCE)
        assert run.scalars[f"grad_norm/layer/{layer}"] == pytest.approx(dict(enumerate(expected)), rel=TOLERANCE)
    assert set(run.ours()) == {
        "grad_norm/total",
        "grad_norm/nonfinite",
        *(f"grad_norm/layer/{layer}" for layer in layers[0]),
    }


def _cases() -> list[Any]:
    return [
        pytest.param(
            strategy,
            package,
            marks=pytest.mark.covers(
                feature="gradient norms",
                strategy="tp_sp" if strategy == "sp" else strategy,
                host="lightning" if package == "lightning.pytorch" else package,
            ),
            id=f"{strategy}-{package}",
        )
        for strategy in WORLD_SIZES
        for package in ("lightning.pytorch", "pytorch_lightning")
        if package == "lightning.pytorch" or strategy in ("single", "ddp", "fsdp2")
    ]


@pytest.mark.norms
@pytest.mark.parametrize(("strategy", "package"), _cases())
def test_every_strategy_logs_the_reference_s_norms(strategy: str, package: str, tmp_path: Path) -> None:
    results = run_distributed(
        fit, str(tmp_path), strategy=strategy, package=package, world_size=WORLD_SIZES[strategy], timeout=100
    )
    layers, totals = _reference(3, num_ranks=DATA_RANKS[strategy])
    for result in results:
        assert result == results[0], "ranks disagree"
        _check(result, read_run(tmp_path / "run"), layers, totals)
        assert result["progress"] == [], "nothing of ours is on the progress bar unless asked for"


@pytest.mark.parametrize("accumulation", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_accumulation_with_a_short_last_window(strategy: str, accumulation: int, tmp_path: Path) -> None:
    ranks = DATA_RANKS[strategy]
    options = {"accumulate_grad_batches": accumulation, "max_steps": -1, "max_epochs": 1}
    # One micro-batch fewer than two whole windows.
    length = (2 * accumulation - 1) * 3 * ranks
    run_it = functools.partial(fit, strategy=strategy, trainer_options=options, module_options={"length": length})
    if strategy == "single":
        with pytest.warns(
            StabilizerWarning, match=f"step 1 .*{accumulation - 1} micro-batch.* divided by {accumulation}"
        ):
            result = run_it(0, 1, str(tmp_path))
    else:
        [result, *_] = run_distributed(run_it.func, str(tmp_path), **run_it.keywords, world_size=WORLD_SIZES[strategy])
    assert result["steps"] == [0, 1]
    _, totals = _reference(1, num_ranks=ranks, num_micro_batches=accumulation)
    assert result["totals"][0] == pytest.approx(totals[0], rel=TOLERANCE)
    run = read_run(tmp_path / "run")
    assert list(run.scalars["grad_norm/total"]) == [0, 1]


def test_all_defaults_of_a_trainer_and_of_the_callback(tmp_path: Path) -> None:
    """Progress bar, checkpoints, sanity check, validation, CSV logger: nothing is in the way, nothing of ours leaks."""
    import lightning.pytorch as pl

    callback = GradNormCallback()
    trainer = pl.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=2, limit_val_batches=2, callbacks=[callback]
    )
    with pytest.warns(UserWarning, match="does not have many workers|num_workers|tensorboard|log_every_n_steps|tip"):
        trainer.fit(make_module("transformer", length=12 * 3))
    assert callback.norm_history().steps == list(range(24))
    assert all(total > 0 for total in callback.norm_history().totals)
    assert trainer.progress_bar_metrics == {}


def test_no_logger_and_several_loggers(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    for loggers in (False, [CSVLogger(tmp_path), TensorBoardLogger(tmp_path, name="", version="run")]):
        trainer = make_trainer(logger=loggers, callbacks=[GradNormCallback(layer_every_n_steps=1)])
        trainer.fit(make_module("transformer"))
    run = read_run(tmp_path / "run")
    assert run.pictures == {"grad_norm/heatmap": [2]}
    assert run.layouts == 1
    [table] = tmp_path.glob("lightning_logs/version_*/metrics.csv")
    header, *rows = table.read_text().splitlines()
    assert "grad_norm/total" in header
    assert len(rows) == 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions_without_a_scaler(precision: str, tmp_path: Path) -> None:
    [result] = run_distributed(fit, str(tmp_path), trainer_options={"precision": precision}, world_size=1)
    _, totals = _reference(1, num_ranks=1)
    assert result["totals"][0] == pytest.approx(totals[0], rel=1e-5 if "64" in precision else 0.05)


def test_the_picture_and_its_interval(tmp_path: Path) -> None:
    options = {"heatmap_every_n_steps": 4, "history": 3}
    [result] = run_distributed(
        fit, str(tmp_path), callback_options=options, trainer_options={"max_steps": 10}, world_size=1
    )
    assert read_run(tmp_path / "run").pictures == {"grad_norm/heatmap": [4, 8, 9]}
    assert result["steps"] == [7, 8, 9]


def test_inf_norms_and_largest_values(tmp_path: Path) -> None:
    options = {"norm_type": "inf", "max_abs_every_n_steps": 2, "every_n_steps": 2, "granularity": "module"}
    run_distributed(fit, str(tmp_path), callback_options=options, world_size=1)
    run = read_run(tmp_path / "run")
    gradients = reference_gradients(make_transformer(), expected_batches("transformer", 0))
    layers = reference.layer_max_abs(gradients, lambda name: "model." + name.rpartition(".")[0])
    for layer, expected in layers.items():
        assert run.scalars[f"grad_norm/layer/{layer}"][0] == pytest.approx(expected, rel=TOLERANCE)
        assert run.scalars[f"grad_norm/max_abs/{layer}"][0] == run.scalars[f"grad_norm/layer/{layer}"][0]
        assert list(run.scalars[f"grad_norm/max_abs/{layer}"]) == [0, 2]
    assert list(run.scalars["grad_norm/total"]) == [0, 2]
    assert run.scalars["grad_norm/total"][0] == max(run.scalars[f"grad_norm/layer/{layer}"][0] for layer in layers)


def test_layers_are_chosen_by_number_name_and_pattern(tmp_path: Path) -> None:
    options = {"layers": [0, -1, "model.norm", r".*head"], "exclude": ["model.layers.3"]}
    run_distributed(fit, str(tmp_path), callback_options=options, world_size=1)
    tags = {tag for tag in read_run(tmp_path / "run").scalars if tag.startswith("grad_norm/layer/")}
    assert tags == {f"grad_norm/layer/model.{layer}" for layer in ("layers.0", "norm", "lm_head")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [4]}, r"layers=4 is out of range: model.layers has 4 blocks \(0 to 3\)"),
        ({"layers": ["model.layer.3"]}, r"matches none of the 7 layers; the closest: \['model.layers.3'"),
        ({"exclude": ["nothing"]}, "exclude='nothing' matches none"),
        ({"layers": ["vision.blocks:0"]}, "no blocks in 'vision.blocks'"),
    ],
)
def test_layers_that_do_not_exist_end_the_run_before_the_first_step(options: dict[str, Any], message: str) -> None:
    module = make_module("transformer")
    with pytest.raises(ValueError, match=message):
        make_trainer(callbacks=[GradNormCallback(**options)]).fit(module)
    assert module.losses == []
