"""GradLoc where it cannot search: ranks that failed or that add up by hand, other optimizers; and what is kept then."""

from __future__ import annotations

import gc
import importlib
import logging
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from stabilizer.callbacks import GradLocCallback, attach
from stabilizer.callbacks.hosting import JOINED
from stabilizer.errors import StabilizerWarning
from tests.launcher import run_distributed
from tests.lightning_models import PACKAGES, make_trainer
from tests.localize_loops import loss_of_tokens, written
from tests.models import make_transformer
from tests.test_grad_loc_edges import FAULTY, Loop, alive, check, make_batch, soon, units


def _tell(callback: GradLocCallback) -> list[dict[str, Any]]:
    names = ("step", "type", "reproducible", "num_passes", "counterfactual_norm", "action", "error", "notes")
    return [{"units": units(one), **{name: getattr(one, name) for name in names}} for one in callback.incidents]


def _fail_at(callback: GradLocCallback, step: int) -> Callable[[Any], None]:
    real = callback.on_gradients

    def on_gradients(context: Any) -> None:
        if context.step == step:
            raise RuntimeError("planted")
        real(context)

    return on_gradients


def _backward(loop: Loop, kind: str, *, step: int, rank: int) -> None:
    is_faulty = step == FAULTY and rank == 0 and kind != "after"
    loop.backward(make_batch(10 * step + rank, is_bad=is_faulty))
    for parameter in loop.model.parameters():
        if kind == "by hand":
            dist.all_reduce(parameter.grad)
            parameter.grad.mul_(4)  # whatever it makes of the sum
        if kind == "after" and step == FAULTY:
            parameter.grad.mul_(100)


def _gradients(loop: Loop) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in loop.model.parameters()]


def _ranks(rank: int, world_size: int, kind: str, folder: str) -> Any:
    """Train with a fault on rank 0, and something that is wrong on rank 1 or everywhere."""
    logging.disable(logging.CRITICAL)  # what fails is logged with its traceback
    on_found = "report" if kind == "fails at it" else "drop_tokens"
    callback = soon(Path(folder), strict=False, dump_batch=kind == "no incident", on_found=on_found)
    model: nn.Module = make_transformer(num_layers=2)
    given: list[torch.Tensor] = []
    patch: Any = mock.patch("stabilizer.callbacks.incidents.make_incident", side_effect=RuntimeError("planted"))
    loop = Loop(callback, model=model if kind == "by hand" else DistributedDataParallel(model))
    if kind in ("failed", "fails at it") and rank == 1:
        callback.on_gradients = _fail_at(callback, FAULTY - 2 * (kind == "failed"))  # type: ignore[method-assign]
    if kind == "no incident" and rank == 1:
        patch.start()
    try:
        for step in range(FAULTY):
            _backward(loop, kind, step=step, rank=rank)
            loop.step()
        _backward(loop, kind, step=FAULTY, rank=rank)
        complete = _gradients(loop)
        loop.optimizer.register_step_pre_hook(lambda *_: given.extend(_gradients(loop)))
        loop.step()
    finally:
        mock.patch.stopall()
        logging.disable(logging.NOTSET)
    loop.handle.close()
    is_left = all(torch.equal(mine, other) for mine, other in zip(given, complete, strict=True))
    weights = torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])
    return _tell(callback), is_left, weights


def _train(kind: str, folder: Path) -> tuple[list[list[dict[str, Any]]], list[bool]]:
    (first, is_left, weights), (second, is_left_too, others) = run_distributed(_ranks, kind, str(folder), timeout=40)
    assert torch.equal(weights, others)
    return [first, second], [is_left, is_left_too]


@pytest.mark.parametrize("kind", ["failed", "fails at it"])
@pytest.mark.covers(host="plain", feature="token localisation", strategy="ddp")
def test_a_rank_whose_callback_has_failed_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    """Nobody knows yet of one that fails in the very step with the spike: it outweighs the rank that wants a search."""
    told, is_left = _train(kind, tmp_path)
    assert told == [[], []]
    assert is_left == [True, True]
    assert written(tmp_path) == {}


