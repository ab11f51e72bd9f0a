"""Field reports, area accumulation: the same in loops of Accelerate and plain ones."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilizer.callbacks import LossMeanVarCallback, attach
from stabilizer.callbacks.context import Position
from tests import reference
from tests.accelerate_loops import Recorder, make_accelerator
from tests.field_reports.clip_tools import layer_clip, total_clip
from tests.field_reports.helpers import LEARNING_RATE, TOLERANCE, covers, norm_logger, our_warnings
from tests.lightning_models import expected_batches, make_loader
from tests.models import Batch, loss_of, make_mlp, make_transformer, mlp_batch, reference_gradients, token_batch


def _accumulate(
    host: str,
    callbacks: Sequence[Any],
    batches: Sequence[Batch],
    *,
    accumulation: int,
    signs: Sequence[float] = (1,),
    learning_rate: float = 0.0,
    max_norm: float | None = None,
    clips_always: bool = False,
) -> list[Tensor]:
    """Accumulate, in `accelerator.accumulate` or by hand; returns the weights."""
    model: Any = make_transformer()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=learning_rate)
    bare, accelerator = model, None
    if host == "accelerate":
        accelerator = make_accelerator(gradient_accumulation_steps=accumulation)
        model, optimizer = accelerator.prepare(model, optimizer)
    attached = attach(accelerator, model=model, optimizer=optimizer, callbacks=callbacks, log=lambda *row: None)
    with attached as handle:
        for number, batch in enumerate(batches):
            loss = loss_of(model, batch) * signs[number % len(signs)]
            if accelerator is not None:
                with accelerator.accumulate(model):
                    accelerator.backward(loss)
                    if max_norm is not None and (accelerator.sync_gradients or clips_always):
                        # A generator, which is used up by whoever looks at it first.
                        accelerator.clip_grad_norm_((p for p in bare.parameters()), max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            (loss / accumulation).backward()
            handle.record_loss(loss)
            if number % accumulation == accumulation - 1:
                if max_norm is not None:
                    handle.measure()
                    torch.nn.utils.clip_grad_norm_((p for p in bare.parameters()), max_norm)
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach() for parameter in bare.parameters()]


on_both = pytest.mark.parametrize("host", ["accelerate", "plain"])


@covers("single", "accelerate")
@covers("single", "plain")
@on_both
def test_B032_one_norm_of_the_full_sum_of_micro_batches_that_cancel_in_loops(host: str) -> None:
    signs = (1, 1, -1, -1)
    batches = [batch for step in range(2) for batch in expected_batches("transformer", step, num_micro_batches=4)]
    callback = norm_logger(strict=True)
    # The loop clips after every micro-batch, so high that nothing is cut: these are no steps.
    _accumulate(host, [callback], batches, accumulation=4, signs=signs, max_norm=1e6, clips_always=True)
    history = callback.norm_history()
    assert history.steps == [0, 1]
    for step, total in enumerate(history.totals.tolist()):
        model = make_transformer().double()
        for sign, batch in zip(signs, batches[4 * step : 4 * step + 4], strict=True):
            (loss_of(model, batch) * sign / 4).backward()
        summed = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert total == pytest.approx(reference.total_norm(summed), rel=TOLERANCE)
        alone = reference_gradients(make_transformer(), batches[4 * step : 4 * step + 1])
        assert total < 0.8 * reference.total_norm(alone), "nothing cancels: the test says nothing"


@covers("single", "accelerate")
@covers("single", "plain")
@on_both
def test_B032_one_clip_of_the_full_sum_of_micro_batches_that_cancel_in_loops(host: str) -> None:
    model, batches, signs = (
        make_transformer().double(),
        expected_batches("transformer", 0, num_micro_batches=4),
        (1, -1),
    )
    for number, batch in enumerate(batches):
        (loss_of(model, batch) * signs[number % 2] / 4).backward()
    raw = {name: parameter.grad for name, parameter in model.named_parameters()}
    clip = total_clip(0.5 * reference.total_norm(raw))
    weights = _accumulate(host, [clip], batches, accumulation=4, signs=signs, learning_rate=1.0)
    for old, new, gradient in zip(make_transformer().parameters(), weights, raw.values(), strict=True):
        torch.testing.assert_close((old - new).double(), gradient / 2, rtol=1e-4, atol=1e-6)


@covers("single", "accelerate")
@covers("single", "plain")
@on_both
def test_B033_the_loss_does_not_depend_on_how_a_batch_is_cut(host: str) -> None:
    means = {}
    for accumulation in (1, 2, 4):
        losses = LossMeanVarCallback(windows=[2], every_n_steps=1, strict=True)
        whole = [token_batch(step=step, size=12) for step in range(2)]
        cut = [tuple(tensor.chunk(accumulation)) for batch in whole for tensor in batch]
        batches = [pair for inputs, targets in zip(cut[::2], cut[1::2], strict=True) for pair in zip(inputs, targets)]  # noqa: B905
        _accumulate(host, [losses], batches, accumulation=accumulation)
        means[accumulation] = losses.statistics()["mean_2"]
    assert means[1] == pytest.approx(sum(loss_of(make_transformer(), batch).item() for batch in whole) / 2)
    assert means[2] == pytest.approx(means[1], rel=1e-6)
    assert means[4] == pytest.approx(means[1], rel=1e-6)


def test_B033_micro_batches_of_unequal_length_weigh_by_their_tokens() -> None:
    means = []
    for sizes in ([12], [8, 4], [5, 4, 3]):
        model = make_transformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        losses = LossMeanVarCallback(windows=[2], every_n_steps=1, strict=True)
        inputs, targets = token_batch(size=12)
        targets[:5, 1:] = -100  # which the model does not see: only the loop knows how many tokens count
        with attach(None, model=model, optimizer=optimizer, callbacks=[losses], log=lambda *row: None) as handle:
            for batch in zip(inputs.split(sizes), targets.split(sizes), strict=True):
                loss = loss_of(model, batch)
                num_tokens = (batch[1] != -100).sum()
                (loss * num_tokens / (5 + 7 * 8)).backward()
                handle.record_loss(loss, weight=num_tokens)
            optimizer.step()
        means.append(losses.statistics()["mean_2"])
    assert means == pytest.approx([means[0]] * 3, rel=1e-6)


@on_both
def test_B069_every_hook_of_ours_runs_once_an_optimizer_step_in_loops(host: str) -> None:
    recorder, norms = Recorder(strict=True), norm_logger(strict=True)
    batches = [token_batch(step=number) for number in range(9)]
    _accumulate(host, [recorder, norms], batches, accumulation=3, max_norm=1.0)
    assert len(recorder.totals) == len(recorder.losses) == len(recorder.afters) == 3
    assert [position.num_micro_batches for position in recorder.positions] == [3, 3, 3]
    assert [position.batch_index for position in recorder.positions] == [2, 5, 8]
    every = [loss_of(make_transformer(), batch).item() for batch in batches]
    assert recorder.losses == pytest.approx([sum(every[n : n + 3]) / 3 for n in (0, 3, 6)])


@on_both
def test_B069_clip_and_skip_act_once_an_optimizer_step_in_loops(host: str) -> None:
    clips = [layer_clip(0.3), total_clip(0.5)]
    recorder = Recorder(strict=True)
    batches = [token_batch(step=number) for number in range(9)]
    signs = [1.0] * 9
    signs[4] = torch.nan
    with our_warnings() as messages:
        weights = _accumulate(host, [*clips, recorder], batches, accumulation=3, signs=signs, learning_rate=0.1)
    assert ["; the step is skipped" in message for message in messages] == [True]
    saved = [clip.state_dict()["extra"]["clips"]["0"] for clip in clips]
    assert [(one["rates"]["num_steps"], one["skips"]["count"]) for one in saved] == [(3, 1)] * 2
    assert recorder.afters[::2] == pytest.approx([0.5, 0.5], rel=TOLERANCE)
    assert all(bool(torch.isfinite(weight).all()) for weight in weights)


@on_both
def test_B094_a_clip_of_a_generator_still_clips(host: str) -> None:
    """Whoever looks at the parameters before the clip must leave them to it."""
    clip, learning_rate = 0.25, 1.0
    batches = [token_batch(step=number) for number in range(2)]
    recorder = Recorder(strict=True)
    options: dict[str, Any] = {"accumulation": 2, "learning_rate": learning_rate, "max_norm": clip}
    weights = _accumulate(host, [recorder], batches, **options)
    expected = reference.total_norm(reference_gradients(make_transformer(), batches))
    assert recorder.totals == pytest.approx([expected], rel=TOLERANCE)
    assert expected > 2 * clip
    moved = [new - old for new, old in zip(weights, make_transformer().parameters(), strict=True)]
    assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(clip, rel=1e-4)


def test_B026_a_short_last_window_in_accelerate() -> None:
    weights = []
    for is_on in (False, True):
        accelerator = make_accelerator(gradient_accumulation_steps=4)
        bare, recorder = make_transformer(), Recorder(strict=True)
        loader = make_loader("transformer", length=10 * 3)
        sgd = torch.optim.SGD(bare.parameters(), lr=LEARNING_RATE)
        model, optimizer, prepared_loader = accelerator.prepare(bare, sgd, loader)
        options: dict[str, Any] = {"callbacks": [recorder], "log": lambda *row: None}
        around: Any = contextlib.nullcontext()
        if is_on:
            around = attach(accelerator, model=model, optimizer=optimizer, **options)
        with our_warnings() as messages, around:
            for batch in prepared_loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, tuple(batch)))
                    optimizer.step()
                    optimizer.zero_grad()
        weights.append([parameter.detach() for parameter in bare.parameters()])
    assert all(map(torch.equal, *weights)), "the callback changed a gradient"
    assert recorder.positions == [Position(3, 4, 4), Position(7, 4, 4), Position(9, 2, 4)]
    [message] = messages
    assert message.startswith("step 2 (batch 9) has 2 micro-batches, but each loss is divided by 4")


def test_B088_the_alarm_names_step_and_batch_in_loops() -> None:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses, rows = LossMeanVarCallback(windows=[2], every_n_steps=1), []
    options: dict[str, Any] = {"callbacks": [losses], "log": lambda *row: rows.append(row)}
    with our_warnings() as messages, attach(None, model=model, optimizer=optimizer, **options) as handle:
        for number in range(8):
            loss = loss_of(model, mlp_batch(step=number)) + (torch.nan if number == 5 else 0)
            loss.backward()
            handle.record_loss(loss)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert [step for values, step in rows if "loss/mean_2" in values] == [0, 1, 2, 3]
    [message] = messages
    assert message.startswith("step 2 (batch 5): the loss is not finite on rank 0 (1 micro-batch since")
