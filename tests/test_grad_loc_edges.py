"""GradLoc in loops that are not as one expects: windows that are thrown away, scales and precisions, what is kept."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilizer.callbacks import GradLocCallback, attach
from stabilizer.localize.incident import Incident
from stabilizer.localize.suspects import find_suspects
from tests.localize_loops import grad_loc, loss_of_tokens
from tests.models import VOCABULARY, make_transformer

FAULTY = 14
NAMED = [(0, 0, 1, 7)]
Batch = tuple[Any, Tensor, Tensor]


def make_batch(seed: int, *, is_bad: bool = False, factor: float = 3000.0) -> Batch:
    """Tokens, targets and weights, each (4, 16); the weight of row 1, position 7 is bad."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(VOCABULARY, (4, 16), generator=generator) for _ in range(2))
    weights = torch.ones(4, 16)
    if is_bad:
        weights[1, 7] = factor
    return tokens, targets, weights


def soon(folder: Path, **options: Any) -> GradLocCallback:
    """Warm before the fault."""
    return grad_loc(folder, **{"warmup_steps": 12, "rule": {"name": "robust_log", "warmup_steps": 12}, **options})


class Loop:
    """A plain loop on one small model.

    Args:
        callback: Watches it.
        model: Default a transformer.
        loss_fn: Of model and batch.
        scaler: Of its losses.
    """

    def __init__(
        self,
        callback: GradLocCallback,
        *,
        model: nn.Module | None = None,
        loss_fn: Callable[..., Tensor] = loss_of_tokens,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model = make_transformer(num_layers=2) if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.loss_fn, self.scaler = loss_fn, scaler
        self.handle: Any = attach(
            None,
            model=self.model,
            optimizer=self.optimizer,
            callbacks=[callback],
            loss_fn=loss_fn,
            log=lambda values, step: None,
        )

    def backward(self, batch: Any) -> None:
        self.handle.record_batch(batch)
        loss = self.loss_fn(self.model, batch)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, *batches: Any) -> None:
        for batch in batches:
            self.backward(batch)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()


def units(incident: Incident) -> list[tuple[int, int, int, int | None]]:
    return [(one.rank, one.micro_batch, one.row, one.position) for one in incident.tokens]


def check(callback: GradLocCallback, *, step: int = FAULTY, kind: str = "D") -> Incident:
    """One incident, that names the token and proves it."""
    (incident,) = callback.incidents
    assert (incident.step, incident.type, incident.reproducible, incident.error) == (step, kind, True, None)
    assert units(incident) == NAMED
    return incident


def alive(references: Sequence[weakref.ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("num_thrown", [0, 1, 3])
def test_a_window_that_is_thrown_away_is_not_rebuilt(num_thrown: int, tmp_path: Path) -> None:
    callback = soon(tmp_path, on_found="drop_tokens")
    loop, given = Loop(callback), []
    loop.optimizer.register_step_pre_hook(lambda *_: given.extend(p.grad.clone() for p in loop.model.parameters()))
    for step in range(FAULTY):
        loop.step(make_batch(2 * step), make_batch(2 * step + 1))
    for number in range(num_thrown):
        loop.backward(make_batch(10**6 + number))
    loop.optimizer.zero_grad()
    given.clear()
    reference = make_transformer(num_layers=2)
    reference.load_state_dict(loop.model.state_dict())
    loop.step(make_batch(1001, is_bad=True), make_batch(1002))
    for batch in (make_batch(1001, is_bad=True, factor=0.0), make_batch(1002)):
        loss_of_tokens(reference, batch).backward()
    wanted = [p.grad for p in reference.parameters()]
    incident = check(callback)
    assert (incident.action, incident.num_rebuild_passes) == ("drop_tokens", 2)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in wanted))
    assert incident.counterfactual_norm == pytest.approx(norm, rel=1e-4)
    assert all((mine - other).norm() <= 1e-5 * norm for mine, other in zip(given, wanted, strict=True))


def test_the_batches_of_overflows_are_let_go(tmp_path: Path) -> None:
    callback = soon(tmp_path, on_found="drop_tokens")
    loop = Loop(callback, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6))
    references = []
    for step in range(FAULTY + 3):
        batch = make_batch(step, is_bad=step in (4, 5, 6, FAULTY + 2), factor=3000.0 if step > 6 else math.inf)
        references.append(weakref.ref(batch[0]))
        loop.backward(batch)
        loop.handle.measure(scaler=loop.scaler)
        loop.step()
        del batch
        assert alive(references) <= 1
    assert check(callback, step=callback.incidents[0].step).num_rebuild_passes == 1


def test_a_loss_of_two_forwards(tmp_path: Path) -> None:
    """As DPO's."""
    callback = soon(tmp_path)
    loop = Loop(callback, loss_fn=lambda model, pair: sum(loss_of_tokens(model, one) for one in pair))
    for step in range(FAULTY + 1):
        loop.step((make_batch(2 * step, is_bad=step == FAULTY), make_batch(2 * step + 1)))
    assert check(callback).num_passes <= 3