@pytest.mark.covers(host="plain", feature="token localisation", strategy="ddp")
def test_a_rank_that_cannot_put_the_incident_together(tmp_path: Path) -> None:
    (first, second), is_left = _train("no incident", tmp_path)
    assert second == []
    assert [(one["step"], one["type"], one["units"]) for one in first] == [(FAULTY, "D", [(0, 0, 1, 7)])]
    assert is_left == [False, False]  # the rebuilt gradient, on both
    assert sorted(written(tmp_path)) == [FAULTY]


def test_ranks_that_are_added_up_by_hand(tmp_path: Path) -> None:
    told, is_left = _train("by hand", tmp_path)
    for (incident,) in told:
        assert (incident["step"], incident["type"], incident["units"]) == (FAULTY, "D", [(0, 0, 1, 7)])
        assert (incident["counterfactual_norm"], incident["action"]) == (None, "report")
        assert any("adds up the ranks' gradients by itself" in note for note in incident["notes"])
    assert is_left == [True, True]


@pytest.mark.covers(host="plain", feature="token localisation", strategy="ddp")
def test_a_spike_that_is_made_after_the_reduction(tmp_path: Path) -> None:
    told, is_left = _train("after", tmp_path)
    for (incident,) in told:
        assert (incident["type"], incident["reproducible"], incident["num_passes"]) == ("T", False, 0)
        assert (incident["units"], incident["action"]) == ([], "report")
        assert any("changed after the backward pass" in note for note in incident["notes"])
    assert is_left == [True, True]


