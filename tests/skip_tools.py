"""Trainings that go wrong at chosen steps, in every host, and what they leave of weights and optimizer, bit by bit.

run = train("accelerate", [LayerClipCallback()], num_steps=4, faults={(2, None): NAN})
changed(run.states[2], run.states[3])  # names of what step 2 has moved
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.callbacks import StabilizerCallback, attach
from stabilizer.errors import TrainingStoppedError
from tests.accelerate_loops import make_accelerator
from tests.lightning_models import BATCH_SIZE, PACKAGES, expected_batches, make_module, make_trainer
from tests.loggers import Points, points_of, row_logger
from tests.models import loss_of, make_transformer
from tests.spread import spread
from tests.tiny_loops import told

__all__ = [
    "EPOCH",
    "HOSTS",
    "INF",
    "MODEL",
    "NAN",
    "OPTIMIZERS",
    "SQRT",
    "Faults",
    "Run",
    "changed",
    "snapshot",
    "spoiled",
    "train",
]

NAN, INF = math.nan, math.inf
#: Steps after which the data begin anew.
EPOCH = 16
MODEL: dict[str, Any] = {"num_layers": 2}
#: (step, rank or None for all of them) -> what the loss of that rank is multiplied by, or SQRT.
Faults = Mapping[tuple[int, int | None], float]
#: Add to the loss a square root of zero: it changes no loss, and no gradient is finite.
SQRT = -1.0
HOSTS = ("plain", "accelerate", *PACKAGES, *(f"{package} manual" for package in PACKAGES))

_WITH_DECAY: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, **_WITH_DECAY),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True, **_WITH_DECAY),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True, **_WITH_DECAY),
    "adamw_amsgrad_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True, amsgrad=True, **_WITH_DECAY),
    "adam": lambda parameters: torch.optim.Adam(parameters, **_WITH_DECAY),
    "adam_fused": lambda parameters: torch.optim.Adam(parameters, fused=True, **_WITH_DECAY),
    "sgd": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, **_WITH_DECAY),
    "sgd_fused": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, fused=True, **_WITH_DECAY),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, **_WITH_DECAY),
    "adagrad_fused": lambda parameters: torch.optim.Adagrad(parameters, fused=True, **_WITH_DECAY),
}


def spoiled(loss: Tensor, faults: Faults, *, step: int, rank: int) -> Tensor:
    """A loss with its fault.

    Args:
        loss: As it should be.
        faults: Of the run.
        step: The optimizer step.
        rank: This rank.
    """
    factor = faults.get((step, None), faults.get((step, rank), 1.0))
    return loss + (loss - loss.detach()).sqrt() if factor == SQRT else loss * factor


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of this rank's part of all weights, moments and step counts.

    Args:
        model: As it trains.
        optimizer: Its optimizer, of torch.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: parameter for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        # A view of a flat parameter may be another object after each step; its place in the optimizer stays.
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"{names[parameter]}: {key}"] = value
    return {name: getattr(value, "_local_tensor", value).detach().clone() for name, value in found.items()}


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, absent_is_zero: bool = False) -> list[str]:
    """Names of what differs by any bit, or is new or gone.

    Args:
        before: Of `snapshot`.
        after: Of `snapshot`.
        absent_is_zero: Whether state that was not there before may be all zeros now.
    """
    different = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if old is None and new is not None and absent_is_zero:
            old = torch.zeros_like(new)
        if old is None or new is None or old.shape != new.shape or not _same_bits(old, new):
            different.append(name)
    return different


def _same_bits(old: Tensor, new: Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[old.element_size()]
    return torch.equal(old.reshape(-1).view(kind), new.reshape(-1).view(kind))


@dataclasses.dataclass
class Run:
    """What a training has left.

    Attributes:
        states: Of `snapshot`, before every step and after the last one or the one that ended the run.
        rows: Values and step, as they were logged.
        warnings: Ours.
        error: Message of the TrainingStoppedError that ended it.
        num_done: Steps that came to their end.
        extra: What `look` returned before every step.
    """

    states: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    rows: list[tuple[dict[str, float], int]] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    error: str | None = None
    num_done: int = 0
    extra: list[Any] = dataclasses.field(default_factory=list)

    @property
    def points(self) -> Points:
        """(tag, step) -> value."""
        return points_of(self.rows)

    def moved(self, step: int) -> list[str]:
        """Names of what a step has changed.

        Args:
            step: The optimizer step.
        """
        return changed(self.states[step], self.states[step + 1])


def train(
    host: str,
    callbacks: Sequence[StabilizerCallback],
    *,
    num_steps: int,
    faults: Faults | None = None,
    left_out: Collection[int] = (),
    rank: int = 0,
    num_ranks: int = 1,
    strategy: str = "single",
    optimizer: str = "adamw",
    look: Callable[[], Any] = lambda: None,
    after_backward: Callable[[int, nn.Module], None] = lambda step, model: None,
    keep_states: bool = True,
    **options: Any,
) -> Run:
    """Train a small transformer.

    Args:
        host: One of HOSTS.
        callbacks: Ours.
        num_steps: Optimizer steps.
        faults: What goes wrong.
        left_out: Steps that a plain loop does not do at all.
        rank: This rank.
        num_ranks: World size of the launcher's call.
        strategy: One of those that the host knows: "single", "ddp", "fsdp1", "fsdp2".
        optimizer: A key of OPTIMIZERS.
        look: Called before every step and after the last one.
        after_backward: Called with the step and the model when gradients are complete, before ours.
        keep_states: Whether to keep weights and optimizer of every step.
        **options: Of Trainer or Accelerator.
    """
    run, seen = Run(), []

    def note(trained: nn.Module, stepper: Any) -> None:
        seen[:] = [(trained, stepper)]
        run.extra.append(look())
        if keep_states:
            run.states.append(snapshot(trained, stepper))

    setting = types.SimpleNamespace(
        host=host,
        callbacks=callbacks,
        num_steps=num_steps,
        faults=faults or {},
        left_out=left_out,
        rank=rank,
        num_ranks=num_ranks,
        strategy=strategy,
        make_optimizer=OPTIMIZERS[optimizer],
        note=note,
        after_backward=after_backward,
        options=options,
    )
    with told() as run.warnings:
        try:
            (_train_lightning if host.startswith(PACKAGES) else _train_loop)(run, setting)
        except TrainingStoppedError as error:
            run.error = str(error)
            note(*seen[0])
    return run


def _train_loop(run: Run, setting: Any) -> None:
    accelerator: Any = None
    if setting.host == "accelerate":
        accelerator = make_accelerator(setting.strategy, **setting.options)
        bare = make_transformer(**MODEL)
        trained, stepper = accelerator.prepare(bare, setting.make_optimizer(bare.parameters()))
    else:
        trained = spread(setting.strategy, setting.rank, **MODEL)[0]
        stepper = setting.make_optimizer(trained.parameters())
    inner, rows = getattr(stepper, "optimizer", stepper), run.rows
    handle: Any = contextlib.nullcontext()
    if setting.callbacks:
        log = lambda values, step: rows.append((dict(values), step))  # noqa: E731
        handle = attach(accelerator, model=trained, optimizer=stepper, callbacks=list(setting.callbacks), log=log)
    with handle:
        for step in range(setting.num_steps):
            setting.note(trained, inner)
            if step not in setting.left_out:
                loss = _loss(setting, trained, step)
                if accelerator is None:
                    loss.backward()
                else:
                    accelerator.backward(loss)
                setting.after_backward(step, trained)
                if setting.callbacks and accelerator is None:
                    handle.record_loss(loss)
                stepper.step()
                stepper.zero_grad()
            run.num_done += 1
        setting.note(trained, inner)


def _loss(setting: Any, model: nn.Module, step: int) -> Tensor:
    batch = expected_batches("transformer", step % EPOCH, num_ranks=setting.num_ranks)[setting.rank]
    return spoiled(loss_of(model, batch), setting.faults, step=step, rank=setting.rank)


def _train_lightning(run: Run, setting: Any) -> None:
    package, is_manual = setting.host.split()[0], setting.host.endswith("manual")
    module = make_module(
        "transformer", package=package, length=EPOCH * BATCH_SIZE * setting.num_ranks, model_options=MODEL
    )
    module.configure_optimizers = lambda: setting.make_optimizer(module.model.parameters())
    module.automatic_optimization = not is_manual
    steps = itertools.count()

    def training_step(batch: Any, batch_idx: int) -> Tensor | None:
        loss = spoiled(loss_of(module.model, batch), setting.faults, step=next(steps), rank=setting.rank)
        if not is_manual:
            return loss
        stepper = module.optimizers()
        stepper.zero_grad()
        module.manual_backward(loss)
        stepper.step()
        return None

    def look(trainer: Any, pl_module: Any, *_: Any) -> None:
        setting.note(pl_module.model, trainer.optimizers[0])

    def end(trainer: Any, pl_module: Any, *_: Any) -> None:
        run.num_done += 1
        if run.num_done == setting.num_steps:
            look(trainer, pl_module)

    logger = row_logger(package)
    run.rows, module.training_step = logger.rows, training_step
    kind = importlib.import_module(f"{package}.callbacks").LambdaCallback

    def after_backward(trainer: Any, pl_module: Any) -> None:
        setting.after_backward(run.num_done, pl_module.model)

    hooks = kind(on_train_batch_start=look, on_train_batch_end=end, on_after_backward=after_backward)
    callbacks = [*setting.callbacks, hooks]
    options = {"max_steps": setting.num_steps, "callbacks": callbacks, "logger": logger, **setting.options}
    make_trainer(setting.strategy, devices=setting.num_ranks, package=package, **options).fit(module)
