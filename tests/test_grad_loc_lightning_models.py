"""GradLoc with Lightning modules of other kinds: compiled, resumed, in manual optimization, with two optimizers."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stabilizer.callbacks import GradLocCallback
from tests.lightning_models import PACKAGES, make_trainer
from tests.localize_loops import Fault, Plan, batches, loss_of_tokens
from tests.models import TinyTransformer, initialise_
from tests.states import same
from tests.test_grad_loc_identity import expected, make_callback, summary

FAULTS = (Fault(12, ((0, 0, 1, 3),)), Fault(18, ((0, 1, 1, 2),)))
PLAN = Plan(steps=22, faults=FAULTS, micro_batches=2, rows=2, length=6)
#: A search, and the end of an epoch after it.
EPOCH = 13


class Body:
    """A transformer whose batches are weighted tokens; epochs of EPOCH steps."""

    plan = PLAN
    has_manual = False
    num_optimizers = 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        """The loss; in manual optimization the update too."""
        module: Any = self
        if not self.has_manual:
            return loss_of_tokens(module, batch)  # type: ignore[arg-type]
        module.manual_backward(loss_of_tokens(module, batch) / self.plan.micro_batches)  # type: ignore[arg-type]
        if batch_idx % self.plan.micro_batches == self.plan.micro_batches - 1:
            optimizers = module.optimizers()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
                optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        """AdamW, for all or one for the embedding and one for the rest."""
        module: Any = self
        module.automatic_optimization = not self.has_manual
        parameters = list(module.parameters())
        if self.num_optimizers == 1:
            return torch.optim.AdamW(parameters, lr=1e-3)
        return [torch.optim.AdamW(part, lr=1e-3) for part in (parameters[:1], parameters[1:])]

    def train_dataloader(self) -> Any:
        """The micro-batches of an epoch, in order."""
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        steps = list(batches(self.plan, 0))[trainer.global_step // self.num_optimizers :][:EPOCH]
        return DataLoader([row for step in steps for row in step], batch_size=None)  # type: ignore[arg-type]


class WithLoss(Body):
    """One that tells its loss apart from the update."""

    has_manual = True

    def stabilizer_loss(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss as it is propagated."""
        return loss_of_tokens(self, batch) / self.plan.micro_batches  # type: ignore[arg-type]


@functools.cache
def module_class(package: str, body: type) -> type[Any]:
    """The class for one import name."""
    base = importlib.import_module(package).LightningModule
    return type("Module", (body, TinyTransformer, base), {"__module__": __name__})


def make_module(body: type = Body, *, package: str = PACKAGES[0], **attributes: Any) -> Any:
    """A new module."""
    module = module_class(package, body)(num_layers=2)
    initialise_(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def fit(
    module: Any,
    callbacks: list[Any],
    *,
    package: str = PACKAGES[0],
    path: Path | None = None,
    save: Path | None = None,
    **more: Any,
) -> Any:
    """Train, and give back the weights."""
    bare = getattr(module, "_orig_mod", module)
    options = {"max_steps": bare.plan.steps, "reload_dataloaders_every_n_epochs": 1, **more}
    if not bare.has_manual:
        options["accumulate_grad_batches"] = bare.plan.micro_batches
    trainer = make_trainer(package=package, callbacks=callbacks, **options)
    trainer.fit(module, ckpt_path=None if path is None else str(path))
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: p.detach().clone() for name, p in trainer.lightning_module.named_parameters()}


@pytest.mark.parametrize("whole", [True, False])
def test_compiled(whole: bool, tmp_path: Path) -> None:
    """By a compiler that does all but make code, so that a machine without one runs it too."""
    found, callback = [], make_callback("triggered", tmp_path)
    for callbacks in ([], [callback]):
        torch.compiler.reset()
        module: Any = make_module()
        if whole:
            module = torch.compile(module, backend="aot_eager")
        else:
            for block in module.layers:
                block.compile(backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the compiler has to say of Lightning
            found.append(fit(module, callbacks))
    assert summary(callback) == expected("triggered", FAULTS)
    assert same(*found)


# A loader of plain lists cannot resume within an epoch, and need not.
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_resume_within_the_cooldown(tmp_path: Path) -> None:
    """No second search, and thresholds bit for bit those of the whole run."""
    plan = dataclasses.replace(PLAN, micro_batches=1, faults=(FAULTS[0], Fault(18, FAULTS[0].bad)))

    def run(**options: Any) -> tuple[GradLocCallback, Any]:
        callback = make_callback("triggered", tmp_path / "incidents")
        callback.cooldown_steps = 8
        return callback, fit(make_module(plan=plan), [callback], **options)

    whole, weights = run()
    assert [one.step for one in whole.incidents] == [12]
    first, _ = run(max_steps=EPOCH, save=tmp_path / "half.ckpt")
    assert [one.step for one in first.incidents] == [12]
    resumed, others = run(path=tmp_path / "half.ckpt")
    assert resumed.incidents == []
    assert same(others, weights)
    assert same(resumed.state_dict(), whole.state_dict())
    assert whole.state_dict()["extra"]["searched"] == {"0": 12}


@pytest.mark.parametrize("package", PACKAGES)
def test_manual_optimization_with_a_loss_of_its_own(package: str, tmp_path: Path) -> None:
    callback = make_callback("triggered", tmp_path)
    weights = fit(make_module(WithLoss, package=package), [callback], package=package)
    assert summary(callback) == expected("triggered", FAULTS)
    assert same(weights, fit(make_module(WithLoss, package=package), [], package=package))


@pytest.mark.parametrize("package", PACKAGES)
def test_manual_optimization_alone_is_told_what_to_do(package: str, tmp_path: Path) -> None:
    callback = make_callback("triggered", tmp_path)
    weights = fit(make_module(package=package, has_manual=True), [callback], package=package)
    assert [one.step for one in callback.incidents] == [12, 18]
    for incident in callback.incidents:
        assert incident.error is not None
        assert "give the module a method stabilizer_loss(batch, batch_idx)" in incident.error
        assert incident.tokens == ()
    assert same(weights, fit(make_module(package=package, has_manual=True), [], package=package))


def test_two_optimizers(tmp_path: Path) -> None:
    """The first that moves finds the token; the other one's replay would be of other weights, and it says so."""
    callback = make_callback("triggered", tmp_path)
    module = make_module(WithLoss, num_optimizers=2)
    # Lightning counts the steps of both.
    weights = fit(module, [callback], max_steps=2 * PLAN.steps)
    assert {one.optimizer_index for one in callback.incidents} == {0, 1}
    own = [[one for one in callback.incidents if one.optimizer_index == number] for number in (0, 1)]
    assert [(one.step, one.error, [(t.row, t.position) for t in one.tokens]) for one in own[0]] == [
        (fault.step, None, [fault.bad[0][2:]]) for fault in FAULTS
    ]
    assert [one.step for one in own[1]][:1] == [FAULTS[0].step]
    assert all("another optimizer has moved since the forward" in (one.error or "") for one in own[1])
    module = make_module(WithLoss, num_optimizers=2)
    assert same(weights, fit(module, [], max_steps=2 * PLAN.steps))
