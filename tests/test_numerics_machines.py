"""What a machine says of itself, by a stand-in for NVML, and reports as files: there, back, and of another form."""

from __future__ import annotations

import json
import math
import sys
import types
from typing import Any

import pytest
import torch

from stabilizer.numerics import NumericsFinding
from stabilizer.numerics.hardware import Machine, describe_machine, read_machine
from stabilizer.numerics.report import NumericsReport, ParameterCount, RankReport
from stabilizer.numerics.tracing import Producer

NAN, INF = math.nan, math.inf


def nvml(**methods: Any) -> Any:
    """A stand-in for the package."""
    module = types.ModuleType("pynvml")
    defaults: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"Some GPU",
        "nvmlDeviceGetTemperature": lambda handle, sensor: 91,
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: {"corrected": 5, "uncorrected": 2}[kind],
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_VOLATILE_ECC": 0,
        "NVML_MEMORY_ERROR_TYPE_CORRECTED": "corrected",
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": "uncorrected",
    }
    for name, value in {**defaults, **methods}.items():
        setattr(module, name, value)
    return module


def raises(*arguments: Any) -> Any:
    raise RuntimeError("Not Supported")


@pytest.fixture
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr("stabilizer.numerics.hardware.socket.gethostname", lambda: "node7")


@pytest.mark.usefixtures("_one_gpu")
def test_ecc_and_temperature_where_nvml_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetHandleByUUID=asked.append))
    machine = read_machine(torch.device("cuda", 0))
    assert machine == Machine(
        host="node7", device="Some GPU", temperature=91.0, ecc_corrected=5, ecc_uncorrected=2, note=""
    )
    assert asked == ["GPU-1234"], "the number of a device is another one where some are hidden"
    assert "91 C, 2 ECC errors that were not corrected" in describe_machine(machine)


@pytest.mark.usefixtures("_one_gpu")
@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ({"nvmlInit": raises}, (None, None, None)),
        ({"nvmlDeviceGetTotalEccErrors": raises}, (91.0, None, None)),
        ({"nvmlDeviceGetTemperature": raises}, (None, 5, 2)),
    ],
)
def test_what_nvml_does_not_tell_is_said(methods: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(**methods))
    machine = read_machine(torch.device("cuda", 0))
    assert (machine.temperature, machine.ecc_corrected, machine.ecc_uncorrected) == expected
    assert "Not Supported" in machine.note
    assert "not readable" in describe_machine(machine)


def test_without_nvml_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine = read_machine(torch.device("cuda", 0))
    assert "not readable" in machine.note
    assert "pip install nvidia-ml-py" in machine.note


def full_report() -> NumericsReport:
    finding = NumericsFinding(
        kind="nonfinite_gradient",
        step=7,
        text='the gradient is not finite: "a"\n\\',
        verdict="transient",
        rank=1,
        host="node7",
        layer="layers.1",
        layers=("layers.1", "head"),
        micro_batch=2,
        evidence={"norm": NAN, "ratio": 3.5},
    )
    machine = Machine(host="node7", temperature=91.0)
    rows = (RankReport(rank=0, machine=machine), RankReport(rank=1, verdict="transient", replay_norms=(1.0, INF)))
    return NumericsReport(
        **{
            **vars(NumericsReport.of(finding)),
            "parameters": (ParameterCount(name="layers.1.weight", num_nan=1, num_inf=0),),
            "producer": Producer(kind="output", module="layers.1", path='output["x"][0]', value="NaN"),
            "ranks": rows,
        }
    )


def test_a_report_goes_to_json_and_back() -> None:
    report = full_report()
    text = report.to_json()
    assert NumericsReport.from_json(text).to_json() == text
    assert json.loads(text)["evidence"][0] == {"name": "norm", "value": "nan"}
    assert NumericsReport.from_json(text).producer == report.producer


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.pop("step"),
        lambda plain: plain.update(step="7"),
        lambda plain: plain.update(step=True),
        lambda plain: plain.update(verdict="innocent"),
        lambda plain: plain.update(ranks={"0": {}}),
        lambda plain: plain.update(ranks=[[]]),
        lambda plain: plain.update(parameters=[{"name": 3}]),
        lambda plain: plain.update(schema=2),
    ],
)
def test_a_report_of_another_form_is_one_error(change: Any) -> None:
    plain = json.loads(full_report().to_json())
    change(plain)
    with pytest.raises(ValueError, match="report"):
        NumericsReport.from_json(json.dumps(plain))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"step": 1e999}', "\x80abc"])
def test_what_is_no_report_is_one_error(text: str) -> None:
    with pytest.raises(ValueError, match="report"):
        NumericsReport.from_json(text)
