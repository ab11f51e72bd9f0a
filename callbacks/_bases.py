"""What hosts want a callback to be. The one module below `base` that may import a host.

A callback inherits the `Callback` class of every installed Lightning (`lightning.pytorch` and `pytorch_lightning` are
two packages with two classes), so that each Trainer and each LightningCLI accepts it. The hooks below hand over to the
host's own module, which stands above the callbacks and registers itself here when `stabilizer.callbacks` is imported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

__all__ = ["HostCallback", "register_lightning"]


def _lightning_classes() -> tuple[type, ...]:
    classes = []
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            classes.append(importlib.import_module(name).Callback)
        except ImportError:
            continue
    return tuple(classes)


if TYPE_CHECKING:
    # To a type checker a callback of ours is whatever a Trainer asks for: which bases it has is known at run time only.
    _Base: Any
else:
    # Two names of one class would be an error in the list of bases.
    _Base = type("_Base", tuple(dict.fromkeys(_lightning_classes())), {})

_serve_lightning: Callable[..., None] | None = None


def register_lightning(serve: Callable[..., None]) -> None:
    """Name what serves Lightning's hooks.

    Args:
        serve: Takes the callback, the Trainer, the name of a hook and its further arguments.
    """
    global _serve_lightning
    _serve_lightning = serve


def _lightning(callback: HostCallback, trainer: Any, hook: str, *args: Any) -> None:
    assert _serve_lightning is not None, "stabilizer.callbacks was not imported as a package"
    _serve_lightning(callback, trainer, hook, *args)


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that keeps its arguments: many are no attribute under their own name, or have become another."""

    @functools.wraps(init)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        if "given_arguments" not in vars(self):  # the outermost of the classes' constructors
            self.given_arguments = _named(init, args, kwargs)
        init(self, *args, **kwargs)

    return remember


def _named(init: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, those without one as well."""
    try:
        bound = inspect.signature(init).bind_partial(None, *args, **kwargs)
    except (TypeError, ValueError):  # which the constructor itself says better
        return dict(kwargs)
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:  # without self
        is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found.update(value if is_rest else {name: value})
    return found


class HostCallback(_Base):  # type: ignore[misc]
    """Lightning's hooks, all of them handed over to `stabilizer.callbacks.lightning`.

    Attributes:
        given_arguments: What the constructor was called with, by name; others were left at their defaults.
    """

    given_arguments: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(cls.__init__)  # type: ignore[method-assign]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called when a run begins, before the model is set up."""
        _lightning(self, trainer, "setup", stage)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Called when the model is wrapped and the optimizers exist."""
        _lightning(self, trainer, "fit_start")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before the first batch, when the data is known."""
        _lightning(self, trainer, "train_start")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Called before every batch, which is on its device."""
        _lightning(self, trainer, "train_batch_start", batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Called before every backward pass, with the loss as it is propagated."""
        _lightning(self, trainer, "before_backward", loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Called when the gradients of a step are complete, before Lightning clips them."""
        _lightning(self, trainer, "before_optimizer_step", optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after every batch, whether or not the optimizer moved."""
        _lightning(self, trainer, "train_batch_end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called when training ends, while the loggers are open."""
        _lightning(self, trainer, "train_end")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Called when a run breaks off, while the loggers are open."""
        _lightning(self, trainer, "exception")

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Called by a trainer of transformers, which wants another kind of callback.

        Raises:
            ValueError: Says how to give it this one.
        """
        name = type(self).__name__
        raise ValueError(
            f"{name} is no TrainerCallback: give the trainer callbacks=[StabilizerTrainerCallback([{name}(...)])], "
            "which brings it to work there (from stabilizer.callbacks import StabilizerTrainerCallback)"
        )

    on_train_begin = on_init_end  # of a trainer that was made before

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called last."""
        _lightning(self, trainer, "train_end")
