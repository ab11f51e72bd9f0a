"""Maps over layers and positions: where something that is not finite is born, and where a gradient grows."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.localize.growth import grown
from stabilizer.localize.hidden import Hidden, by_row, first_bad, hidden_of, is_same, last_bad
from stabilizer.localize.masking import unit_norms
from stabilizer.localize.recomputing import is_backward
from stabilizer.localize.taps import clean_modules
from stabilizer.names import layer_names
from stabilizer.parameters import named_parameters

__all__ = ["BlockWatch", "Origin", "blocks_of", "leaves_of"]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where something was born.

    Attributes:
        layer: A block, "input" for what comes before the first one, or "input of <block>" for what lies between two.
        row: Of the batch.
        position: In the row, `None` where rows have no positions or the position cannot be told.
        value: NaN or infinity, or how many times more a gradient has grown than in other rows.
        kind: "nonfinite", "nonfinite gradient" or "growth".
    """

    layer: str
    row: int
    position: int | None
    value: float
    kind: str


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model, those that are layers of their own at granularity "block".

    Args:
        model: Wrapped or not.

    Returns:
        Name and module, in the model's order.

    Example:
        >>> layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        >>> [name for name, _ in blocks_of(nn.ModuleDict({"layers": layers}))]
        ['layers.0', 'layers.1']
    """
    modules = clean_modules(model)
    layers = dict.fromkeys(layer_names([name for _, name in named_parameters(model)]))
    return [(name, modules[name]) for name in layers if name.rpartition(".")[2].isdigit() and name in modules]


def leaves_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that own parameters, of a model without repeated blocks.

    Args:
        model: Wrapped or not.

    Returns:
        Name and module, in the model's order.

    Example:
        >>> [name for name, _ in leaves_of(nn.ModuleDict({"body": nn.Linear(1, 1), "head": nn.Linear(1, 1)}))]
        ['body', 'head']
    """
    modules = clean_modules(model)
    owners = dict.fromkeys(layer_names([name for _, name in named_parameters(model)], "module"))
    return [(name, modules[name]) for name in owners if name in modules]


