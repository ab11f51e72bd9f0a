"""The command that shows a saved incident again and runs its micro-batch."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.localize.incident import MicroBatchReport
from stabilizer.localize.replay_command import ReplayError, replay
from stabilizer.localize.writing import IncidentWriter
from tests.incidents import make_incident

X, Y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.arange(4) % 2


class WithLoss(nn.Module):
    """As transformers' models: keyword arguments in, an object with a loss out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(self.linear(x), y))


def _norm() -> float:
    model = WithLoss()
    model(X, Y).loss.backward()
    return float(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None) ** 0.5)


def _pair() -> Any:
    model = WithLoss()
    return model, lambda batch: model(**batch).loss


MADE = {
    "model": WithLoss,
    "pair": _pair,
    "scalar": lambda: nn.Linear(3, 2),
    "number": lambda: 7,
    "vector": lambda: (nn.Linear(3, 2), lambda batch: torch.ones(3)),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = types.ModuleType("made_for_replay")
    vars(module).update(MADE)
    monkeypatch.setitem(sys.modules, "made_for_replay", module)
    incident = make_incident(micro_batches=(MicroBatchReport(rank=0, micro_batch=2, norm=0.515),))
    found = IncidentWriter(tmp_path, dump_batch=True).write(incident, batch=((), {"x": X, "y": Y}), micro_batch=2)
    assert found is not None
    return found


def test_the_table_and_the_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay(folder)
    output = capsys.readouterr().out
    assert "step 412" in output
    assert "Micro-batch 2 of rank 0" in output
    assert "x  (4, 3) float32" in output
    assert "y  (4,) int64" in output


@pytest.mark.parametrize("name", ["model", "pair"])
def test_the_norm_beside_the_observed_one(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay(folder, model=f"made_for_replay:{name}")
    output = capsys.readouterr().out
    assert f"{_norm():.6g} now; 0.515 was observed for it; 812.4 for the step" in output


def test_a_function_beside_the_working_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_training.py").write_text("from tests.test_incident_replay import WithLoss as make")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    replay(folder, model="my_training:make")
    assert "now;" in capsys.readouterr().out
    assert sys.path == before
    del sys.modules["my_training"]


def test_an_incident_without_a_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "batch.safetensors").rename(folder / "batch_rank1_micro_batch0.safetensors")
    replay(folder)
    assert "No micro-batch was saved" in capsys.readouterr().out
    with pytest.raises(ReplayError, match="here: batch_rank1_micro_batch0"):
        replay(folder, model="made_for_replay:model")
    replay(folder, model="made_for_replay:model", batch="batch_rank1_micro_batch0.safetensors")
    assert "now;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("made_for_replay", "expected module:function"),
        (":model", "expected module:function"),
        ("no_such_module:model", "No module named"),
        ("made_for_replay:gone", "no attribute 'gone'"),
        ("made_for_replay:number", "returns a int; expected a model"),
        ("made_for_replay:vector", r"the loss is a tensor of shape \(3,\)"),
        ("made_for_replay:scalar", "cannot be run: TypeError"),
    ],
)
def test_a_model_that_cannot_be_run(model: str, message: str, folder: Path) -> None:
    with pytest.raises(ReplayError, match=message):
        replay(folder, model=model)


def test_folders_without_an_incident(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="give one of the folders in it: step_412"):
        replay(tmp_path)
    with pytest.raises(ReplayError, match="no incident"):
        replay(tmp_path / "gone")
    (folder / "batch.safetensors").write_bytes(b"nothing")
    with pytest.raises(ReplayError, match="no micro-batch of an incident"):
        replay(folder)
    (folder / "incident.json").write_text("{}")
    with pytest.raises(ReplayError, match="schema=None"):
        replay(folder)
