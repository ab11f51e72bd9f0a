"""NumericsCallback beside a gradient scaler: overflows that are none of its business, and those that never end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stabilizer.callbacks import NumericsCallback, attach
from stabilizer.numerics import NumericsFinding
from tests.numerics_runs import findings_of, make_numerics

pytestmark = [
    pytest.mark.covers(feature="broken steps told apart", strategy="single", host="plain"),
    pytest.mark.filterwarnings("ignore::stabilizer.errors.StabilizerWarning"),
]
WIDTH = 8


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.nan


class Model(nn.Module):
    """Two maps, with something between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        """Map x to its loss."""
        hidden: Tensor = self.second(self.between(self.first(x)))
        return hidden.float().square().mean()


@dataclasses.dataclass
class Loop:
    """A plain loop in half precision.

    Attributes:
        scaler: Its scaler.
        factor: What the loss is multiplied by at a step.
        between: See `Model`.
        fused: Whether the optimizer's step is.
    """

    callback: NumericsCallback
    scaler: torch.amp.GradScaler
    factor: Callable[[int], float] = lambda step: 1.0
    between: Callable[[Tensor], Tensor] | None = None
    fused: bool = False
    steps: int = 40
    hold: float | None = None
    now: int = 0

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        """In half precision."""
        with torch.autocast("cpu", torch.float16):
            loss: Tensor = model(x)
        return loss * self.factor(self.now)

    def run(self) -> list[NumericsFinding]:
        """Train, and give what was found."""
        torch.manual_seed(0)
        model = Model()
        if self.between is not None:
            model.between = self.between
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=self.fused)
        self.rows: list[tuple[dict[str, float], int]] = []
        handle = attach(
            None,
            model=model,
            optimizer=optimizer,
            callbacks=[self.callback],
            loss_fn=self.loss,
            log=lambda values, step: self.rows.append((values, step)),
        )
        generator = torch.Generator().manual_seed(1)
        with handle:
            for step in range(self.steps):
                self.now = step
                if self.hold is not None and self.scaler._scale is not None:
                    self.scaler._scale.fill_(self.hold)
                x = torch.randn(4, WIDTH, generator=generator)
                handle.record_batch(x)
                self.scaler.scale(self.loss(model, x)).backward()
                handle.measure(scaler=self.scaler)
                self.scaler.step(optimizer)
                self.scaler.update()
                optimizer.zero_grad()
        return findings_of(self.callback)


def make_scaler(scale: float = 2.0**16, *, growth_interval: int = 1000) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


@pytest.mark.parametrize("fused", [False, True])
def test_the_way_to_a_scale_and_single_overflows_are_none_of_its_business(fused: bool, tmp_path: Path) -> None:
    """The scale is found from far above, and one step overflows later."""
    scaler = make_scaler(2.0**28)
    loop = Loop(make_numerics(tmp_path), scaler, factor=lambda step: 1e7 if step == 30 else 1.0, fused=fused)
    assert loop.run() == []
    assert scaler.get_scale() < 2.0**24


@pytest.mark.parametrize("fused", [False, True])
def test_overflows_that_never_end_are_told_once_as_overflows_of_float16(fused: bool, tmp_path: Path) -> None:
    """No loss scale helps, since the gradient itself is too large; without a scale it is finite in itself."""
    loop = Loop(make_numerics(tmp_path), make_scaler(2.0**10), factor=lambda step: 1e13, fused=fused)
    [finding] = loop.run()
    assert (finding.kind, finding.verdict, finding.rank) == ("stuck_loss_scale", "scaler_overflow", 0)
    assert finding.evidence["num_overflows"] == 16
    assert finding.evidence["loss_scale"] == 2.0**-5
    assert "no NaN of the model" in finding.text
    assert "bfloat16" in finding.remedy


def test_a_real_nan_under_a_scaler_is_told_from_an_overflow(tmp_path: Path) -> None:
    def between(x: Tensor) -> Tensor:
        bad: Tensor = _BadGradient.apply(x)
        return bad

    [finding] = Loop(make_numerics(tmp_path), make_scaler(2.0**10), between=between).run()
    assert (finding.kind, finding.verdict) == ("stuck_loss_scale", "repeats")
    assert "makes NaN in the backward pass of its own code" in finding.text


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_that_is_not_finite_is_no_overflow(fused: bool, tmp_path: Path) -> None:
    """At the first such step, whatever the scaler thinks of it: only where losses are told."""
    loop = Loop(make_numerics(tmp_path), make_scaler(16.0), factor=lambda step: math.nan if step == 9 else 1.0)
    loop.fused = fused
    losses: list[Tensor] = []
    original = loop.loss

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        losses.append(original(model, x))
        return losses[-1]

    loop.loss = loss  # type: ignore[method-assign]
    found = told_losses(loop, losses)
    assert [(one.kind, one.verdict, one.step) for one in found] == [("nonfinite_loss", "repeats", 9)]


