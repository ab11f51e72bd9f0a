"""What an Accelerator, or nobody but the caller, knows of a run, for `preflight`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.preflight import Setting
from stabilizer.inspection import inner_optimizer

__all__ = ["accelerate_setting"]


def accelerate_setting(
    accelerator: Any,
    model: nn.Module,
    optimizers: Sequence[Any],
    callbacks: Sequence[StabilizerCallback],
    *,
    num_steps: int | None = None,
    schedulers: Sequence[Any] | None = None,
) -> Setting:
    """Put together what is known of a loop. Loads no data and starts no collective.

    Args:
        accelerator: `None` for a plain loop.
        model: As it trains, wrapped.
        optimizers: Prepared or not.
        callbacks: All of ours.
        num_steps: Planned optimizer steps, if the caller knows.
        schedulers: Prepared or not (then taken to move once an optimizer step). Default: the prepared ones.
    """
    if accelerator is None:
        host, clip = "plain loop", "torch.nn.utils.clip_grad_norm_ or clip_grad_value_"
        precision = "as the loop sets it (autocast is not seen before it happens)"
    else:
        host, clip = "Accelerate", "accelerator.clip_grad_norm_ or clip_grad_value_, after the callbacks have measured"
        scaled = ", loss scaled" if getattr(accelerator, "scaler", None) is not None else ""
        precision = f"mixed_precision={accelerator.mixed_precision}{scaled}"
    listed = getattr(accelerator, "_schedulers", ()) if schedulers is None else schedulers
    return Setting(
        host=host,
        model=model,
        optimizers=[inner_optimizer(optimizer) for optimizer in optimizers],
        callbacks=callbacks,
        clipping=f"your loop, if it calls {clip}: not known before it happens",
        precision=precision,
        schedulers=[(_inner(scheduler), _ratio(accelerator, scheduler)) for scheduler in listed],
        num_steps=num_steps,
    )


def _inner(scheduler: Any) -> Any:
    """The scheduler that Accelerate has wrapped."""
    is_wrapper = type(scheduler).__module__.split(".")[0] == "accelerate" and hasattr(scheduler, "scheduler")
    return _inner(scheduler.scheduler) if is_wrapper else scheduler


def _ratio(accelerator: Any, scheduler: Any) -> float | None:
    """Optimizer steps between two steps of a scheduler."""
    if not hasattr(scheduler, "step_with_optimizer"):
        return 1.0
    if not scheduler.step_with_optimizer:
        return None
    # Batches multiply with the processes, and Accelerate moves the schedule as often, unless it splits the batches.
    num_processes = 1 if accelerator is None else accelerator.num_processes
    return 1.0 if scheduler.split_batches else 1.0 / num_processes
