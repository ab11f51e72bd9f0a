"""What every threshold rule is: a history of norms on the device, one column a layer, and the thresholds from it."""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from stabilizer.reduction import accumulation_dtype

__all__ = ["ThresholdRule"]


class ThresholdRule(abc.ABC):
    """Turns a history of norms into thresholds, for a vector of layers at once.

    Each step `thresholds` is asked first, and `update` is told the same norms afterwards, if the step has happened.
    Norms that are not finite never enter the history, and neither do zeros (a layer that took no part). All state is
    made once, by `start`, stays where it is, and is changed in place without asking the host.

    A rule of your own implements `allocate`, `thresholds` and `enter`. It may be used by its class path, from YAML too:
    `{class_path: my_package.MyRule, init_args: {...}}`.

    Attributes:
        k: What a user turns to make the thresholds wider; NaN if there is nothing of the kind.
        warmup_steps: How many norms a layer must have seen before it has a threshold.
        step: Number of the step at hand; whoever calls `thresholds` may set it before. Only schedules read it.
        num_accepted: How many norms have entered, shape (layers,), int64.
        device: Where the state is.
        dtype: float64 where the device has it, else float32.

    Example:
        >>> class Largest(ThresholdRule):
        ...     warmup_steps = 1
        ...     def allocate(self, num_layers):
        ...         self.add_state("largest", torch.zeros(num_layers, dtype=self.dtype))
        ...     def thresholds(self, norms):
        ...         return torch.where(self.is_warm, 2 * self.largest, torch.inf).float()
        ...     def enter(self, norms, accepted):
        ...         self.largest.copy_(torch.where(accepted, torch.maximum(self.largest, norms), self.largest))
        >>> rule = Largest()
        >>> rule.start(2, device="cpu")
        >>> for norm in (1.0, 3.0, float("nan"), 2.0):
        ...     rule.update(torch.tensor([norm, 0.0]))
        >>> rule.thresholds(torch.tensor([9.0, 9.0]))
        tensor([6., inf])
    """

    name: ClassVar[str] = ""
    #: Whether `enter` tells outliers from the others, so that they never widen a threshold by themselves.
    keeps_outliers_apart: ClassVar[bool] = False

    k: float = math.nan
    warmup_steps: int = 0
    step: int = 0
    num_accepted: Tensor
    device: torch.device
    dtype: torch.dtype

    _states: tuple[str, ...] = ()

    def start(self, num_layers: int, *, device: torch.device | str) -> None:
        """Make the state, once; again, to forget everything.

        Args:
            num_layers: Length of the vectors of norms.
            device: Where they will be.
        """
        self.forget()
        self.device = torch.device(device)
        self.dtype = accumulation_dtype(self.device)
        # A tensor made in inference mode could not be changed in place outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.add_state("num_accepted", torch.zeros(num_layers, dtype=torch.int64, device=self.device))
            self.allocate(num_layers)

    def forget(self) -> None:
        """Drop the state, as if `start` had never been called."""
        for name in self._states:
            delattr(self, name)
        self._states = ()

    def add_state(self, name: str, initial: Tensor) -> None:
        """Keep a tensor as an attribute that is saved and restored; for `allocate`.

        Args:
            name: Of the attribute.
            initial: The first value, shape (..., layers); change it in place only.
        """
        setattr(self, name, initial.to(self.device, non_blocking=True))
        self._states = (*self._states, name)

    @abc.abstractmethod
    def allocate(self, num_layers: int) -> None:
        """Call `add_state` for everything that the rule remembers.

        Args:
            num_layers: Length of the vectors of norms; the last dimension of every state.
        """

    @abc.abstractmethod
    def thresholds(self, norms: Tensor) -> Tensor:
        """What each norm of this step is held against, and clipped to if it is larger. Changes nothing.

        Args:
            norms: Of this step, shape (layers,), float32; anything, non-finite values too.

        Returns:
            Shape (layers,), float32; infinity where there is no threshold.
        """

    @abc.abstractmethod
    def enter(self, norms: Tensor, accepted: Tensor) -> None:
        """Let norms enter the state, in place; `num_accepted` does not count them yet.

        Args:
            norms: Shape (layers,), of the rule's `dtype`; 1 in places that are not accepted.
            accepted: Whose norm may enter, shape (layers,), bool; the others' state must not change by one bit.
        """

    def update(self, norms: Tensor, *, valid: Tensor | None = None) -> None:
        """The step has happened: its norms enter.

        Args:
            norms: The same that `thresholds` was given, shape (layers,).
            valid: Whether they may enter at all, bool, shape () or (layers,); default all that are finite and not 0.

        Raises:
            ValueError: If there are not as many norms as layers.
        """
        if norms.shape != self.num_accepted.shape:
            expected = tuple(self.num_accepted.shape)
            raise ValueError(f"norms have shape {tuple(norms.shape)}: expected {expected}, one a layer")
        norms = norms.detach()
        accepted = (norms > 0) & (norms < math.inf)
        if valid is not None:
            accepted = accepted & valid
        self.enter(norms.to(self.dtype).masked_fill(~accepted, 1), accepted)
        self.num_accepted.add_(accepted)

    @property
    def is_warm(self) -> Tensor:
        """Who has seen enough norms for a threshold, shape (layers,), bool."""
        return self.num_accepted >= self.warmup_steps

    @property
    def typical(self) -> Tensor:
        """A usual norm of each layer, shape (layers,), float32; NaN where it is not known."""
        return torch.full_like(self.num_accepted, math.nan, dtype=torch.float32)

    def state_dict(self) -> dict[str, Tensor]:
        """The state, as copies on the CPU."""
        return {name: getattr(self, name).detach().to("cpu", copy=True) for name in self._states}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; where the tensors are does not change.

        Args:
            state: What `state_dict` of a rule with the same arguments and as many layers gave.

        Raises:
            ValueError: If names or shapes differ; nothing is taken over then.
        """
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        expected = {name: tuple(getattr(self, name).shape) for name in self._states}
        if shapes != expected:
            raise ValueError(f"{self.describe()}: the saved state has {shapes}, expected {expected}")
        for name, value in state.items():
            getattr(self, name).copy_(value)

    def describe(self) -> str:
        """The rule's name and arguments, for messages."""
        names = [name for name in inspect.signature(type(self)).parameters if hasattr(self, name)]
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.name or type(self).__name__}({arguments})"
