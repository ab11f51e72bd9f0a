"""Attaching to an Accelerator: what is refused, and that leaving puts everything back as it was."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from stabilizer.callbacks import GradNormCallback, LossMeanVarCallback, attach
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import Recorder, attached, make_accelerator, make_optimizer, prepared, train
from tests.event_files import read_run
from tests.models import loss_of, make_transformer, token_batch

PATCHED = ("backward", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients", "end_training")


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_puts_everything_back(fails: bool) -> None:
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    before = {name: getattr(accelerator, name) for name in PATCHED}
    hooks = (len(model._forward_pre_hooks), len(accelerator._save_model_state_pre_hook))
    error = pytest.raises(RuntimeError, match="out of data") if fails else contextlib.nullcontext()
    callback = LossMeanVarCallback(every_n_steps=1)
    with error, attached(accelerator, model, optimizer, callback) as handle:
        assert set(PATCHED) <= vars(accelerator).keys()
        assert accelerator.backward.__doc__ == Accelerator.backward.__doc__
        train(accelerator, model, optimizer, [token_batch(step=step) for step in range(2)])
        accelerator.backward(loss_of(model, token_batch()))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if fails:
            raise RuntimeError("out of data")
        optimizer.step()
    assert {name: getattr(accelerator, name) for name in PATCHED} == before
    assert not set(PATCHED) & vars(accelerator).keys()
    assert "step" not in vars(optimizer)
    assert (len(model._forward_pre_hooks), len(accelerator._save_model_state_pre_hook)) == hooks
    assert not accelerator._load_model_state_pre_hook
    assert callback.driver is None
    assert {step for _, step in handle.rows} == ({0, 1} if fails else {0, 1, 2})
    handle.close()  # a second time
    train(accelerator, model, optimizer, [token_batch()])
    assert callback.next_step() == (2 if fails else 3)


def test_somebody_else_may_stand_before_us() -> None:
    """A learning-rate scheduler that was made meanwhile holds our `step`; taking ours away must not take theirs."""
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    recorder = Recorder()
    with attached(accelerator, model, optimizer, recorder):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        train(accelerator, model, optimizer, [token_batch()])
        scheduler.step()
    train(accelerator, model, optimizer, [token_batch()])
    assert recorder.next_step() == 1
    assert scheduler.get_last_lr() == [0.025]


def test_handles_may_be_nested_and_left_in_any_order() -> None:
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    recorders = [Recorder(), Recorder(name="second")]
    handles = [
        attach(accelerator, model=model, optimizer=optimizer, callbacks=[recorder], log=lambda *row: None)
        for recorder in recorders
    ]
    train(accelerator, model, optimizer, [token_batch()])
    handles[0].close()
    train(accelerator, model, optimizer, [token_batch()])
    handles[1].close()
    train(accelerator, model, optimizer, [token_batch()])
    assert [recorder.next_step() for recorder in recorders] == [1, 2]


def test_end_training_writes_what_is_on_its_way(tmp_path: Path) -> None:
    accelerator = make_accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    model, optimizer = prepared(accelerator)
    with attach(accelerator, model=model, optimizer=optimizer, callbacks=[GradNormCallback()]):
        train(accelerator, model, optimizer, [token_batch(step=step) for step in range(3)])
        accelerator.end_training()
        assert set(read_run(tmp_path / "run").scalars["grad_norm/total"]) == {0, 1, 2}, "before the trackers close"


def test_a_closure_is_told_not_measured() -> None:
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    recorder = Recorder()

    def closure() -> torch.Tensor:
        loss = loss_of(model, token_batch())
        loss.backward()
        return loss

    with attached(accelerator, model, optimizer, recorder):
        with pytest.warns(StabilizerWarning, match="closure"):
            optimizer.step(closure)
        optimizer.step(closure)  # said once
    assert recorder.next_step() == 0


def _wrong(case: str) -> dict[str, Any]:
    accelerator = make_accelerator()
    model = make_transformer()
    optimizer: Any = make_optimizer(model)
    arguments: dict[str, Any] = {"accelerator": accelerator, "callbacks": [GradNormCallback()]}
    if case == "not prepared":
        return {**arguments, "model": model, "optimizer": optimizer}
    if case == "LBFGS":
        optimizer = torch.optim.LBFGS(model.parameters())
    wrapped, stepper = accelerator.prepare(model, optimizer)
    arguments |= {"model": wrapped, "optimizer": stepper}
    if case == "DeepSpeed":
        AcceleratorState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    if case == "at work":
        [callback] = arguments["callbacks"]
        callback.driver = object()
    changes: dict[str, Any] = {
        "other model": {"model": make_transformer()},
        "other optimizer": {"optimizer": make_optimizer(make_transformer())},
        "no accelerator": {"accelerator": wrapped},
        "no list": {"callbacks": ["grad_norm"]},
        "twice": {"callbacks": [GradNormCallback(), GradNormCallback()]},
        "layers": {"callbacks": [GradNormCallback(layers=[99])]},
        "log": {"log": 3},
    }
    return arguments | changes.get(case, {})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("not prepared", "after accelerator.prepare"),
        ("other model", "model is none of those that accelerator.prepare returned"),
        ("other optimizer", r"optimizer \(SGD\) is none of those"),
        ("no accelerator", "expected an accelerate.Accelerator, or None"),
        ("no list", "grad_norm.*expected a list of StabilizerCallback"),
        ("twice", 'two callbacks have the key .*give one a name: name="second"'),
        ("at work", "at work already"),
        ("LBFGS", "LBFGS"),
        ("DeepSpeed", "DEEPSPEED.*Use DDP or FSDP"),
        ("layers", "99"),
        ("log", r"log=3: expected a function log\(values, step\)"),
    ],
)
def test_what_cannot_work_is_refused_at_once(case: str, message: str) -> None:
    arguments = _wrong(case)
    accelerator = arguments.pop("accelerator")
    with pytest.raises(ValueError, match=message):
        attach(accelerator, **arguments)
    assert not set(PATCHED) & vars(accelerator).keys(), "nothing is left of what was refused"


def test_no_trackers_are_told_once() -> None:
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    with pytest.warns(StabilizerWarning, match="has no trackers") as warnings:  # noqa: SIM117
        with attach(accelerator, model=model, optimizer=optimizer, callbacks=[GradNormCallback()]):
            train(accelerator, model, optimizer, [token_batch(step=step) for step in range(3)])
    assert len([warning for warning in warnings if issubclass(warning.category, StabilizerWarning)]) == 1


def test_the_environment_turns_all_of_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STABILIZER_DISABLE", "1")
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    callback = GradNormCallback()
    with pytest.warns(StabilizerWarning, match="STABILIZER_DISABLE"):
        handle = attach(accelerator, model=model, optimizer=optimizer, callbacks=[callback])
    with handle:
        assert not set(PATCHED) & vars(accelerator).keys()
        train(accelerator, model, optimizer, [token_batch()])
        handle.record_loss(torch.zeros(()))
        handle.measure()
    assert callback.next_step() == 0
