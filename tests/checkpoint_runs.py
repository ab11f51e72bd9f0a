"""Short runs that save, for tests of what guards checkpoints."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stabilizer.callbacks import CheckpointGuardCallback, attach
from stabilizer.checkpoints import Guard, read_guard
from tests.accelerate_loops import make_accelerator, make_optimizer
from tests.lightning_models import BATCH_SIZE, PACKAGES, expected_batches, make_module, make_trainer
from tests.models import loss_of, make_transformer

__all__ = ["accelerate_run", "guards_below", "lightning_run", "poisoned_"]


def guards_below(folder: Path) -> dict[str, Guard]:
    """What the guard files below a folder say, by the relative path of the checkpoint."""
    found = {}
    for path in sorted(folder.rglob("*.guard.json")):
        inside = path.name == "stabilizer.guard.json"
        checkpoint = path.parent if inside else path.with_name(path.name.removesuffix(".guard.json"))
        guard = read_guard(checkpoint)
        assert guard is not None
        found[checkpoint.relative_to(folder).as_posix()] = guard
    return found


def poisoned_(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of a state dict with one NaN in its first matrix."""
    copied = {name: tensor.clone() for name, tensor in state.items()}
    first = next(name for name, tensor in copied.items() if tensor.dim() == 2)
    copied[first].view(-1)[1] = float("nan")
    return copied


def _poison(package: str, steps: Sequence[int]) -> Any:
    base = importlib.import_module(package).Callback

    class Poison(base):  # type: ignore[misc]
        """What is saved after some steps has a NaN, as memory that broke on its way."""

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if trainer.global_step in steps:
                checkpoint["state_dict"] = poisoned_(checkpoint["state_dict"])

    return Poison()


def lightning_run(
    folder: Path,
    guard: CheckpointGuardCallback,
    *,
    package: str = PACKAGES[0],
    num_steps: int = 6,
    bad_steps: Sequence[int] = (),
    resume: Any = None,
    more: Sequence[Any] = (),
    checkpoint: dict[str, Any] | None = None,
    rank: int = 0,
    devices: int = 1,
    **options: Any,
) -> Any:
    """A fit that saves after every step; `checkpoint` has the arguments of ModelCheckpoint."""
    arguments = {"every_n_train_steps": 1, "save_top_k": 1, "filename": "{step}", **(checkpoint or {})}
    saver = importlib.import_module(f"{package}.callbacks").ModelCheckpoint(folder, **arguments)
    module = make_module(
        "transformer",
        package=package,
        optimizer="adamw",
        length=num_steps * BATCH_SIZE * devices,
        **options.pop("module", {}),
    )
    trainer = make_trainer(
        package=package,
        devices=devices,
        max_steps=num_steps,
        enable_checkpointing=True,
        callbacks=[guard, _poison(package, bad_steps), saver, *more],
        **options,
    )
    trainer.fit(module, ckpt_path=resume)
    return module


def accelerate_run(
    guard: CheckpointGuardCallback,
    *,
    strategy: str = "single",
    num_steps: int = 6,
    save: Any = None,
    bad_steps: Sequence[int] = (),
    rank: int = 0,
    num_ranks: int = 1,
    **options: Any,
) -> Any:
    """A loop that saves after every step; `save` is called with (accelerator, step), by default automatic naming."""
    accelerator = make_accelerator(strategy, **options)
    raw = make_transformer()
    optimizer = make_optimizer(raw, name="adamw")
    model, stepper = accelerator.prepare(raw, optimizer)

    def spoil(models: Any, weights: Any, folder: str) -> None:
        if guard.next_step() in bad_steps:
            weights[0].update(poisoned_(weights[0]))

    with attach(accelerator, model=model, optimizer=stepper, callbacks=[guard], log=lambda *_: None):
        hook = accelerator.register_save_state_pre_hook(spoil)
        for step in range(num_steps):
            batch = expected_batches("transformer", step, num_ranks=num_ranks)[rank]
            accelerator.backward(loss_of(model, batch))
            stepper.step()
            stepper.zero_grad()
            if save is None:
                accelerator.save_state()
            else:
                save(accelerator, step)
        hook.remove()
    return model
