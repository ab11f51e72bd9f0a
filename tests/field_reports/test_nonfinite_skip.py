"""Field reports, area nonfinite-skip: gradients that are not finite, in one process."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from stabilizer.callbacks import AdaptiveClipThreshold, LayerClipCallback, attach
from stabilizer.errors import TrainingStoppedError
from tests.clip_loops import HandLoop, gradient_of, norms_of
from tests.event_files import read_run
from tests.field_reports.clip_tools import layer_clip, total_clip
from tests.field_reports.helpers import covers, fit, norm_logger, our_warnings
from tests.lightning_variants import Plain
from tests.models import loss_of
from tests.skip_tools import INF, NAN, train
from tests.tiny_loops import no_log


class Moves(pl.Callback):
    """Notes the optimizer steps that have changed a weight.

    Args:
        accumulation: Micro-batches of a step.
    """

    def __init__(self, accumulation: int = 1) -> None:
        self.accumulation = accumulation
        self.steps: list[int] = []
        self._before: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_index: int) -> None:
        """Copy."""
        self._before = [p.detach().clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        """Compare."""
        if not all(map(torch.equal, self._before, pl_module.parameters())):
            self.steps.append(batch_index // self.accumulation)


@covers("single")
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_B016_the_step_with_bad_gradients_is_left_out_and_no_other(
    precision: str, accumulation: int, tmp_path: Path
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    is_scaled = precision == "16-mixed"
    options: dict[str, Any] = {"precision": precision}
    if is_scaled:
        options = {"plugins": MixedPrecision(precision, "cpu", scaler=scaler)}
    module, moves = Plain(loss=_infinite_at(4 * accumulation + accumulation // 2)), Moves(accumulation)
    with our_warnings() as messages:
        callbacks = [LayerClipCallback(every_n_steps=1), norm_logger(), moves]
        fit(module, tmp_path, callbacks=callbacks, accumulate_grad_batches=accumulation, max_steps=7, **options)
    assert moves.steps == [0, 1, 2, 3, 5, 6]
    scalars = read_run(tmp_path / "run").scalars
    assert scalars["skip/count"][6] == (0 if is_scaled else 1)
    assert scaler.get_scale() == (2.0**9 if is_scaled else 2.0**10)
    assert ("skip/overflows" in scalars) == is_scaled
    assert not is_scaled or scalars["skip/overflows"][6] == 1
    assert len(messages) == (0 if is_scaled else 1), "an overflow is no incident"
    totals = scalars["grad_norm/total"]
    assert [step for step, total in totals.items() if not math.isfinite(total)] == [4]


def _infinite_at(bad: int) -> Any:
    return lambda module, batch, number: loss_of(module.model, batch) * (INF if number == bad else 1)


@pytest.mark.parametrize("value", [INF, -INF, NAN, 1e30, 0.0])
def test_B034_measuring_leaves_every_bit_of_the_gradients(value: float) -> None:
    given = torch.tensor([[1.0, value, -2.0, value]])
    options: dict[str, Any] = {"max_abs_every_n_steps": 1, "strict": True}
    callbacks = [norm_logger(**options), norm_logger(name="inf", norm_type="inf", **options)]
    with our_warnings(), HandLoop(*callbacks, a=4, b=3) as loop:
        received = loop.step(a=given, b=2.0)
    assert torch.equal(received["a"].view(torch.int32), given.view(torch.int32))
    assert torch.equal(received["b"], gradient_of(2.0, 3))
    assert loop.changes == {"a": 0, "b": 0}


@covers("single")
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adamw_fused"])
def test_B041_a_skip_in_automatic_optimization_moves_nothing(optimizer: str) -> None:
    callbacks = [LayerClipCallback(every_n_steps=1)]
    run = train("lightning.pytorch", callbacks, num_steps=5, faults={(3, None): NAN}, optimizer=optimizer)
    assert run.moved(3) == []
    assert any(": exp_avg" in name for name in run.moved(2))
    assert len(run.moved(4)) == len(run.moved(2)) > 0


@covers("single")
def test_B041_a_training_step_that_returns_none_is_no_step(tmp_path: Path) -> None:
    loss = lambda module, batch, number: None if number == 2 else loss_of(module.model, batch)  # noqa: E731
    adaptive = AdaptiveClipThreshold(rule={"name": "mean_multiple"}, strict=True)
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        fit(Plain(loss=loss), tmp_path, callbacks=[norm_logger(), adaptive], max_steps=5)
    totals = read_run(tmp_path / "run").scalars["grad_norm/total"]
    [rule] = adaptive.state_dict()["extra"]["clips"]["0"]["thresholds"]["rules"]
    assert len(totals) == rule["state"]["num_accepted"].item() == adaptive.next_step() == 4
    assert min(totals.values()) > 0


@pytest.mark.parametrize("value", [INF, NAN])
def test_B043_a_clip_leaves_what_is_not_finite_alone_and_names_it(value: float) -> None:
    bad = torch.tensor([[1.0, value, 3.0]])
    clips = [total_clip(1.0, on_nonfinite="ignore"), layer_clip(2.0, on_nonfinite="ignore")]
    with our_warnings() as messages, HandLoop(*clips, a=3, b=2) as loop:
        received = loop.step(a=bad, b=1.5)
        assert torch.equal(received["a"].view(torch.int32), bad.view(torch.int32))
        assert torch.equal(received["b"], gradient_of(1.5, 2)), "the total is not finite: it clips nobody"
        assert norms_of(loop.step(a=1e20, b=0.0)) == pytest.approx({"a": 1.0, "b": 0.0})
    [message] = messages
    count = "1 NaN" if math.isnan(value) else "1 Inf"
    assert message.startswith(f"step 0: the gradient is not finite in a.weight ({count}); ")
    assert "; the gradient is left as it is" in message


@pytest.mark.parametrize("host", ["lightning.pytorch", "accelerate", "plain"])
def test_B049_every_step_is_looked_at_before_the_update(host: str) -> None:
    callback = AdaptiveClipThreshold(on_nonfinite="raise", every_n_steps=10)
    options = {"log_every_n_steps": 10} if host.startswith("lightning") else {}
    run = train(host, [callback], num_steps=20, faults={(13, None): NAN}, **options)
    assert run.error is not None
    assert re.match(r"step 13: the gradient is not finite; (model\.)?lm_head\.weight \(", run.error)
    assert run.num_done == 13
    assert run.moved(13) == []
    assert all(bool(torch.isfinite(value).all()) for value in run.states[-1].values())


def test_B050_the_tensor_is_named_with_its_counts() -> None:
    bad = torch.tensor([[NAN, 1.0, NAN, INF]])
    options: dict[str, Any] = {"layer1": 2, "layer2": 4, "layer3": 3}
    with our_warnings() as messages, HandLoop(LayerClipCallback(), **options) as loop:
        loop.step(layer1=1.0, layer2=1.0, layer3=1.0)
        assert loop.step(layer1=1.0, layer2=bad, layer3=1.0) == dict.fromkeys(options)
    [message] = messages
    assert message.startswith("step 1: the gradient is not finite in layer2.weight (2 NaN, 1 Inf); ")
    assert "; the step is skipped" in message
    assert "layer1" not in message
    assert "layer3" not in message
    with our_warnings() as messages, HandLoop(LayerClipCallback(), **options) as loop:
        loop.step(layer1=NAN, layer2=bad, layer3=1.0)
    assert "in layer2.weight (2 NaN, 1 Inf) first in backward order, then layer1.weight (2 NaN); " in messages[0]
    # What is bad in one place alone may cost that place alone.
    with our_warnings() as messages, HandLoop(LayerClipCallback(on_nonfinite="zero_layer"), **options) as loop:
        received = loop.step(layer1=1.0, layer2=bad, layer3=2.0)
    assert norms_of(received) == pytest.approx({"layer1": 1.0, "layer2": 0.0, "layer3": 2.0})


class Born(nn.Module):
    """Three blocks. In one of them something is born that is not finite: in its forward or its backward pass.

    Args:
        place: Which block.
        function: What it does to its zeros.
    """

    def __init__(self, place: int, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.place, self.function = place, function

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.place:
                x = x + self.function(x - x.detach())
        return x.square().mean()


@pytest.mark.parametrize(
    ("place", "function", "origin", "first"),
    [
        (2, torch.log, "the loss is not finite on rank 0", "blocks.2.bias"),
        (1, torch.sqrt, "every rank's loss is finite: it was born in a backward pass", "blocks.1.bias"),
    ],
)
def test_B057_the_first_bad_parameter_and_where_it_was_born(place: int, function: Any, origin: str, first: str) -> None:
    model = Born(place, function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"callbacks": [LayerClipCallback()], "log": no_log}
    with our_warnings() as messages, attach(None, model=model, optimizer=optimizer, **options) as handle:
        loss = model(torch.ones(2, 3))
        loss.backward()
        handle.record_loss(loss)
        optimizer.step()
    [message] = messages
    assert message.startswith(f"step 0: the gradient is not finite in {first} (")
    assert f"; {origin}" in message
    assert "the step is skipped" in message
    # Gradients behind the place where it was born are good.
    assert ("blocks.2." in message) == (place == 2)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "sgd", "sgd_fused"])
def test_B099_a_skipped_step_leaves_no_trace(optimizer: str) -> None:
    callbacks = lambda: [LayerClipCallback(), AdaptiveClipThreshold()]  # noqa: E731
    skipped = train("plain", callbacks(), num_steps=6, faults={(3, None): NAN}, optimizer=optimizer)
    assert skipped.moved(3) == []
    never = train("plain", callbacks(), num_steps=6, left_out=[3], optimizer=optimizer)
    assert [list(state) for state in skipped.states] == [list(state) for state in never.states]
    for one, other in zip(skipped.states, never.states, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@covers("single")
def test_B118_the_last_good_checkpoints_stay(tmp_path: Path) -> None:
    def files() -> list[str]:
        return sorted(path.name for path in (tmp_path / "saved").glob("*.ckpt"))

    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(
            tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
        )

    guard = AdaptiveClipThreshold(on_nonfinite="raise")
    options: dict[str, Any] = {"enable_checkpointing": True, "max_steps": 10}
    with our_warnings(), pytest.raises(TrainingStoppedError, match=r"^step 5: the gradient is not finite"):
        fit(Plain(loss=_infinite_at(5)), tmp_path, callbacks=[saves(), guard], **options)
    assert files() == ["step=4.ckpt", "step=5.ckpt"]
    for name in files():
        saved = torch.load(tmp_path / "saved" / name, weights_only=True)
        tensors = [*saved["state_dict"].values()]
        assert all(bool(torch.isfinite(value).all()) for value in tensors), name
