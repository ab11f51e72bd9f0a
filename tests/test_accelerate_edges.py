"""Where and when the suite runs in an Accelerate loop, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from stabilizer.callbacks import GradNormCallback
from stabilizer.errors import StabilizerWarning
from tests.accelerate_loops import Recorder, attached, make_accelerator, prepared
from tests.models import loss_of, make_transformer, token_batch


def _norm(model: torch.nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@pytest.mark.parametrize("trigger", ["clip_norm", "clip_value", "step", "measure", "all"])
def test_the_suite_runs_at_the_first_of_all_triggers_on_raw_gradients(trigger: str) -> None:
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    recorder, raw = Recorder(), []
    with attached(accelerator, model, optimizer, recorder) as handle:
        for step in range(3):
            accelerator.backward(loss_of(model, token_batch(step=step)))
            raw.append(_norm(model))
            if trigger in ("measure", "all"):
                handle.measure()
            if trigger == "all":
                accelerator.unscale_gradients()
            if trigger in ("clip_norm", "all"):
                accelerator.clip_grad_norm_(model.parameters(), 0.25)
            if trigger in ("clip_value", "all"):
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            assert len(recorder.totals) == (step if trigger == "step" else step + 1)
            clipped = _norm(model)
            optimizer.step()
            optimizer.zero_grad()
            is_clipped = trigger in ("clip_norm", "clip_value", "all")
            assert recorder.afters[-1] == (pytest.approx(clipped, rel=1e-5) if is_clipped else None)
    assert recorder.totals == pytest.approx(raw, rel=1e-5)
    assert recorder.next_step() == 3


def test_two_backward_passes_in_one_micro_batch_are_one_step_and_one_loss() -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    recorder, losses, raw = Recorder(), [], []
    with attached(accelerator, model, optimizer, recorder):
        for number in range(4):
            with accelerator.accumulate(model):
                loss = loss_of(model, token_batch(step=number))
                penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
                accelerator.backward(loss)
                accelerator.backward(penalty)
                losses.append((loss + penalty).item())
                if accelerator.sync_gradients:
                    raw.append(_norm(model))
                optimizer.step()
                optimizer.zero_grad()
    assert recorder.totals == pytest.approx(raw, rel=1e-5)
    assert recorder.losses == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2], rel=1e-6)
    assert [position.num_micro_batches for position in recorder.positions] == [2, 2]


def test_a_step_that_the_loop_skips_after_its_clip_is_none() -> None:
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator)
    recorder, raw = Recorder(), []
    with attached(accelerator, model, optimizer, recorder):
        for number in range(4):
            accelerator.backward(loss_of(model, token_batch(step=number)))
            raw.append(_norm(model))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if number != 1:
                optimizer.step()
            optimizer.zero_grad()
    assert recorder.totals == pytest.approx(raw, rel=1e-5)
    assert recorder.next_step() == 3
    assert len(recorder.afters) == 3


def test_micro_batches_before_the_last_are_left_alone() -> None:
    """A loop that clips at every micro-batch is measured once a step, on the sum."""
    accelerator = make_accelerator(gradient_accumulation_steps=3)
    model, optimizer = prepared(accelerator)
    recorder = Recorder()
    with attached(accelerator, model, optimizer, recorder):
        for number in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, token_batch(step=number)))
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
                optimizer.zero_grad()
    assert len(recorder.totals) == recorder.next_step() == 2


def test_a_short_last_window_is_told() -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 4)), batch_size=1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recorder = Recorder()

    def loop() -> None:
        with attached(accelerator, model, optimizer, recorder):
            for (inputs,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.warns(StabilizerWarning, match=r"step 1 \(batch 5\) has 2 micro-batches.* divided by 4.* 0\.5 of"):
        loop()
    assert [position.is_short for position in recorder.positions] == [False, True]


def test_two_optimizers_step_apart() -> None:
    accelerator = make_accelerator()
    model = make_transformer()
    parameters = list(model.parameters())
    ours = [torch.optim.SGD(parameters[:3], lr=0.1), torch.optim.SGD(parameters[3:], lr=0.1)]
    model, first, second = accelerator.prepare(model, *ours)
    recorder = Recorder()
    with attached(accelerator, model, [first, second], recorder):
        for step in range(2):
            accelerator.backward(loss_of(model, token_batch(step=step)))
            accelerator.clip_grad_norm_(parameters[:3], 1.0)
            assert len(recorder.totals) == 2 * step + 1
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    assert (recorder.next_step(0), recorder.next_step(1)) == (2, 2)
    assert recorder.losses[0] == recorder.losses[1], "both steps come from one backward pass"


def _scaled(init_scale: float) -> tuple[Accelerator, Any, Any]:
    """A scaler on a CPU, which Accelerate refuses there."""
    accelerator = make_accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    model, optimizer = prepared(accelerator, optimizer="adamw")
    accelerator.native_amp = True
    AcceleratorState._shared_state["_mixed_precision"] = "fp16"
    return accelerator, model, optimizer


def _scaled_run(touch: str, recorder: Recorder | None) -> tuple[list[float], list[torch.Tensor]]:
    """Norms as they would be without a scale, and the weights after some steps."""
    accelerator, model, optimizer = _scaled(2.0**14)
    context: Any = contextlib.nullcontext()
    if recorder is not None:
        context = attached(accelerator, model, optimizer, recorder)
    raw = []
    with context:
        for step in range(4):
            accelerator.backward(loss_of(model, token_batch(step=step)))
            raw.append(_norm(model) / accelerator.scaler.get_scale())
            if touch.startswith("unscale"):
                accelerator.unscale_gradients(optimizer) if touch == "unscale" else accelerator.unscale_gradients()
                assert recorder is None or len(recorder.totals) == step + 1
            if touch == "clip":
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return raw, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("touch", ["nothing", "clip", "unscale", "unscale_all"])
def test_scaled_gradients_are_measured_and_left_to_the_scaler(touch: str) -> None:
    recorder = Recorder()
    raw, weights = _scaled_run(touch, recorder)
    assert recorder.totals == pytest.approx(raw, rel=1e-5)
    assert recorder.afters == (pytest.approx([0.5] * 4, rel=1e-5) if touch == "clip" else [None] * 4)
    assert all(map(torch.equal, weights, _scaled_run(touch, None)[1])), "attaching changes no bit"


def test_an_overflow_of_the_scaler_is_its_business(recwarn: Any) -> None:
    accelerator, model, optimizer = _scaled(2.0**127)
    norms = GradNormCallback(heatmap_every_n_steps=None)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with attached(accelerator, model, optimizer, norms) as handle:
        accelerator.backward(loss_of(model, token_batch()) * 1e6)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert optimizer.step_was_skipped
        optimizer.zero_grad()
    assert all(map(torch.equal, before, model.parameters()))
    assert norms.next_step() == 1, "a skipped step counts"
    [(values, step)] = [row for row in handle.rows if "grad_norm/total" in row[0]]
    assert step == 0
    assert values["grad_norm/nonfinite"] > 0
    assert not [warning for warning in recwarn if issubclass(warning.category, StabilizerWarning)]
