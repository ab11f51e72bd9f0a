"""What a drill refuses, what it says, and that nothing of it stays behind."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from stabilizer.callbacks import DrillCallback, attach
from stabilizer.errors import StabilizerWarning
from tests.acceptance_loops import plain_loss, train
from tests.environments import ROOT
from tests.models import make_transformer, token_batch
from tests.tiny_loops import no_log

pytestmark = pytest.mark.filterwarnings("ignore:drill. a fault on purpose")


DEAD = """
import torch
from stabilizer.callbacks import DrillCallback, attach
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drill = DrillCallback(faults=[{"kind": "dead_rank", "step": 3}])
with attach(None, model=model, optimizer=optimizer, callbacks=[drill]):
    for step in range(6):
        print(step, flush=True)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def test_a_dead_rank_dies_at_its_step_and_says_so_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEAD], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == -9
    assert done.stdout.split("\n")[-2] == "3"
    assert "a fault on purpose: faults[0]: kind='dead_rank', step=3" in done.stderr
    assert "rank 0, step 3, micro-batch 0: this process kills itself" in done.stderr


REFUSED = [
    ({"kind": "nan_gradient", "step": 3, "layer": "layers.7"}, r"faults\[0\]: layer='layers\.7' is no layer.*closest"),
    ({"kind": "nan_gradient", "step": 3, "layer": 7}, r"faults\[0\]: .*7 is out of range"),
    ({"kind": "nan_gradient", "step": 3, "rank": 1}, r"faults\[0\]: rank=1: the run has 1 processes, 0 to 0"),
    ({"kind": "token_loss", "step": 3, "layer": "head"}, r"faults\[0\]: .*'head' is no module.*lm_head"),
]


@pytest.mark.parametrize(("fault", "message"), REFUSED)
def test_what_cannot_happen_is_refused_at_the_start(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(fault)


def test_a_step_that_is_over_is_refused() -> None:
    model = make_transformer(num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    drill = DrillCallback(faults=[{"kind": "nan_gradient", "step": 3}])
    drill.advance(0, 3)
    with pytest.raises(ValueError, match=r"faults\[0\]: step=3: that is over, the run goes on at step 4"):
        attach(None, model=model, optimizer=optimizer, callbacks=[drill], log=no_log)
    assert not model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_refused() -> None:
    model = make_transformer(num_layers=2)
    model.layers[1].compile()
    with pytest.raises(ValueError, match=r"faults\[0\]: kind='layer_spike': layers\.1 is compiled"):
        train({"kind": "layer_spike", "step": 3}, model=model)


@pytest.mark.filterwarnings("ignore:.*had no gradient in the first")
def test_what_did_not_happen_is_told(caplog: pytest.LogCaptureFixture) -> None:
    faults = [
        {"kind": "token_loss", "step": 1, "token": [99, 0]},
        {"kind": "stuck_loss_scale", "step": 2},
        {"kind": "layer_spike", "step": 3, "layer": "unused"},
        {"kind": "nan_gradient", "step": 3, "micro_batch": 5},
        {"kind": "layer_spike", "step": 4, "layer": "norm"},
    ]
    train(*faults, model=make_transformer(num_layers=2, unused=True))
    told = [record.getMessage() for record in caplog.records if "did not happen" in record.getMessage()]
    assert [line.partition("faults")[2][:3] for line in told] == ["[0]", "[1]", "[2]", "[3]"]
    assert "step 1" in told[0]


def test_every_fault_is_loud(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(StabilizerWarning, match="a fault on purpose") as warned:
        train({"kind": "layer_spike", "step": 1, "layer": "norm", "num_steps": 2, "factor": 3.0})
    [text] = [str(one.message) for one in warned]
    fields = (
        "kind='layer_spike', step=1, rank=0, micro_batch=0, layer='norm', factor=3.0, num_steps=2, repeats='always'"
    )
    assert fields in text
    messages = [record.getMessage() for record in caplog.records]
    happened = [message for message in messages if "the gradient of norm times 3" in message]
    assert [f"step {step}" in line for step, line in zip((1, 2), happened, strict=True)] == [True, True]
    assert "1 faults will be put into this run on purpose" in caplog.text
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "faults[0], on purpose: kind='layer_spike'" in shown


def test_nothing_is_left_in_the_model() -> None:
    model = make_transformer(num_layers=2)
    faults = [{"kind": kind, "step": 2} for kind in ("layer_spike", "token_loss", "bit_flip", "learning_rate_jump")]
    train(*faults, model=model)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert not _global_optimizer_post_hooks


def test_an_average_of_the_weights_has_no_faults() -> None:
    model = make_transformer(num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    drill = DrillCallback(faults=[{"kind": "bit_flip", "step": 0, "target": "weight", "layer": "lm_head", "bit": 7}])
    batch = token_batch()
    expected = plain_loss(model, batch)
    with attach(None, model=model, optimizer=optimizer, callbacks=[drill], log=no_log):
        average = copy.deepcopy(model)
        assert plain_loss(model, batch) != expected
        assert plain_loss(average, batch) == expected


def test_it_is_off_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STABILIZER_DISABLE", "1")
    with pytest.warns(StabilizerWarning, match="STABILIZER_DISABLE"):
        found = train({"kind": "nan_gradient", "step": 1})
    healthy = train()
    assert all(torch.equal(weight, healthy.weights[-1][name]) for name, weight in found.weights[-1].items())
