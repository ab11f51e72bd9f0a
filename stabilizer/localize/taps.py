"""Where a gate goes in a model that does not call `token_gate`: on what its output embedding gives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from stabilizer.gate import Gate
from stabilizer.names import clean_name

__all__ = ["clean_modules", "find_tap", "tapped"]

# What models without `get_output_embeddings` call it.
_HEADS = ("lm_head", "embed_out")
# Of outputs that are no tensors: what the next-token loss, or the head, is computed from.
_FIELDS = ("logits", "last_hidden_state")


def clean_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names that the unwrapped model gives them.

    Args:
        model: Wrapped or not.

    Returns:
        Name -> module, in the model's order; of a wrapper and what it wraps the wrapper, which is what gets called.

    Example:
        >>> list(clean_modules(nn.Sequential(nn.Linear(2, 1))))
        ['', '0']
    """
    found: dict[str, nn.Module] = {}
    for name, module in _named(model):
        found.setdefault(name, module)
    return found


def find_tap(model: nn.Module, tap: str | None = None) -> nn.Module | None:
    """The module whose output the gate goes on.

    Args:
        model: Wrapped or not, and possibly a module that holds the network (a LightningModule).
        tap: Name of the module, without what wrappers add. `None` looks for an output embedding: what transformers'
            `get_output_embeddings()` gives, of the outermost module that has one and trains; else an attribute
            `lm_head` or `embed_out` that is the last linear map of the model.

    Returns:
        The module; `None` if none was found.

    Raises:
        ValueError: If there is no module of that name.

    Example:
        >>> classifier = nn.Sequential(nn.Linear(4, 3))
        >>> find_tap(classifier) is None, find_tap(classifier, "0") is classifier[0]
        (True, True)
    """
    modules = clean_modules(model)
    if tap is not None:
        if tap not in modules or not tap:
            close = difflib.get_close_matches(tap, modules, n=1, cutoff=0.4)
            hint = f"; the closest is {close[0]!r}" if close else f"; the last one is {list(modules)[-1]!r}"
            raise ValueError(f"tap={tap!r} is no module of the model{hint}")
        return modules[tap]
    # Of a wrapper and what it wraps either may have the method.
    for _, module in sorted(_named(model), key=lambda item: item[0].count(".") + bool(item[0])):
        head = _output_embeddings(module)
        # A frozen model beside the one that trains (a reference, a teacher) gets no gradient.
        if head is not None and any(parameter.requires_grad for parameter in module.parameters()):
            return head
    linear = [(name, module) for name, module in modules.items() if isinstance(module, nn.Linear)]
    if linear and linear[-1][0].rpartition(".")[2] in _HEADS:
        return linear[-1][1]
    return None


@contextlib.contextmanager
def tapped(module: nn.Module | None, gate: Gate, *, hidden: bool = False) -> Iterator[None]:
    """Have a gate on what a module gives.

    Three dimensions are taken for (rows, positions, features), and tokens are the units; else the first one's elements.
    Where reentrant checkpointing computes the module's part again, the backward passes belong inside too. A module that
    was not called leaves `gate.is_used` false.

    Args:
        module: Its output may be a tensor, or a tuple, mapping or object whose `logits`, `last_hidden_state` or first
            trainable tensor is gated; `None` gates nothing.
        gate: For one forward pass.
        hidden: Whether to gate the module's first input instead.

    Yields:
        Nothing.

    Example:
        >>> head, gate = nn.Linear(2, 3), Gate()
        >>> with tapped(head, gate):
        ...     logits = head(head.weight.new_ones(4, 5, 2))
        >>> gate.num_units
        20
    """
    if module is None:
        yield
        return

    def on_output(module: nn.Module, args: Any, output: Any) -> Any:
        return _gated(output, gate)

    def on_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if any(isinstance(value, Tensor) for value in args):
            return _gated(args, gate), kwargs
        return args, _gated(kwargs, gate)

    if hidden:
        handle = module.register_forward_pre_hook(on_input, with_kwargs=True)
    else:
        handle = module.register_forward_hook(on_output)
    try:
        yield
    finally:
        handle.remove()


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their clean names, wrappers first."""
    # DDP and DataParallel keep the model in an attribute `module`, a name that a model of its own may use as well.
    wrappers = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
    prefixes = [f"{path}.".lstrip(".") for path, module in model.named_modules() if isinstance(module, wrappers)]
    for path, module in model.named_modules():
        name = f"{path}."
        for prefix in sorted(prefixes, key=len, reverse=True):
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        yield clean_name(name.rstrip(".")), module


def _output_embeddings(module: Any) -> nn.Module | None:
    getter = getattr(module, "get_output_embeddings", None)
    if not callable(getter):
        return None
    try:
        head = getter()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def _gated(value: Any, gate: Gate) -> Any:
    """The same kind of value with one of its tensors gated."""
    if isinstance(value, Tensor):
        return gate.apply(value, dims=2 if value.dim() == 3 else 1) if value.dim() else value
    for field in _FIELDS:
        if isinstance(getattr(value, field, None), Tensor):
            return _with_field(value, field, _gated(getattr(value, field), gate))
    keys = list(value) if isinstance(value, MutableMapping) else list(range(len(value))) if _is_tuple(value) else []
    key = next((key for key in keys if _is_trainable(value[key])), None)
    if key is None:
        return value
    gated = _gated(value[key], gate)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        changed[key] = gated
        return changed
    items = [gated if index == key else item for index, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _with_field(value: Any, field: str, tensor: Tensor) -> Any:
    if hasattr(value, "_replace"):
        return value._replace(**{field: tensor})
    try:
        setattr(value, field, tensor)
    except dataclasses.FrozenInstanceError:
        return dataclasses.replace(value, **{field: tensor})
    return value


def _is_tuple(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _is_trainable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
