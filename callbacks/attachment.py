"""attach: callbacks at work in an Accelerate loop, or in a plain one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from stabilizer.callbacks.accelerate import AccelerateHandle
from stabilizer.callbacks.accelerate_setting import accelerate_setting
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.hosting import is_disabled
from stabilizer.callbacks.loop import LoopHandle
from stabilizer.callbacks.loop_replay import LossFunction
from stabilizer.callbacks.preflight import preflight
from stabilizer.callbacks.prepared import prepared
from stabilizer.callbacks.sinks import AccelerateSink, LoopSink
from stabilizer.errors import warn

__all__ = ["attach"]


def attach(
    accelerator: Any,
    *,
    model: nn.Module,
    optimizer: Any,
    callbacks: Sequence[StabilizerCallback],
    log: Any = None,
    groups: Mapping[str, Any] | None = None,
    num_steps: int | None = None,
    schedulers: Sequence[Any] | None = None,
    loss_fn: LossFunction | None = None,
    save_fn: Callable[[str], None] | None = None,
) -> LoopHandle:
    """Attach callbacks to an Accelerate loop, or to a plain one.

    With an accelerator the callbacks run at the first of `accelerator.clip_grad_norm_`, `clip_grad_value_`,
    `unscale_gradients` and `optimizer.step` of a step whose gradients are complete (`accelerator.sync_gradients`), on
    gradients that nobody has changed. Values go to the accelerator's trackers, states into `accelerator.save_state`.
    In a plain loop they run in `optimizer.step()`, or where the loop calls `handle.measure()`. Every rank calls this.

    Args:
        accelerator: An `accelerate.Accelerator`, or `None` for a loop without one.
        model: As it trains: what `accelerator.prepare` returned, or a model wrapped by hand.
        optimizer: What `accelerator.prepare` returned, or one of torch; or a list of them.
        callbacks: Ours, in any order.
        log: A function of (values, step), or a `SummaryWriter`, to write to on rank 0 instead of the trackers.
        groups: Process groups of parameters that live on some ranks only; see `ParameterIndex`.
        num_steps: Planned optimizer steps, which the table at the start compares the warm-up with.
        schedulers: Learning-rate schedulers for that table; default: those that the accelerator has prepared.
        loss_fn: For `GradLocCallback`, which runs micro-batches again: a function of (model, batch) that returns the
            loss of a micro-batch as the loop propagates it (before the accelerator divides it). The batch is what
            `handle.record_batch(batch)` was told, else what the model was called with. Default: the loss in what the
            model returns.
        save_fn: For callbacks that save a checkpoint: a function of a name, called on every rank between two steps.
            With an accelerator `save_state` is the default.

    Returns:
        A handle, to be used in a `with` statement; leaving it puts everything back as it was.

    Raises:
        ValueError: If something cannot be attached; says what to do.

    Example:
        >>> import torch
        >>> from stabilizer.callbacks import GradNormCallback, attach
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> norms, rows = GradNormCallback(), []
        >>> with attach(None, model=model, optimizer=optimizer, callbacks=[norms], log=lambda *row: rows.append(row)):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        Stabilizer preflight...
        >>> rows[0][1], round(rows[0][0]["grad_norm/total"], 4)
        (0, 1.7321)
    """
    callbacks = list(callbacks)
    if not callbacks:
        warn("attach(callbacks=[]): there is nothing to do")
    if not callbacks or is_disabled(callbacks):
        return LoopHandle.idle(callbacks)
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if accelerator is None:
        handle = LoopHandle(
            callbacks, model=model, optimizers=optimizers, sink=LoopSink(log), groups=groups, loss_fn=loss_fn
        )
        try:
            for number in range(len(optimizers)):
                handle.watch(number)
        except BaseException:
            handle.close(after_exception=True)
            raise
    else:
        model, optimizers = prepared(accelerator, model, optimizers)
        sink = AccelerateSink(accelerator) if log is None else LoopSink(log)
        handle = AccelerateHandle(
            callbacks,
            model=model,
            optimizers=optimizers,
            sink=sink,
            groups=groups,
            accelerator=accelerator,
            loss_fn=loss_fn,
        )
    handle.save_with(save_fn)
    handle.join(accelerator)
    preflight(
        lambda: accelerate_setting(
            accelerator, model, optimizers, callbacks, num_steps=num_steps, schedulers=schedulers
        )
    )
    return handle
