"""Copies of what is being trained, what is kept alive, and what leaving leaves behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from stabilizer.callbacks import (
    GradLocCallback,
    GradNormCallback,
    LossMeanVarCallback,
    StabilizerCallback,
    attach,
    recommended,
)
from stabilizer.callbacks.loop import LoopHandle
from tests.lightning_models import make_trainer
from tests.tiny_loops import HOSTS, Loop, OneLayer, Steps, loss_at, no_log, prepared_unit


def _num_of_ours() -> int:
    gc.collect()
    # By type: isinstance would ask lazy objects of other libraries for their class.
    return sum(issubclass(type(each), LoopHandle | StabilizerCallback) for each in gc.get_objects())


def _adam(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=0.0)]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("what", ["deepcopy", "save"])
def test_a_copy_of_the_model_is_a_model_and_nothing_else(host: str, what: str, tmp_path: Path) -> None:
    """The writer of a handle, which nobody can copy, shows whether anybody tries."""
    steps = Steps()
    with SummaryWriter(tmp_path) as writer, Loop(host, steps, *recommended(), optimizer=_adam, log=writer) as loop:
        loop.step(1.0)
        before = _num_of_ours()
        if what == "deepcopy":
            made = copy.deepcopy(loop.model)
        else:
            file = io.BytesIO()
            torch.save(loop.model, file)
            file.seek(0)
            made = torch.load(file, weights_only=False)
        assert _num_of_ours() == before
        assert not made.weight.grad
        # As an auxiliary model would be used between our forward and backward passes.
        loss = loss_at(loop.model, 2.0)
        for _ in range(2):
            loss_at(made, 50.0, size=7).backward()
        assert made.weight.grad == 100
        if host == "accelerate":
            loop.accelerator.backward(loss)
        else:
            loss.backward()
            loop.handle.record_loss(loss)
        loop.optimizer.step()
    assert steps.done == [(0, 1.0, 1.0), (1, 2.0, 2.0)]
    del loop
    gc.collect()
    loss_at(made, 3.0).backward()  # long after the handle is gone


@pytest.mark.parametrize("host", HOSTS)
def test_a_copy_of_the_optimizer_moves_what_is_its_own(host: str) -> None:
    steps = Steps()
    with Loop(host, steps, optimizer=lambda p: [torch.optim.SGD(p, lr=0.5)]) as loop:
        loop.step(1.0)
        before = _num_of_ours()
        model, optimizer = copy.deepcopy((loop.model, loop.optimizer))
        assert _num_of_ours() == before
        weight = loop.model.weight.item()
        loop.backward(4.0)
        loss_at(model, 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (model.weight.item(), loop.model.weight.item()) == (weight - 0.5, weight)
        assert loop.model.weight.grad == 4, "the copy clears its own gradients"
        assert steps.next_step() == 1, "the copy's step is none of ours"
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        assert (model.weight.item(), loop.model.weight.item()) == (weight - 0.5, weight - 2)
    assert [row[:2] for row in steps.done] == [(0, 1.0), (1, 4.0)]
    model.zero_grad()
    loss_at(model, 1.0).backward()
    optimizer.step()  # after the handle has closed
    assert model.weight.item() == weight - 1


@pytest.mark.parametrize("host", HOSTS)
def test_a_closed_handle_keeps_nothing_alive(host: str) -> None:
    with Loop(host, *recommended()) as loop:
        loop.step(1.0)
        handle = loop.handle
    alive = [weakref.ref(loop.model), weakref.ref(loop.inner[0])]
    if loop.accelerator is not None:
        loop.accelerator.free_memory()
    del loop
    gc.collect()
    assert [each() for each in alive] == [None, None]
    handle.close()
    assert handle.is_closed


@pytest.mark.parametrize("breaks_off", [False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_a_closed_handle_does_not_keep_a_batch_whose_loss_never_came(host: str, breaks_off: bool) -> None:
    broken = pytest.raises(RuntimeError, match="broken") if breaks_off else contextlib.nullcontext()
    with broken, Loop(host, LossMeanVarCallback(weight="samples")) as loop:
        handle = loop.handle
        loop.step(1.0)
        batch = torch.ones(3, 1)
        alive = weakref.ref(batch)
        loop.model(batch)  # as an evaluation in training mode does
        del batch
        assert alive() is not None, "nobody holds it: the test says nothing"
        if breaks_off:
            raise RuntimeError("broken")
    gc.collect()
    assert alive() is None
    assert handle.is_closed


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Six new tensors."""

    def __len__(self) -> int:
        """Six."""
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        """One of them."""
        return torch.full((1,), float(index))


