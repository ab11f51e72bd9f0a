"""The gate: an identity whose backward pass lets through the gradient of some tokens only.

A gradient is linear in what arrives at the logits: with the gate on them, open for a set of tokens, a backward pass
gives exactly that set's share of it. Nothing of the loss changes, no denominator and no mask, and one forward pass
serves any number of backward passes.

What is closed is taken out by `torch.where`, never by a product: 0 * NaN is NaN.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabilizer.localize.masking import check_dims, masked, unit_norms, whole
from stabilizer.localize.recomputing import Region, function_calls, is_backward

__all__ = ["Gate", "Place"]


class Place(NamedTuple):
    """Where a unit of a gate is.

    Attributes:
        segment: Which application of the gate, in the order of the forward pass.
        row: Index along the first dimension of the gated tensor.
        position: Index along the second, `None` where whole rows are the units.
    """

    segment: int
    row: int
    position: int | None


class _Segment:
    """One application of the gate: a piece of its units."""

    def __init__(self, x: Tensor, dims: int, *, by_hand: bool, values: Tensor | None = None) -> None:
        self.shape, self.device, self.by_hand = x.shape[:dims], x.device, by_hand
        self.num_units = math.prod(self.shape)
        self.norms: Tensor | None = None
        # Only of what is one number a unit (a token's loss or log-probability): logits would be too large to keep.
        own = x if values is None and x.dim() == dims else values
        self.values = None if own is None else own.detach().clone()

    def all_norms(self) -> Tensor:
        return torch.zeros(self.num_units, device=self.device) if self.norms is None else self.norms


class Gate:
    """One forward pass's gate.

    A unit is what it opens and closes: a token (row, position) or a sample (row). Units are numbered over all
    applications in the forward pass. Where `token_gate` is called by hand, only its applications have units, and what
    `tapped` gates lets everything through: both would count each token twice. Tensors without a gradient are not
    gated. A DTensor's units are those of the whole tensor: every rank of its mesh opens the same ones.

    Example:
        >>> weight, x = torch.ones(2, requires_grad=True), torch.tensor([[1.0, 2.0], [10.0, 20.0]])
        >>> gate = Gate()
        >>> loss = (gate.apply(x @ weight, dims=1) ** 2).sum()
        >>> gate.seal()
        >>> gate.set_open(torch.tensor([True, False]))
        >>> torch.autograd.grad(loss, weight)
        (tensor([ 6., 12.]),)
        >>> gate.arrived
        tensor([ 6., 60.])
    """

    def __init__(self) -> None:
        self._all: list[_Segment] = []
        self._regions: weakref.WeakKeyDictionary[Any, Region[_Segment]] = weakref.WeakKeyDictionary()
        self._is_sealed = False
        self._masks: dict[_Segment, Tensor] = {}

    @property
    def is_used(self) -> bool:
        """Whether anything was gated."""
        return bool(self._all)

    @property
    def is_by_hand(self) -> bool:
        """Whether `token_gate` was called."""
        return any(segment.by_hand for segment in self._all)

    @property
    def is_tapped(self) -> bool:
        """Whether a tap was passed."""
        return not all(segment.by_hand for segment in self._all)

    @property
    def num_units(self) -> int:
        """How many units there are, after the forward pass."""
        return sum(segment.num_units for segment in self._segments)

    @property
    def arrived(self) -> Tensor | None:
        """L2 norm of the gradient that arrived at each unit since `clear`, shape (num_units,), float32.

        Before anything is closed: it does not depend on what is open. 0 where nothing arrived; `None` if no backward
        pass has come to the gate.
        """
        segments = self._segments
        if all(segment.norms is None for segment in segments):
            return None
        device = segments[0].device
        return torch.cat([segment.all_norms().to(device) for segment in segments])

    def apply(self, x: Tensor, *, dims: int, by_hand: bool = False, values: Tensor | None = None) -> Tensor:
        """Gate a tensor.

        Args:
            x: Of any floating dtype.
            dims: How many leading dimensions are the units.
            by_hand: Whether the user placed this application.
            values: One number a unit, for `all_values`, where `x` has more.

        Returns:
            The same values in the same memory, with a gradient that goes through the gate.

        Raises:
            ValueError: If the tensor has fewer dimensions.
            RuntimeError: If the forward pass is over.
        """
        check_dims(x, dims)
        segment = self._segment_of(x, dims, by_hand, values)
        if segment is None or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        # No view: what is done in place to a view afterwards goes round the hook, and nothing would be closed.
        gated: Tensor = torch.ops.aten._unsafe_view(x, x.shape)
        gated.register_hook(functools.partial(self._see, segment))
        return gated

    def seal(self) -> None:
        """Say that the forward pass is over: from here on only checkpointed parts are computed again."""
        self._is_sealed = True

    def clear(self) -> None:
        """Forget what arrived, before the next backward pass."""
        for segment in self._all:
            segment.norms = None

    def set_open(self, open: Tensor | None) -> None:  # noqa: A002
        """Open some units and close all others, for the backward passes that follow.

        Args:
            open: Shape (num_units,), bool; `None` opens everything.

        Raises:
            ValueError: If the shape or dtype is another one.
        """
        if open is not None and (open.shape != (self.num_units,) or open.dtype != torch.bool):
            got = f"{open.dtype} of shape {tuple(open.shape)}"
            raise ValueError(f"open: expected bool of shape ({self.num_units},), one entry a unit; got {got}")
        self._masks = {}
        if open is not None:
            masks = open.split([segment.num_units for segment in self._segments])
            for segment, mask in zip(self._segments, masks, strict=True):
                self._masks[segment] = mask.view(segment.shape).to(segment.device)

    def locate(self, unit: int) -> Place:
        """Where a unit is, in the coordinates of the gated tensor.

        Args:
            unit: Its number. Of more than two dimensions of units, all but the first count as one.

        Raises:
            IndexError: If there is no such unit.
        """
        segment, inside = self._find(unit)
        shape = self._segments[segment].shape
        row, position = divmod(inside, math.prod(shape[1:]))
        return Place(segment, row, position if len(shape) > 1 else None)

    def shape(self, segment: int) -> tuple[int, ...]:
        """Leading dimensions of what was gated: those of the units.

        Args:
            segment: Which application.
        """
        return tuple(self._segments[segment].shape)

    def all_values(self, segment: int) -> Tensor | None:
        """What was gated, where it is one number a unit: losses or log-probabilities of tokens.

        Args:
            segment: Which application.

        Returns:
            Shape of the units; `None` where the gated tensor has more dimensions.
        """
        values = self._segments[segment].values
        return None if values is None else whole(values)

    @property
    def _segments(self) -> list[_Segment]:
        return [segment for segment in self._all if segment.by_hand] or self._all

    def _find(self, unit: int) -> tuple[int, int]:
        inside = unit
        for number, segment in enumerate(self._segments):
            if 0 <= inside < segment.num_units:
                return number, inside
            inside -= segment.num_units
        raise IndexError(f"unit {unit}: the gate has {self.num_units}")

    def _segment_of(self, x: Tensor, dims: int, by_hand: bool, values: Tensor | None) -> _Segment | None:
        """A new segment, or the one that is computed again; `None` for what has no part in the backward pass."""
        frames = list(function_calls())
        is_again = next((index for index, (name, _) in enumerate(frames) if name == "backward"), None)
        around = [context for _, context in frames[:is_again]]
        if is_again is not None:
            region = self._regions.get(frames[is_again][1])
            segment = None if region is None else region.next()
        elif is_backward():
            # Checkpointing without reentrance computes tensors again, not their graph: the first one's hook is enough.
            return None
        elif self._is_sealed:
            raise RuntimeError("this gate has served one forward pass; the next one needs a new Gate")
        elif x.requires_grad or around:
            segment = _Segment(x, dims, by_hand=by_hand, values=values)
            self._all.append(segment)
        else:
            return None
        if segment is not None:
            for context in around:
                self._regions.setdefault(context, Region()).parts.append(segment)
        return segment

    def _see(self, segment: _Segment, gradient: Tensor) -> Tensor | None:
        """What autograd calls with the gradient of a gated tensor."""
        with torch.no_grad():
            norms = unit_norms(gradient, dims=len(segment.shape)).flatten()
            segment.norms = norms if segment.norms is None else torch.hypot(segment.norms, norms)
            mask = self._masks.get(segment)
            return None if mask is None else masked(gradient, mask)