def told_losses(loop: Loop, losses: list[Tensor]) -> list[NumericsFinding]:
    """The same loop, which records its losses."""
    handles: list[Any] = []
    original = loop.scaler.scale

    def scale(loss: Tensor) -> Tensor:
        handles[0].record_loss(loss.detach())
        scaled: Tensor = original(loss)
        return scaled

    loop.scaler.scale = scale  # type: ignore[method-assign,assignment]
    with contextlib.ExitStack() as stack:
        stack.callback(handles.clear)
        join = loop.callback.join_run

        def joined(host: Any) -> None:
            handles.append(loop.callback.driver)
            join(host)

        loop.callback.join_run = joined  # type: ignore[method-assign]
        return loop.run()


def test_a_scale_that_is_held_down_is_stuck(tmp_path: Path) -> None:
    loop = Loop(make_numerics(tmp_path), make_scaler(2.0**10), hold=2.0**-20)
    found = {one.kind: one for one in loop.run()}
    finding = found["stuck_loss_scale"]
    assert (finding.step, finding.verdict) == (12, None)  # the scaler has none before the first step
    assert finding.evidence["loss_scale"] == 2.0**-20
    assert finding.evidence["num_steps_at_floor"] == 10
    # Most of the gradient is lost at such a scale.
    assert found["underflow"].evidence["share"] > 0.5
    assert len(found) == 2


def test_a_scale_that_grows_for_ever_is_not_needed(tmp_path: Path) -> None:
    loop = Loop(make_numerics(tmp_path), make_scaler(2.0**26, growth_interval=1))
    loop.loss = lambda model, x: model(x) * 1e-6  # type: ignore[method-assign]  # in float32
    [finding] = loop.run()
    assert (finding.kind, finding.step) == ("stuck_loss_scale", 9)
    assert "leave the GradScaler out" in finding.remedy


def test_scale_and_underflow_are_logged_at_the_interval(tmp_path: Path) -> None:
    loop = Loop(make_numerics(tmp_path), make_scaler(256.0), steps=12)
    assert loop.run() == []
    logged = {name: [step for values, step in loop.rows if name in values] for name in ("numerics/loss_scale",)}
    assert logged == {"numerics/loss_scale": [0, 5, 10]}
    shares = [values["numerics/underflow_fp16"] for values, _ in loop.rows if "numerics/underflow_fp16" in values]
    assert len(shares) == 3
    assert all(0 <= share < 0.5 for share in shares)


def share_of(gradients: list[Tensor], scale: float) -> float:
    """Elements that float16 does not hold as normal numbers at a scale, by its own conversion."""
    values = torch.cat([gradient.double().flatten() for gradient in gradients])
    values = values[values != 0]
    return float((values.mul(scale).abs() < torch.finfo(torch.float16).tiny).double().mean())


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_the_share_is_that_at_the_scale_whether_or_not_it_is_in_the_gradients(
    is_unscaled: bool, tmp_path: Path
) -> None:
    loop = Loop(make_numerics(tmp_path), make_scaler(0.25), steps=1)
    expected: list[float] = []
    join = loop.callback.join_run

    def joined(host: Any) -> None:
        join(host)
        handle, measure = loop.callback.driver, loop.callback.driver.measure

        def own(*, scaler: Any) -> None:
            gradients = [p.grad for p in host.model.parameters() if p.grad is not None]
            expected.append(share_of(gradients, 1.0))
            if is_unscaled:
                scaler.unscale_(host.optimizers[0])
            measure(scaler=scaler)

        handle.measure = own

    loop.callback.join_run = joined  # type: ignore[method-assign]
    loop.run()
    [share] = [values["numerics/underflow_fp16"] for values, _ in loop.rows if "numerics/underflow_fp16" in values]
    assert 0.01 < expected[0] < 0.9
    assert share == pytest.approx(expected[0])