class OneStep(pl.LightningModule):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = OneLayer()

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        """The mean."""
        loss: torch.Tensor = self.layer(batch).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One that moves nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Watch(pl.Callback):
    """How many earlier batches are alive when the next one starts, and at the end."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def _count(self) -> None:
        gc.collect()
        self.alive.append(sum(each() is not None for each in self.seen))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: torch.Tensor, batch_index: int) -> None:
        """Count."""
        self._count()
        self.seen.append(weakref.ref(batch))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Count."""
        self._count()


@pytest.mark.parametrize("callbacks", ["norms", "all"])
def test_batches_live_no_longer_than_without_us(callbacks: str) -> None:
    alive = []
    ours = [GradNormCallback()] if callbacks == "norms" else [one for one in recommended() if not one.localizes]
    for chosen in ([], ours):
        watch = Watch()
        trainer = make_trainer(callbacks=[watch, *chosen], max_steps=-1, max_epochs=1)
        trainer.fit(OneStep(), torch.utils.data.DataLoader(Rows(), batch_size=2))
        alive.append(watch.alive)
    assert alive[0] == alive[1]


def test_a_search_needs_the_batches_of_one_step_and_keeps_no_more() -> None:
    watch = Watch()
    trainer = make_trainer(callbacks=[watch, GradLocCallback()], max_steps=-1, max_epochs=1)
    trainer.fit(OneStep(), torch.utils.data.DataLoader(Rows(), batch_size=2))
    # The one of the step before is dropped when the next one's forward begins.
    assert max(watch.alive) <= 2
    gc.collect()
    assert sum(each() is not None for each in watch.seen) <= 1  # what the trainer itself holds


@pytest.mark.parametrize("host", HOSTS)
def test_a_batch_is_not_kept_for_callbacks_that_want_no_loss(host: str) -> None:
    with Loop(host, GradNormCallback()) as loop:
        batch = torch.ones(2, 1)
        alive = weakref.ref(batch)
        loop.model(batch)
        del batch
        assert alive() is None


@pytest.mark.parametrize("host", HOSTS)
def test_attaching_that_fails_leaves_nothing_behind(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = prepared_unit()
    inner, means, steps = optimizer.optimizer, LossMeanVarCallback(), Steps()

    def fails(*args: Any) -> Any:
        raise RuntimeError("no room for a hook")

    chosen, arguments = None, {"model": model, "optimizer": inner, "callbacks": [means, steps], "log": no_log}
    if host == "accelerate":
        chosen, arguments["optimizer"] = accelerator, optimizer
    before = [dict(vars(each)) for each in (accelerator, optimizer, inner)]
    owner, hook = type(inner), "register_step_post_hook"
    if host == "accelerate":
        owner, hook = type(accelerator), "register_load_state_pre_hook"
    with monkeypatch.context() as patched:
        patched.setattr(owner, hook, fails)
        with pytest.raises(RuntimeError, match="no room"):
            attach(chosen, **arguments)
    assert [callback.driver for callback in (means, steps)] == [None, None]
    assert not model._forward_pre_hooks
    assert not inner._optimizer_step_pre_hooks
    assert not accelerator._save_model_state_pre_hook
    assert [vars(each).keys() for each in (accelerator, optimizer, inner)] == [each.keys() for each in before]
    with attach(chosen, **arguments):  # the next try
        loss_at(model, 1.0).backward()
        optimizer.step()
    assert steps.next_step() == 1


@pytest.mark.parametrize("host", HOSTS)
def test_a_closed_handle_cannot_be_entered_again(host: str) -> None:
    with Loop(host, Steps()) as loop:
        loop.step(1.0)
    with pytest.raises(ValueError, match="attach"):
        loop.handle.__enter__()
