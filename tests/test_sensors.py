"""Local norms on one device: what they say, and that training does not notice them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from stabilizer.parameters import ParameterIndex
from stabilizer.sensors import Sensors
from tests import reference
from tests.models import loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients
from tests.models import token_batch as tokens

pytestmark = pytest.mark.norms

TOLERANCE = 1e-5


def started(model: Any, **options: Any) -> tuple[Sensors, ParameterIndex]:
    """Sensors that are on."""
    index = ParameterIndex(model, **options)
    sensors = Sensors(model, index)
    sensors.start()
    assert sensors.reason is None
    return sensors, index


def taken(sensors: Sensors, index: ParameterIndex) -> dict[str, float]:
    """Norms by name."""
    squares = sensors.take()
    assert squares is not None, sensors.reason
    assert (squares.dtype, squares.shape) == (torch.float32, (len(index),))
    return dict(zip(index.names, squares.sqrt().tolist(), strict=True))


def norms_of(gradients: Any) -> dict[str, float]:
    """The oracle's, by parameter."""
    return reference.layer_norms(gradients, lambda name: name)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"num_layers": 1},
    "many layers": {"num_layers": 24},
    "tied": {"tied": True},
    "adapters": {"adapters": True},
    "unused": {"unused": True},
    "sparse": {"sparse": True},
    "wide": {"dim": 192, "num_layers": 1},
    "odd width": {"dim": 132, "num_layers": 1},
}


@pytest.mark.covers(feature="local norms", strategy="single", host="plain")
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_each_micro_batch_has_its_own_norms(options: dict[str, Any]) -> None:
    model = make_transformer(**options)
    sensors, index = started(model)
    for step in range(2):
        for micro_batch in range(3):
            batch = tokens(step=step, micro_batch=micro_batch)
            loss_of(model, batch).backward()
            expected = norms_of(reference_gradients(make_transformer(**options), [batch]))
            assert taken(sensors, index) == pytest.approx(expected, rel=TOLERANCE, abs=1e-12)
        model.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_added_up_in_float32(dtype: torch.dtype) -> None:
    model = make_transformer(dtype=dtype, dim=192, num_layers=2)
    sensors, index = started(model)
    loss_of(model, tokens()).backward()
    expected = norms_of({name: parameter.grad for name, parameter in model.named_parameters()})
    assert taken(sensors, index) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("size", [1, 2047, 2048, 147456, 4 * 2048 * 2048, 4 * 2048 * 2048 + 1, 600001])
def test_long_gradients_lose_no_digits(size: int) -> None:
    parameter = nn.Parameter(torch.zeros(size))
    sensors, index = started(nn.ParameterList([parameter]))
    (parameter * torch.full((size,), 0.1)).sum().backward()
    assert taken(sensors, index) == pytest.approx({"0": 0.1 * size**0.5}, rel=TOLERANCE)


def test_layouts_in_memory_and_complex_numbers() -> None:
    columns = nn.Parameter(torch.zeros(64, 96).t())
    parts = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    sensors, index = started(nn.ParameterList([columns, parts]))
    values = torch.randn(96, 64)
    ((columns * values).sum() + (parts * (3 + 4j)).sum().real).backward()
    expected = {"0": values.double().norm().item(), "1": 5 * 3**0.5}
    assert taken(sensors, index) == pytest.approx(expected, rel=TOLERANCE)


def test_nothing_seen_and_zero_gradients() -> None:
    model = make_mlp()
    sensors, index = started(model)
    assert sensors.take() is None
    model.second(torch.zeros(1, 8)).sum().backward()
    expected = {"first.weight": 0, "first.bias": 0, "second.weight": 0, "second.bias": 1}
    assert taken(sensors, index) == expected
    assert sensors.take() is None, "a micro-batch was handed out twice"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_with_its_parameter_and_its_micro_batch(bad: float) -> None:
    model = make_mlp()
    sensors, index = started(model)
    model.second.weight.register_hook(lambda gradient: gradient * bad)
    model(mlp_batch()[0]).sum().backward()
    sensors.close()
    sensors.start()  # our hook now comes after the one that spoils the gradient
    for is_bad in (True, False):
        if not is_bad:
            model.second.weight._backward_hooks.popitem(last=False)  # type: ignore[union-attr]
        model(mlp_batch()[0]).sum().backward()
        finite = {name: math.isfinite(norm) for name, norm in taken(sensors, index).items()}
        assert finite == {name: not is_bad or name != "second.weight" for name in index.names}


def test_parts_of_one_micro_batch_add_their_squares() -> None:
    model = make_mlp()
    sensors, index = started(model)
    parts = []
    for micro_batch in range(2):
        batch = mlp_batch(micro_batch=micro_batch)
        loss_of(model, batch).backward()
        parts.append(norms_of(reference_gradients(make_mlp(), [batch])))
    expected = {name: math.hypot(*(part[name] for part in parts)) for name in index.names}
    assert taken(sensors, index) == pytest.approx(expected, rel=TOLERANCE)


def test_an_index_of_some_parameters() -> None:
    model = make_mlp()
    sensors, index = started(model, parameters=[model.second.weight])
    loss_of(model, mlp_batch()).backward()
    expected = norms_of(reference_gradients(make_mlp(), [mlp_batch()]))
    assert taken(sensors, index) == pytest.approx({"second.weight": expected["second.weight"]}, rel=TOLERANCE)


def test_a_parameter_that_thaws_is_measured_from_its_second_micro_batch() -> None:
    model = make_mlp()
    index = ParameterIndex(model)
    model.first.weight.requires_grad_(False)
    sensors = Sensors(model, index)
    sensors.start()
    loss_of(model, mlp_batch()).backward()
    assert taken(sensors, index)["first.weight"] == 0
    model.first.weight.requires_grad_(True)
    loss_of(model, mlp_batch()).backward()
    assert sensors.take() is None
    loss_of(model, mlp_batch()).backward()
    expected = norms_of(reference_gradients(make_mlp(), [mlp_batch()]))
    assert taken(sensors, index) == pytest.approx(expected, rel=TOLERANCE)
