"""Whose an object is: a user's own may be rewound, what a framework keeps may not."""

from __future__ import annotations

import argparse
import enum
import sys
import types
from collections import ChainMap, UserDict, UserList
from typing import Any

from torch import nn

__all__ = ["is_users_own", "slots_of", "wrapper_classes"]

# Packages whose objects know nothing of a replay: trainers, strategies, optimizers, loaders, loggers, process groups.
_HOSTS = [
    "accelerate",
    "deepspeed",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "peft",
    "pytorch_lightning",
]
_LIBRARIES = ["numpy", "pandas", "PIL", "ray", "stabilizer", "torch", "torchaudio", "torchmetrics", "torchvision"]
_MODELS = ["datasets", "tokenizers", "transformers", "trl"]
_LOGGERS = ["aim", "clearml", "comet_ml", "mlflow", "neptune", "swanlab", "tensorboard", "tensorboardX", "wandb"]
_FOREIGN = frozenset([*_HOSTS, *_LIBRARIES, *_MODELS, *_LOGGERS]) | (sys.stdlib_module_names - {"__main__"})
# Base classes from here make nobody a stranger.
_NEUTRAL = frozenset({"abc", "builtins", "collections", "typing"})
# Parts of the standard library that only hold what they are given.
_PLAIN = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap)
# What others use at the same time.
_SHARED = frozenset(
    ["_io", "_queue", "_thread", "asyncio", "concurrent", "io", "multiprocessing", "queue", "socket", "subprocess"]
) | {"threading"}


def is_users_own(value: Any) -> bool:
    """Whether an object is state of the user's own code, so that its attributes may be put back.

    Args:
        value: Anything that is no container, tensor or module.

    Returns:
        True for objects whose class, and all that it is made from, is defined outside of frameworks and the standard
        library; for namespaces and user dictionaries; not for services, which hold locks, threads, queues or files.

    Example:
        >>> is_users_own(types.SimpleNamespace(num_seen=0)), is_users_own(nn.Identity()), is_users_own(dict)
        (True, False, False)
    """
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, type | enum.Enum) or _is_foreign(type(value)):
        return False
    attributes = getattr(value, "__dict__", None) or {}
    return not any(_root(type(content)) in _SHARED for content in attributes.values())


def slots_of(kind: type[Any]) -> list[str]:
    """Names of the attributes that a class of the user's own keeps outside of `__dict__`.

    Args:
        kind: A class.

    Example:
        >>> slots_of(type("Pair", (), {"__slots__": ("left", "right"), "__module__": "users"}))
        ['left', 'right']
    """
    names: list[str] = []
    if not _is_foreign(kind):
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if not name.startswith("__")]


def wrapper_classes() -> tuple[type[Any], ...]:
    """Modules around a model, whose own attributes are the state of their machinery."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    replicas: tuple[type[Any], ...] = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return replicas if fsdp is None else (*replicas, fsdp.FullyShardedDataParallel)


def _is_foreign(kind: Any) -> bool:
    """Whether a class, or one that it is made from, is of a framework or the standard library."""
    roots = {_root(base) for base in kind.__mro__}
    return _root(kind) in _NEUTRAL or not (roots - _NEUTRAL).isdisjoint(_FOREIGN)


def _root(kind: type[Any]) -> str:
    return str(kind.__module__).partition(".")[0]