class BlockWatch:
    """Watches the hidden states between blocks in a forward pass, and their gradients in the backward passes after it.

    Inside of the context modules are watched: the forward pass belongs there, and the backward passes too where
    reentrant checkpointing computes blocks again. No value is changed; nothing is kept but one number a block, row and
    position, on the device until somebody asks.

    Args:
        blocks: Name and module of each, in order, as `blocks_of` gives them.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> watch = BlockWatch(blocks_of(model))
        >>> with watch:
        ...     loss = model(torch.ones(4, 3, 2, requires_grad=True)).sum()
        >>> loss.backward()
        >>> watch.names, watch.gradients.shape
        (['input', '0', '1'], torch.Size([3, 4, 3]))
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        self._blocks = list(blocks)
        self._calls: list[_Call] = []
        self._given: Tensor | None = None
        self._last: Hidden | None = None
        # By point: 0 is the first block's input, number + 1 each block's output.
        self._norms: dict[int, Tensor] = {}
        self._watched: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> BlockWatch:
        for number, (_, module) in enumerate(self._blocks):
            before, after = functools.partial(self._before, number), functools.partial(self._after, number)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *args: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._last, self._given = [], None, None

    @property
    def names(self) -> list[str]:
        """Points of the map: "input" of the first block, then each block's output, as far as their shapes agree."""
        return [self._name(point) for point in self._points()]

    @property
    def gradients(self) -> Tensor | None:
        """Norm of the loss's gradient at every point, shape (points, rows, positions), float32, since `clear`.

        Rows without positions have one. Zero where no gradient came; `None` before a backward pass.
        """
        norms = [self._norms.get(point) for point in self._points()]
        some = next((norm for norm in norms if norm is not None), None)
        if some is None:
            return None
        return torch.stack([torch.zeros_like(some) if norm is None else norm.to(some.device) for norm in norms])

    def clear(self) -> None:
        """Forget the gradients, before the next backward pass."""
        self._norms = {}

    def first_nonfinite(self) -> Origin | None:
        """Where the first hidden state that is not finite was born, after a forward pass; the host waits.

        Returns:
            The first block in the order of the calls whose output is not finite while what it was given is, and the
            first row and position in it; `None` if all hidden states are finite.
        """
        for number, call in enumerate(self._calls):
            name = self._blocks[call.block][0]
            for layer, norms in (("input" if number == 0 else f"input of {name}", call.given), (name, call.made)):
                bad = None if norms is None else first_bad(norms)
                if bad is not None:
                    return self._origin(layer, *bad, kind="nonfinite")
        return None

    def first_nonfinite_gradient(self) -> Origin | None:
        """Where the first gradient that is not finite was born, after a backward pass; the host waits.

        Returns:
            The last block that makes a gradient that is not finite of one that is, with the first such row, and the
            last such position in it (causal attention spreads a gradient to earlier positions) unless all are; "output
            of <block>" where it comes from above all blocks; `None` if all are finite.
        """
        points, gradients = self._points(), self.gradients
        layer = f"output of {self._name(points[-1])}" if points else ""
        for point, norms in zip(reversed(points), () if gradients is None else gradients.cpu().flip(0), strict=False):
            bad = last_bad(norms)
            if bad is not None:
                return self._origin(layer, *bad, kind="nonfinite gradient")
            layer = self._name(point)
        return None

    def growth(self) -> Origin | None:
        """The block in which the gradient of one row grows far more than that of others, or than in other blocks.

        The host waits.

        Returns:
            The block, the row and the position whose gradient stands out below the block while it does not above, and
            how many times more it grew; `None` where nothing does: then a large gradient comes from above.
        """
        points, gradients = self._points(), self.gradients
        lower = [index for index, point in enumerate(points[:-1]) if self._is_chained(point, points[index + 1])]
        if gradients is None or not lower:
            return None
        gradients = gradients.cpu()
        found = grown(gradients[lower], gradients[[index + 1 for index in lower]])
        if found is None:
            return None
        layer = self._name(points[lower[found.block] + 1])
        return self._origin(layer, found.row, found.position, found.factor, kind="growth")

    def _before(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = hidden_of((args, kwargs))
        if hidden is None:
            return
        is_first = not self._calls or (is_backward() and self._calls[0].block == number)
        if is_first:
            self._watch(hidden, 0)
        if not is_backward():
            # Nearly always the output of the block before.
            self._given = None if is_same(hidden, self._last) else hidden.largest()

    def _after(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        hidden = hidden_of(output)
        if hidden is None:
            return
        self._watch(hidden, number + 1)
        if not is_backward():
            self._calls.append(_Call(number, self._given, hidden.largest(), hidden.has_positions))
            self._last = hidden

    def _watch(self, hidden: Hidden, point: int) -> None:
        is_again = is_backward()
        # Computed again, only what had no graph before (under reentrant checkpointing) is still to be watched.
        if torch.is_grad_enabled() and hidden.tensor.requires_grad and not (is_again and point in self._watched):
            if not is_again:
                self._watched.add(point)
            # The graph must not keep the watch alive, nor the other way round.
            hidden.tensor.register_hook(functools.partial(_see, weakref.ref(self), point, hidden.dims))

    def _add(self, point: int, norms: Tensor) -> None:
        before = self._norms.get(point)
        # A block that is called more than once.
        is_again = before is not None and before.shape == norms.shape
        self._norms[point] = torch.hypot(before, norms) if is_again and before is not None else norms

    def _points(self) -> list[int]:
        """Points whose gradients have the shape that most have; before a backward pass, all."""
        if not self._norms:
            return list(range(len(self._blocks) + 1))
        shape, _ = Counter(norms.shape for norms in self._norms.values()).most_common(1)[0]
        return sorted(point for point, norms in self._norms.items() if norms.shape == shape)

    def _name(self, point: int) -> str:
        return "input" if point == 0 else self._blocks[point - 1][0]

    def _is_chained(self, point: int, following: int) -> bool:
        """Whether the following point is what a block makes of this one."""
        called = [call.block for call in self._calls]
        if following != point + 1 or point not in called:
            return False
        if point == 0:
            return called[0] == 0
        containers = {self._name(number).rpartition(".")[0] for number in (point, following)}
        return len(containers) == 1 and called.index(point) == called.index(point - 1) + 1

    def _origin(self, layer: str, row: int, position: int | None, value: float, *, kind: str) -> Origin:
        has_positions = any(call.has_positions for call in self._calls)
        return Origin(layer, row, position if has_positions else None, value, kind)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A block's call: norms of what it was given, where that is not what the call before made, and of what it made."""

    block: int
    given: Tensor | None
    made: Tensor
    has_positions: bool


def _see(watch: weakref.ref[BlockWatch], point: int, dims: int, gradient: Tensor) -> None:
    alive = watch()
    if alive is not None:
        alive._add(point, by_row(unit_norms(gradient, dims=dims)))
