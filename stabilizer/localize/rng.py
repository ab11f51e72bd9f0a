"""Random numbers: the states of all generators that a forward pass may draw from, taken and put back."""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["RngState", "is_generator", "rewinder"]


@dataclasses.dataclass(frozen=True, eq=False)
class RngState:
    """States of the generators that everybody shares: torch's on the CPU and on the device, Python's, numpy's.

    Attributes:
        device: Whose generator `accelerator` is of.
        cpu: Of torch.
        accelerator: Of torch; `None` on a CPU, and on a device that nothing has used.
        python: Of the module `random`.
        numpy: Of the module `numpy.random`; `None` where nobody has imported it.

    Example:
        >>> state = RngState.capture(torch.device("cpu"))
        >>> first = torch.rand(1), random.random()
        >>> state.restore()
        >>> (torch.rand(1), random.random()) == first
        True
    """

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        """The states as they are; no wait for the device.

        Args:
            device: Where the model is.
        """
        numpy = sys.modules.get("numpy.random")
        return cls(
            device=device,
            cpu=torch.get_rng_state(),
            accelerator=_accelerator_state(device),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.get_state(),
        )

    def restore(self) -> None:
        """Make them what they were."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            module = torch.get_device_module(self.device)
            # One generator is all that an Apple device has.
            arguments = () if self.device.type == "mps" else (self.device,)
            module.set_rng_state(self.accelerator, *arguments)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


def _accelerator_state(device: torch.device) -> Tensor | None:
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    if device.type == "mps":
        state: Tensor = module.get_rng_state()
        return state
    # Asking for a state would start the device.
    started: Tensor | None = module.get_rng_state(device) if module.is_initialized() else None
    return started


def is_generator(value: object) -> bool:
    """Whether something is a generator of torch, `random` or numpy, a user's own.

    Args:
        value: Anything.
    """
    return isinstance(value, (torch.Generator, random.Random, *_numpy_generators()))


def rewinder(generator: Any) -> Callable[[], None]:
    """What takes a generator back to where it is now.

    Args:
        generator: Of the kinds of `is_generator`.

    Returns:
        A function without arguments.

    Example:
        >>> generator = random.Random(0)
        >>> rewind = rewinder(generator)
        >>> first = generator.random()
        >>> rewind()
        >>> generator.random() == first
        True
    """
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        # What `set_state` returns is the generator.
        return lambda: (generator.set_state(state), None)[1]
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if hasattr(generator, "set_state"):
        return functools.partial(generator.set_state, generator.get_state())
    bits = getattr(generator, "bit_generator", generator)
    return functools.partial(setattr, bits, "state", bits.state)


def _numpy_generators() -> tuple[type, ...]:
    # Where nobody has imported it, nobody has a generator of it.
    numpy = sys.modules.get("numpy.random")
    return () if numpy is None else (numpy.RandomState, numpy.Generator, numpy.BitGenerator)
