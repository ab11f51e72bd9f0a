"""What a Lightning Trainer knows of a run, for `preflight`. Trainers of both packages look the same from here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.preflight import Setting

__all__ = ["is_overridden", "lightning_setting"]

_PACKAGES = ("lightning", "pytorch_lightning")


def lightning_setting(trainer: Any, callbacks: Sequence[StabilizerCallback]) -> Setting:
    """Find out what a Trainer knows.

    Called at `on_train_start` it knows the number of steps; at `on_fit_start`, before the data is loaded, only where
    `max_steps` alone ends the run. Loads no data and starts no collective.

    Args:
        trainer: Of either package, with model, strategy and optimizers set up.
        callbacks: All of ours.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    return Setting(
        host="Lightning",
        model=module if strategy.model is None else strategy.model,
        optimizers=list(trainer.optimizers),
        callbacks=callbacks,
        clipping=_clipping(trainer, module),
        precision=_precision(trainer),
        schedulers=[(config.scheduler, _ratio(trainer, module, config)) for config in trainer.lr_scheduler_configs],
        num_steps=_num_steps(trainer, module),
    )


def is_overridden(module: Any, hook: str) -> bool:
    """Whether a LightningModule has a hook of its own (neither package is imported to ask).

    Args:
        module: A LightningModule of either package.
        hook: Name of a method.
    """
    owner = next((kind for kind in type(module).__mro__ if hook in vars(kind)), None)
    return hook in vars(module) or (owner is not None and owner.__module__.split(".")[0] not in _PACKAGES)


def _clipping(trainer: Any, module: Any) -> str:
    kind = type(module).__name__
    limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if not module.automatic_optimization:
        return f"{kind}.training_step, if it calls clip_gradients (manual optimization): not known before it happens"
    # An enum whose values are the names, or None for the default.
    by = "value" if getattr(algorithm, "value", algorithm) == "value" else "total norm"
    limits = f"gradient_clip_val={float(limit)}, by {by}" if limit else ""
    if is_overridden(module, "configure_gradient_clipping"):
        return f"{kind}.configure_gradient_clipping, in its own way" + (f" (it is given {limits})" if limits else "")
    if not limit or limit <= 0:
        return ""
    return f"the Trainer, by {by} at {float(limit)}, after the callbacks have measured"


def _precision(trainer: Any) -> str:
    plugin = trainer.precision_plugin
    scaled = ", loss scaled" if getattr(plugin, "scaler", None) is not None else ""
    return f"{plugin.precision}{scaled}"


def _num_steps(trainer: Any, module: Any) -> int | None:
    # Lightning counts steps of all optimizers and cannot know how often a batch moves them in manual optimization.
    if not module.automatic_optimization and not (len(trainer.optimizers) == 1 and trainer.max_epochs == -1):
        return None
    # Without a loader Lightning would make one to find out: a user's code, and at times a collective.
    if trainer.max_epochs != -1 and trainer.train_dataloader is None:
        return None
    steps = trainer.estimated_stepping_batches
    return int(steps) if steps > 0 and math.isfinite(steps) else None


def _ratio(trainer: Any, module: Any, config: Any) -> float | None:
    """Optimizer steps between two steps of a scheduler."""
    if not module.automatic_optimization or is_overridden(module, "lr_scheduler_step"):
        return None
    accumulated = trainer.accumulate_grad_batches
    if config.interval == "step":
        # It moves at batches that end a step and whose number the frequency divides.
        return float(config.frequency // math.gcd(config.frequency, accumulated))
    batches = trainer.num_training_batches
    if trainer.train_dataloader is None or not math.isfinite(batches):
        return None
    return float(math.ceil(batches / accumulated) * config.frequency)
