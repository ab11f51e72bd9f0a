"""What is off from the start, what is turned off by a fault of its own, and what is said once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

from stabilizer.callbacks import attach, recommended
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import make_accelerator
from tests.tiny_loops import loss_at, no_log, prepared_unit, told, unit


def test_the_table_is_shown_once_for_the_same_content(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(9173, 1)  # like no other test's: what another one has shown would not be shown again
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shown = []
    for learning_rate in (0.1, 0.1, 0.1, 0.2):
        optimizer.param_groups[0]["lr"] = learning_rate
        with attach(None, model=model, optimizer=optimizer, callbacks=recommended(), log=no_log):
            pass
        shown.append(capsys.readouterr().out.count("Stabilizer preflight"))
    assert shown == [1, 0, 0, 1]


def _off(case: str) -> dict[str, Any]:
    accelerator, model, optimizer = prepared_unit()
    arguments = {"accelerator": accelerator, "model": model, "optimizer": optimizer, "callbacks": recommended()}
    if case == "DeepSpeed":
        AcceleratorState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    elif case == "LBFGS":
        arguments |= {"accelerator": None, "optimizer": torch.optim.LBFGS(model.parameters())}
    elif case == "not prepared":
        arguments |= dict(zip(("accelerator", "model", "optimizer"), (make_accelerator(), *unit()), strict=True))
    return arguments | ({"callbacks": []} if case.startswith("no callbacks") else {})


@pytest.mark.parametrize("case", ["prepared", "DeepSpeed", "LBFGS", "not prepared", "no callbacks"])
def test_what_is_off_does_nothing_wherever_it_is(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case != "no callbacks":
        monkeypatch.setenv("STABILIZER_DISABLE", "1")
    arguments = _off(case)
    accelerator, model, optimizer = (arguments[key] for key in ("accelerator", "model", "optimizer"))
    before = [set(vars(each)) for each in (accelerator, optimizer) if each is not None]
    with told() as messages:
        handle = attach(accelerator, **{key: arguments[key] for key in ("model", "optimizer", "callbacks")})
        with handle:
            assert [set(vars(each)) for each in (accelerator, optimizer) if each is not None] == before
            assert not model._forward_pre_hooks
            handle.measure()
            handle.record_loss(torch.zeros(()))
            handle.load_state_dict(handle.state_dict())
        handle.close()
    [message] = messages
    assert ("STABILIZER_DISABLE" in message) == (case != "no callbacks")
    assert [callback.next_step() for callback in handle.callbacks] == [0] * len(handle.callbacks)


def test_no_callbacks_in_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = unit()
    with pytest.warns(StabilizerWarning, match="callbacks"):
        handle = attach(None, model=model, optimizer=optimizer, callbacks=[])
    with handle:
        loss_at(model, 1.0).backward()
        optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks
    assert capsys.readouterr().out == ""