def _joined(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    model = DistributedDataParallel(make_transformer(num_layers=1))
    loop, references = Loop(soon(Path(folder)), model=model), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.join():
            for step in range(4 + 2 * rank):
                batch = make_batch(step)
                references.append(weakref.ref(batch[1]))
                loop.step(batch)
                del batch
    return alive(references[:-1]), sum(str(one.message) == JOINED for one in caught)


def test_nothing_is_kept_in_a_join(tmp_path: Path) -> None:
    told = run_distributed(_joined, str(tmp_path), timeout=40)
    assert [num_alive for num_alive, _ in told] == [0, 0]
    assert sum(num_warnings for _, num_warnings in told) == 1


def test_nothing_is_kept_for_closures(tmp_path: Path) -> None:
    loop, references = Loop(soon(tmp_path), model=make_transformer(num_layers=1)), []

    def closure() -> Any:
        loop.optimizer.zero_grad()
        loss = loss_of_tokens(loop.model, batch)
        loss.backward()
        return loss

    batch = make_batch(0)
    with pytest.warns(StabilizerWarning, match="closure"):
        loop.optimizer.step(closure)
    for step in range(1, 7):
        batch = make_batch(step)
        references.append(weakref.ref(batch[0]))
        loop.optimizer.step(closure)
    assert alive(references) <= 2


def test_forwards_without_a_step_are_forgotten(tmp_path: Path) -> None:
    loop, references = Loop(soon(tmp_path), model=make_transformer(num_layers=1)), []

    def forward(number: int) -> None:
        tokens = make_batch(number)[0]
        references.append(weakref.ref(tokens))
        loop.model(tokens)

    for number in range(256):
        forward(number)
    with pytest.warns(StabilizerWarning, match="256 forward passes without a step"):
        forward(256)
    assert alive(references) == 1
    forward(257)
    assert alive(references) == 2


@pytest.mark.parametrize("ending", ["close", "failure"])
def test_nothing_is_kept_after_the_end(ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = soon(tmp_path, strict=False)
    loop, references = Loop(callback), []
    if ending == "failure":
        callback.on_gradients = _fail_at(callback, 1)  # type: ignore[method-assign]
    for step in range(5):
        batch = make_batch(step, is_bad=step == 4)
        references.append(weakref.ref(batch[1]))
        loop.step(batch)
    if ending == "close":
        loop.handle.record_batch(batch)
        loop.handle.close()
    else:
        assert callback.has_failed
        assert "planted" in caplog.text
    del batch
    gc.collect()
    assert alive(references) <= (0 if ending == "close" else 2)  # the error keeps the frames that it came through
    assert not any(parameter._backward_hooks for parameter in loop.model.parameters())
    if ending == "close":
        model = weakref.ref(loop.model)
        del loop.model, loop.optimizer
        gc.collect()
        assert model() is None  # though handle and callback live


@pytest.mark.parametrize("every", [1, 2])
def test_a_second_optimizer(every: int, tmp_path: Path) -> None:
    """It is searched where it has moved before in the step: not at all. The first is searched in any case."""
    callback, model = soon(tmp_path), make_transformer(num_layers=2)
    parameters = list(model.parameters())
    optimizers = [torch.optim.Adam(parameters[number::2], lr=3e-2 if every == 1 else 1e-3) for number in range(2)]
    faulty = FAULTY if every == 1 else 2 * FAULTY + 1
    handle = attach(
        None,
        model=model,
        optimizer=optimizers,
        callbacks=[callback],
        loss_fn=loss_of_tokens,
        log=lambda values, step: None,
    )
    with handle:
        for step in range(faulty + 1):
            batch = make_batch(step, is_bad=step == faulty)
            handle.record_batch(batch)
            loss_of_tokens(model, batch).backward()
            for optimizer in optimizers[: 1 + (step % every == every - 1)]:
                optimizer.step()
                optimizer.zero_grad()
    first, second = callback.incidents
    assert (first.optimizer_index, first.reproducible, units(first)) == (0, True, [(0, 0, 1, 7)])
    assert (second.optimizer_index, second.reproducible, second.num_passes, second.tokens) == (1, None, 0, ())
    assert second.error is not None
    assert "another optimizer has moved since the forward" in second.error


def test_a_search_that_could_not_run_is_tried_again_soon(tmp_path: Path) -> None:
    """The step at which layers are unfrozen has no norms of its own."""
    callback, model = soon(tmp_path, cooldown_steps=100), make_transformer(num_layers=2)
    model.layers[0].requires_grad_(False)
    loop = Loop(callback, model=model)
    for step in range(30):
        if step == FAULTY:
            model.layers[0].requires_grad_(True)
        loop.step(make_batch(step, is_bad=step in (FAULTY, FAULTY + 10, FAULTY + 11, FAULTY + 12)))
    first, second = callback.incidents
    assert (first.step, first.num_passes, first.tokens) == (FAULTY, 0, ())
    assert (second.step, second.type, units(second)) == (FAULTY + 11, "D", [(0, 0, 1, 7)])


def test_a_fixed_threshold_before_anything_is_known(tmp_path: Path) -> None:
    callback = soon(tmp_path, warmup_steps=0, rule={"name": "fixed", "threshold": 5.0})
    loop = Loop(callback)
    for step in range(6):
        loop.step(make_batch(step, is_bad=step == 2))
    incident = check(callback, step=2)
    assert incident.counterfactual_norm is not None
    assert incident.counterfactual_norm < 5


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.filterwarnings(
    "ignore:`training_step` returned:UserWarning", "ignore:step 14 .batch 29. has 1 micro-batch"
)
@pytest.mark.covers(feature="token localisation", host="lightning", strategy="single")
def test_a_training_step_that_returned_none(every: int, tmp_path: Path) -> None:
    class Module(importlib.import_module(PACKAGES[0]).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_transformer(num_layers=2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == every * FAULTY else loss_of_tokens(self.inner, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    callback = soon(tmp_path, tap="inner.lm_head")
    rows = [make_batch(number, is_bad=number == every * FAULTY + 1) for number in range(every * FAULTY + 4)]
    trainer = make_trainer(callbacks=[callback], max_epochs=1, max_steps=-1, accumulate_grad_batches=every)
    trainer.fit(Module(), DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
    (incident,) = callback.incidents
    assert (incident.type, incident.reproducible, incident.error) == ("D", True, None)
    assert [(one.row, one.position) for one in incident.tokens] == [(1, 7)]
