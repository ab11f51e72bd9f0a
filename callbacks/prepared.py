"""What `accelerator.prepare` has made of a model and its optimizers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from stabilizer.inspection import inner_optimizer

__all__ = ["prepared", "refuse_engines"]

_UNSUPPORTED = {
    "DEEPSPEED": "DeepSpeed ZeRO keeps gradients in partitions of its own",
    "MEGATRON_LM": "Megatron-LM computes and clips gradients inside its own engine",
    "XLA": "torch_xla reduces gradients inside the optimizer's step",
}


def refuse_engines(accelerator: Any) -> None:
    """Raise where an engine keeps gradients to itself.

    Args:
        accelerator: Of Accelerate.

    Raises:
        ValueError: Names the engine and the way out.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _UNSUPPORTED:
        raise ValueError(
            f"accelerator.distributed_type={kind}: {_UNSUPPORTED[kind]}, where no callback can see them. Use DDP or "
            "FSDP, or set STABILIZER_DISABLE=1 to train without the stabilizer callbacks."
        )


def prepared(accelerator: Any, model: nn.Module, optimizers: Sequence[Any]) -> tuple[nn.Module, list[Any]]:
    """The model and optimizers as an accelerator knows them.

    Args:
        accelerator: What the user gave as one.
        model: What the user gave, wrapped or not.
        optimizers: Likewise.

    Returns:
        What `accelerator.prepare` returned for them, where it did.

    Raises:
        ValueError: If the callbacks cannot work there; says what to do.
    """
    if not hasattr(accelerator, "sync_gradients") or not hasattr(accelerator, "prepare"):
        raise ValueError(f"accelerator={accelerator!r}: expected an accelerate.Accelerator, or None for a plain loop")
    refuse_engines(accelerator)
    models, known = accelerator._models, accelerator._optimizers
    if not models and not known:
        raise ValueError("the accelerator has prepared nothing yet: call attach after accelerator.prepare")
    unwrap = functools.partial(accelerator.unwrap_model, keep_torch_compile=False)
    found = [wrapped for wrapped in models if wrapped is model or unwrap(wrapped) is unwrap(model)]
    if models and not found:
        raise ValueError("model is none of those that accelerator.prepare returned: pass that one to attach")
    prepared = []
    for optimizer in optimizers:
        same = [wrapped for wrapped in known if inner_optimizer(wrapped) is inner_optimizer(optimizer)]
        if known and not same:
            raise ValueError(
                f"optimizer ({type(optimizer).__name__}) is none of those that accelerator.prepare returned: pass "
                "that one"
            )
        prepared.append(same[0] if same else optimizer)
    # Accelerate remembers some models as they were before it wrapped them (DDP): the user's own is the outer one then.
    is_inner = bool(found) and unwrap(model) is model
    return found[0] if is_inner else model, prepared
