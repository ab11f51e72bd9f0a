"""Field reports, area logging-tb: what is in the charts, under which name, and what is not."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer import gradient_norms
from stabilizer.callbacks import GradNormCallback
from tests.event_files import read_run
from tests.field_reports.helpers import TOLERANCE, covers, fit, norm_logger
from tests.lightning_models import PACKAGES, make_trainer
from tests.lightning_variants import Plain


def _sixty_parameters() -> Plain:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    assert len(list(model.parameters())) == 60

    def loss(module: Plain, batch: Any, number: int) -> Tensor:
        return module.model(torch.ones(2, 4) + number).square().sum()

    return Plain(model, loss=loss)


LAYERS = [f"model.{number}" for number in range(30)]


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, LAYERS),
        ({"granularity": "parameter"}, [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]),
        ({"layers": [0, -1]}, ["model.0", "model.29"]),
        ({"layers": [r"model\.1\d"], "exclude": ["model.15"]}, [f"model.1{n}" for n in range(10) if n != 5]),
        ({"granularity": {"weight$": "weights", "bias$": "biases"}}, ["weights", "biases"]),
    ],
    ids=["by layer", "by parameter", "by number", "by pattern", "by group"],
)
def test_B007_all_charts_are_in_one_group(options: dict[str, Any], layers: list[str], tmp_path: Path) -> None:
    fit(_sixty_parameters(), tmp_path, callbacks=[GradNormCallback(**options)])
    scalars = read_run(tmp_path / "run").scalars
    expected = {f"grad_norm/layer/{layer}" for layer in layers} | {"grad_norm/total", "grad_norm/nonfinite"}
    assert scalars.keys() - {"epoch"} == expected


def test_B007_only_the_total(tmp_path: Path) -> None:
    fit(_sixty_parameters(), tmp_path, callbacks=[GradNormCallback(layer_every_n_steps=None)])  # type: ignore[arg-type]
    assert read_run(tmp_path / "run").scalars.keys() - {"epoch"} == {"grad_norm/total", "grad_norm/nonfinite"}


def _boring(package: str, **options: Any) -> Any:
    module = importlib.import_module(f"{package}.demos.boring_classes").BoringModel()
    make_trainer(package=package, callbacks=[GradNormCallback()], limit_val_batches=0, **options).fit(module)
    return module


@covers("single")
@pytest.mark.parametrize("package", PACKAGES)
def test_B011_one_line_and_no_change_of_the_module(package: str, tmp_path: Path) -> None:
    def logger(kind: str, **options: Any) -> Any:
        return getattr(importlib.import_module(f"{package}.loggers"), kind)(tmp_path, **options)

    first = logger("TensorBoardLogger", name="", version="first")
    _boring(package, logger=first)
    scalars = read_run(tmp_path / "first").scalars
    assert list(scalars["grad_norm/total"]) == [0, 1, 2]
    assert list(scalars["grad_norm/layer/layer"]) == [0]
    assert scalars["grad_norm/layer/layer"][0] == scalars["grad_norm/total"][0] > 0

    _boring(package, logger=False)
    _boring(package, logger=[logger("TensorBoardLogger", name="", version="second"), logger("CSVLogger", name="csv")])
    assert list(read_run(tmp_path / "second").scalars["grad_norm/total"]) == [0, 1, 2]
    header = (tmp_path / "csv/version_0/metrics.csv").read_text().splitlines()[0].split(",")
    assert {"grad_norm/total", "grad_norm/layer/layer"} <= set(header)


def _nothing(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient)


def _one_nan(gradient: Tensor) -> Tensor:
    return torch.cat([gradient.flatten()[:1] * torch.nan, gradient.flatten()[1:]]).view_as(gradient)


def _huge(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, 1e30)


HUGE_TOTAL = 1e30 * math.sqrt(30 * 20)


class Changed(Plain):
    """Its gradients are what a function makes of them, and its weights never move.

    Args:
        change: The function.
    """

    def __init__(self, change: Any) -> None:
        plain = _sixty_parameters()
        super().__init__(plain.model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        self.change = change

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """The loss of one micro-batch."""
        return self.model(torch.ones(2, 4, dtype=self.model[0].weight.dtype)).square().sum()

    def on_after_backward(self) -> None:
        """Change the gradients."""
        for parameter in self.parameters():
            parameter.grad = self.change(parameter.grad)


@pytest.mark.parametrize(
    ("change", "nonfinite", "total"),
    [
        (lambda gradient: gradient * torch.nan, 30, math.nan),
        (_one_nan, 30, math.nan),
        (_nothing, 0, 0.0),
        (_huge, 0, HUGE_TOTAL),
    ],
    ids=["all NaN", "one NaN each", "all zero", "huge"],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.filterwarnings("ignore:.*(is not finite in|is exactly 0):stabilizer.StabilizerWarning")
def test_B017_no_gradient_stops_the_charts_or_the_run(
    change: Any, nonfinite: int, total: float, precision: Any, tmp_path: Path
) -> None:
    callback = norm_logger(heatmap_every_n_steps=2, strict=True)
    trainer = fit(Changed(change), tmp_path, callbacks=[callback], precision=precision, max_steps=4)
    assert trainer.global_step == 4
    run = read_run(tmp_path / "run")
    assert run.scalars["grad_norm/nonfinite"] == dict.fromkeys(range(4), nonfinite)
    # 1e30 is no number of bfloat16: its neighbour is 0.2 % off.
    tolerance = TOLERANCE if "32" in precision else 5e-3
    totals = dict.fromkeys(range(4), total)
    assert run.scalars["grad_norm/total"] == pytest.approx(totals, rel=tolerance, nan_ok=True)
    assert run.pictures == {"grad_norm/heatmap": [2, 3]}


@pytest.mark.filterwarnings("ignore:.*is not finite in:stabilizer.StabilizerWarning")
def test_B017_largest_values_of_huge_gradients_beside_their_norms(tmp_path: Path) -> None:
    fit(Changed(_huge), tmp_path, callbacks=[norm_logger(max_abs_every_n_steps=1)])
    scalars = read_run(tmp_path / "run").scalars
    assert list(scalars["grad_norm/max_abs/model.0"].values()) == pytest.approx([1e30] * 3)
    assert list(scalars["grad_norm/total"].values()) == pytest.approx([HUGE_TOTAL] * 3, rel=TOLERANCE)
    assert set(scalars["grad_norm/nonfinite"].values()) == {0}


@pytest.mark.parametrize("is_wanted", [False, True])
def test_B084_the_progress_bar_stays_as_it_is_unless_asked(is_wanted: bool, tmp_path: Path) -> None:
    callback = norm_logger(granularity="parameter", **({"progress_bar": True} if is_wanted else {}))
    trainer = fit(_sixty_parameters(), tmp_path, callbacks=[callback], enable_progress_bar=True)
    assert set(trainer.progress_bar_metrics) == ({"grad_norm/total"} if is_wanted else set())


def test_B087_norms_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2, 2))]
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    gradients = [weight.grad.flatten() for weight in weights if weight.grad is not None]
    by_layer = {"^[01]": "first", "^2": "second"}
    for norm_type in (2, math.inf):
        expected = [torch.linalg.vector_norm(gradient, norm_type).item() for gradient in gradients]
        whole = torch.linalg.vector_norm(torch.cat(gradients), norm_type).item()
        pair = torch.linalg.vector_norm(torch.cat(gradients[:2]), norm_type).item()
        by_parameter = gradient_norms(weights, norm_type=norm_type, granularity="parameter")
        assert by_parameter.norms.tolist() == pytest.approx(expected, rel=TOLERANCE)
        result = gradient_norms(weights, norm_type=norm_type, granularity=by_layer)
        assert result.norms.tolist() == pytest.approx([pair, expected[2]], rel=TOLERANCE)
        for norms in (by_parameter, result):
            assert norms.total_norm.item() == pytest.approx(whole, rel=TOLERANCE)
            combined = torch.linalg.vector_norm(norms.norms, norm_type).item()
            assert combined == pytest.approx(whole, rel=TOLERANCE)
    for norm_type in (1, 1.5, 4):
        with pytest.raises(ValueError, match=rf'^norm_type={norm_type}: allowed are 2 and "inf"'):
            gradient_norms(weights, norm_type=norm_type)