class Returning(nn.Module):
    """Returns its loss, and keeps what type its logits have had."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lm_head = make_transformer(num_layers=1), nn.Linear(VOCABULARY, VOCABULARY)
        self.dtypes: list[torch.dtype] = []

    def forward(self, tokens: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Tensor]:
        logits = self.lm_head(self.inner(tokens))
        self.dtypes.append(logits.dtype)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return {"loss": (losses.view(targets.shape) * weights).mean()}


@pytest.mark.parametrize(("dtype", "factor", "kind"), [(torch.bfloat16, 3000.0, "D"), (torch.float16, 1e9, "N")])
def test_autocast_is_on_in_the_replay(dtype: torch.dtype, factor: float, kind: str, tmp_path: Path) -> None:
    callback, model, dtypes = soon(tmp_path), Returning(), set()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.lm_head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    handle = attach(None, model=model, optimizer=optimizer, callbacks=[callback], log=lambda values, step: None)
    with handle:
        for step in range(FAULTY + 1):
            with torch.autocast("cpu", dtype=dtype):
                loss = model(*make_batch(step, is_bad=step == FAULTY, factor=factor))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    incident = check(callback, kind=kind)
    assert dtypes == {dtype}
    if kind == "D":
        assert incident.replayed_norm == pytest.approx(incident.observed_norm, rel=1e-6)


@pytest.mark.parametrize("told", ["step", "unscale_", "measure"])
def test_a_scale_that_was_not_told(told: str, tmp_path: Path) -> None:
    callback = soon(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = Loop(callback, scaler=scaler)
    for step in range(FAULTY + 1):
        loop.backward(make_batch(step, is_bad=step == FAULTY))
        if told == "unscale_":
            scaler.unscale_(loop.optimizer)
        if told == "measure":
            loop.handle.measure(scaler=scaler)
        loop.step()
    (incident,) = callback.incidents
    parts = [(one.norm, one.attention_norm, one.mlp_norm) for one in incident.layers if one.name.startswith("layers.")]
    assert len(parts) == 2
    for norm, attention, mlp in parts:
        assert attention is not None
        assert mlp is not None
        assert math.hypot(attention, mlp) == pytest.approx(norm, rel=1e-3)
    if told == "measure":
        check(callback)
        return
    assert (incident.type, incident.tokens, incident.counterfactual_norm) == ("D", (), None)
    assert incident.error is not None
    assert "1024 times those of the replay" in incident.error
    assert "handle.measure(scaler=scaler)" in incident.error


@pytest.mark.parametrize(("factor", "kind"), [(100.0, ("T", False)), (math.nan, ("N", None))])
def test_a_spike_that_is_made_after_the_backward_pass(factor: float, kind: Any, tmp_path: Path) -> None:
    """There is nothing to run again: the loss is taken once a micro-batch."""
    num_calls = 0

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return loss_of_tokens(model, batch)

    callback = soon(tmp_path, on_found="drop_tokens")
    loop = Loop(callback, loss_fn=loss_fn)
    for step in range(FAULTY + 1):
        loop.backward(make_batch(2 * step))
        loop.backward(make_batch(2 * step + 1))
        if step == FAULTY:
            for parameter in loop.model.parameters():
                parameter.grad.mul_(factor)
        loop.step()
    (incident,) = callback.incidents
    assert ((incident.type, incident.reproducible), incident.num_passes) == (kind, 0)
    assert (incident.tokens, incident.action, incident.num_rebuild_passes) == ((), "report", 0)
    assert num_calls == 2 * (FAULTY + 1)
    assert any("changed after the backward pass" in note for note in incident.notes)


def test_a_model_in_evaluation_mode(tmp_path: Path) -> None:
    callback = soon(tmp_path)
    loop = Loop(callback, model=make_transformer(num_layers=2).eval())
    for step in range(FAULTY + 1):
        loop.step(make_batch(step, is_bad=step == FAULTY))
    check(callback)
    assert not loop.model.training


class Reading(nn.Module):
    """Reads vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lm_head = nn.Linear(8, 8), nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(torch.tanh(self.body(x)))
        return logits


@pytest.mark.parametrize("kind", ["leaf", "with a graph"])
def test_an_input_that_requires_a_gradient(kind: str, tmp_path: Path) -> None:
    def train(callback: GradLocCallback | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, encoder, prompt = Reading(), nn.Linear(8, 8), nn.Parameter(torch.randn(4, 16, 8))
        loop = Loop(callback or soon(tmp_path, warmup_steps=1000), model=model)
        outer = [prompt] if kind == "leaf" else list(encoder.parameters())
        for step in range(FAULTY + 1):
            _, targets, weights = make_batch(step, is_bad=step == FAULTY)
            for parameter in outer:
                parameter.grad = None
            loop.step((prompt if kind == "leaf" else encoder(prompt.detach()), targets, weights))
        return [parameter.grad for parameter in outer]

    callback = soon(tmp_path)
    gradients, bare = train(callback), train(None)
    check(callback)
    assert all(torch.equal(mine, other) for mine, other in zip(gradients, bare, strict=True))


def test_one_bad_micro_batch_of_many_ranks_is_the_only_suspect() -> None:
    random.seed(0)
    for sigma in (0.2, 0.3, 0.4):
        norms = [[random.lognormvariate(0, sigma) for _ in range(8)] for _ in range(2000)]
        norms[7][3] = 30000.0
        for factor in (2.0, 3.0):
            found = find_suspects(norms, [1.0] * 2000, factor=factor, fallback=1.0)
            assert [(one.rank, one.micro_batch) for one in found if one.is_suspect] == [(7, 3)]
