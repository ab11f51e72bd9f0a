"""GradientStore: the statistics of one optimizer's gradients at this step, and a ring of past norms, on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from stabilizer.errors import warn
from stabilizer.measurement import Measurement, Measurer
from stabilizer.names import Granularity, layer_names
from stabilizer.parameters import ParameterIndex
from stabilizer.reduction import Reducer
from stabilizer.segments import Segments

__all__ = ["GradientNorms", "GradientStore", "LayerView", "NormType", "gradient_norms", "parse_norm_type"]

NormType: TypeAlias = Literal[2, "inf"]


def parse_norm_type(norm_type: Any) -> NormType:
    """Read a norm type.

    Args:
        norm_type: 2, 2.0, "2", "inf" or `math.inf`.

    Returns:
        2 or "inf".

    Raises:
        ValueError: For any other order.

    Example:
        >>> parse_norm_type(float("inf"))
        'inf'
    """
    if norm_type in (2, "2"):
        return 2
    if norm_type in ("inf", math.inf):
        return "inf"
    raise ValueError(f'norm_type={norm_type!r}: allowed are 2 and "inf"')


class GradientStore:
    """Measures every gradient once a step, however many callbacks read the result.

    One collective a step (none where every rank holds whole gradients, one more where gradients are Partial), whose
    shape depends on the model alone; no host synchronization on an accelerator. Making a store is a collective: every
    rank does it at the same step, after the backward pass.

    Args:
        index: The parameters.
        granularities: All groupings that anybody will read.
        norm_types: All norms that anybody will read.
        ring: How many past steps' norms stay on the device.
        max_abs_every_n_steps: Interval (or several) of exact non-finite counts and largest values (ten times the cost
            of a norm). They are measured on steps with a non-finite norm as well where the host can see one without
            waiting, that is on a CPU.
        num_flags: Length of a vector of flags that is summed over ranks along with the norms.

    Attributes:
        names: Names of the parameters of all ranks.
        current: The measurement of this step.
        failure: What local statistics of this step failed with (they are NaN then), else `None`.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> store = GradientStore(ParameterIndex(model))
        >>> measurement = store.measure(step=0)
        >>> store.view().total_norm
        tensor(5.)
    """

    def __init__(
        self,
        index: ParameterIndex,
        *,
        granularities: Sequence[Granularity] = ("block",),
        norm_types: Iterable[NormType] = (2,),
        ring: int = 1024,
        max_abs_every_n_steps: int | Sequence[int] | None = None,
        num_flags: int = 0,
    ) -> None:
        self.index = index
        self.device = index.device
        self.ring = ring
        reducer = Reducer(self.device)
        self.names = names = index.all_names(reducer)
        layers = {_key(granularity): layer_names(names, granularity) for granularity in granularities}
        # A unit is what no grouping tells apart: all that has to be reduced over ranks.
        keys = list(zip(*layers.values(), strict=True))
        units = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        overall = {name: number for number, name in enumerate(names)}
        positions = [overall[name] for name in index.names]
        self._measurer = Measurer(
            index,
            reducer,
            positions=positions,
            num_parameters=len(names),
            unit_ids=[units[keys[position]] for position in positions],
            num_units=len(units),
            norm_types=frozenset(norm_types),
            max_abs_intervals=_intervals(max_abs_every_n_steps),
            num_flags=num_flags,
        )
        self._unit_layers = {key: [unit[number] for unit in units] for number, key in enumerate(layers)}
        self._views: dict[tuple[str, NormType], LayerView] = {}
        self.current: Measurement | None = None
        self.failure: Exception | None = None

    def view(self, granularity: Granularity = "block", norm_type: NormType = 2) -> LayerView:
        """The statistics by layer.

        Args:
            granularity: One of those that the store was made with.
            norm_type: One of those that the store was made with.

        Returns:
            A view, the same object for the same arguments.

        Raises:
            ValueError: If the store was made without this granularity or norm type.
        """
        key = _key(granularity)
        if key not in self._unit_layers or norm_type not in self._measurer.norm_types:
            raise ValueError(f"the store was made without granularity={granularity!r}, norm_type={norm_type!r}")
        if (key, norm_type) not in self._views:
            self._views[key, norm_type] = LayerView(self, self._unit_layers[key], norm_type)
        return self._views[key, norm_type]

    def measure(
        self, step: int, *, grad_scale: Tensor | None = None, flags: Tensor | None = None, compare: bool = False
    ) -> Measurement:
        """Measure the gradients as they are now; they are not changed, not even by a bit.

        Args:
            step: The optimizer step that is about to happen, counted from 0.
            grad_scale: What the loss was multiplied by, if the gradients have not been divided yet; shape ().
            flags: This rank's flags, shape (num_flags,).
            compare: Whether ranks that all hold whole gradients compare them (a collective on a step that needs none).

        Returns:
            The measurement, which is also what the views show from now on.
        """
        self.current = self._measurer.measure(step, grad_scale=grad_scale, flags=flags, compare=compare)
        self.failure = self._measurer.failure
        for view in self._views.values():
            view._record()
        return self.current

    @property
    def needs_replan(self) -> bool:
        """Whether this rank has seen gradients become Partial since the ranks agreed on which are."""
        return self._measurer.needs_replan

    def replan(self) -> None:
        """Agree anew on which gradients are Partial sums: a collective, after a backward pass."""
        self._measurer.replan()

    def remeasure(self) -> Measurement:
        """Measure once more within the step (after a clip); the views keep the first measurement."""
        step = 0 if self.current is None else self.current.step
        return self._measurer.measure(step, grad_scale=None, flags=None, compare=False)


class LayerView:
    """One grouping and one norm of a store: what callbacks call `context.store`.

    Attributes:
        layer_names: Names of the layers, in the model's order.
        ring: Norms of past steps, shape (steps, layers + 1), the last column is the total; rows of `ring_steps`.
        ring_steps: Step of every row of the ring, -1 where there is none yet.
    """

    def __init__(self, store: GradientStore, unit_layers: Sequence[str], norm_type: NormType) -> None:
        self.layer_names: tuple[str, ...] = tuple(dict.fromkeys(unit_layers))
        self.norm_type = norm_type
        numbers = {name: number for number, name in enumerate(self.layer_names)}
        ids = [numbers[name] for name in unit_layers]
        self._segments = Segments(ids, num_segments=len(numbers), device=store.device)
        self._store = store
        self._cache: tuple[Measurement, Tensor, Tensor] | None = None
        self.ring = torch.zeros(store.ring, len(numbers) + 1, device=store.device)
        self.ring_steps = [-1] * store.ring

    @property
    def measurement(self) -> Measurement:
        """The measurement of the current step."""
        if self._store.current is None:
            raise ValueError("the store has not measured any step yet: call store.measure(step) first")
        return self._store.current

    @property
    def step(self) -> int:
        """The step that the values belong to."""
        return self.measurement.step

    @property
    def norms(self) -> Tensor:
        """Gradient norm of every layer, shape (layers,), float32."""
        return self.norms_of(self.measurement)[0]

    @property
    def total_norm(self) -> Tensor:
        """Gradient norm of all parameters together, shape (), float32."""
        return self.norms_of(self.measurement)[1]

    @property
    def nonfinite(self) -> Tensor:
        """Which layers' norms are not finite, shape (layers,), bool."""
        return ~torch.isfinite(self.norms)

    @property
    def max_abs(self) -> Tensor | None:
        """Largest absolute value in every layer, shape (layers,); `None` on steps that did not measure it."""
        measurement = self.measurement
        return self._segments.max(measurement.maxima) if measurement.is_exact else None

    @property
    def num_nonfinite(self) -> Tensor | None:
        """Number of non-finite elements in every layer, shape (layers,), float64; `None` on steps without a count."""
        measurement = self.measurement
        return self._segments.sum(measurement.counts) if measurement.is_exact else None

    def norms_of(self, measurement: Measurement) -> tuple[Tensor, Tensor]:
        """Norms by layer and in total.

        Args:
            measurement: Of this view's store.

        Returns:
            Shapes (layers,) and (), float32.
        """
        if self._cache is not None and self._cache[0] is measurement:
            return self._cache[1:]
        if self.norm_type == 2:
            squares = self._segments.sum(measurement.squares)
            values = squares.sqrt().to(torch.float32), measurement.squares.sum().sqrt().to(torch.float32)
        else:
            maxima = self._segments.max(measurement.maxima)
            values = maxima, maxima.max()
        self._cache = (measurement, *values)
        return values

    def past(self, limit: int | None = None) -> tuple[list[int], Tensor]:
        """Norms of past steps.

        Args:
            limit: At most so many, the newest ones.

        Returns:
            The steps, ascending, and their norms, shape (steps, layers + 1), on the device; the last column is the
            total.
        """
        size, newest = len(self.ring_steps), max(self.ring_steps)
        count = min(sum(step >= 0 for step in self.ring_steps), size if limit is None else limit)
        # Steps follow one another, so they are one or two slices; an index tensor would be copied from the host.
        first = (newest + 1 - count) % size
        rows = torch.cat([self.ring[first : first + count], self.ring[: max(0, first + count - size)]])
        return list(range(newest + 1 - count, newest + 1)), rows

    def restore(self, steps: Sequence[int], rows: Tensor, layer_names: Sequence[str]) -> None:
        """Fill the ring from a checkpoint.

        Args:
            steps: Step of every row.
            rows: Shape (steps, layers + 1), the last column is the total.
            layer_names: Of the columns; columns of layers that are no more are dropped, new layers get zeros.
        """
        columns = {name: column for column, name in enumerate(layer_names)}
        padded = torch.cat([rows, rows.new_zeros(len(steps), 1)], dim=1)
        order = [columns.get(name, len(columns) + 1) for name in self.layer_names] + [len(columns)]
        values = padded[:, order].to(self.ring.device)
        for step, row in list(zip(steps, values, strict=True))[-len(self.ring_steps) :]:
            self.ring[step % len(self.ring_steps)] = row
            self.ring_steps[step % len(self.ring_steps)] = step

    def _record(self) -> None:
        row = self.step % len(self.ring_steps)
        self.ring[row, :-1] = self.norms
        self.ring[row, -1] = self.total_norm
        self.ring_steps[row] = self.step


class GradientNorms(NamedTuple):
    """What `gradient_norms` returns: names (layers), norms (layers,), the total () and non-finite flags (layers,)."""

    layer_names: tuple[str, ...]
    norms: Tensor
    total_norm: Tensor
    nonfinite: Tensor


def gradient_norms(
    model: nn.Module | Iterable[Tensor] | Tensor,
    *,
    granularity: Granularity = "block",
    norm_type: NormType | float = 2,
    groups: Mapping[str, Any] | None = None,
) -> GradientNorms:
    """Norms of all gradients of a model right now, over all ranks; for loops that want a single call.

    It sets everything up anew at each call. A loop that measures every step keeps a `GradientStore`.

    Args:
        model: The model, or its parameters (a list, a generator, one tensor).
        granularity: What a layer is; see `stabilizer.names.layer_names`.
        norm_type: 2 or "inf".
        groups: See `ParameterIndex`.

    Returns:
        Plain tensors, the same on every rank.

    Raises:
        ValueError: If there are no parameters that require a gradient, or an argument is out of range.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradient_norms([weight]).total_norm
        tensor(5.)
    """
    kind = parse_norm_type(norm_type)
    index = ParameterIndex(model, groups=groups)
    if all(gradient is None for gradient in index.gradients()):
        warn(f"no gradients found on any of {len(index)} parameters: call this after backward() and before zero_grad()")
    store = GradientStore(index, granularities=(granularity,), norm_types=(kind,), ring=1)
    view = store.view(granularity, kind)
    store.measure(step=0)
    return GradientNorms(view.layer_names, view.norms, view.total_norm, view.nonfinite)


def _intervals(value: int | Sequence[int] | None) -> frozenset[int]:
    values = [] if value is None else [value] if isinstance(value, int) else list(value)
    if any(interval < 1 for interval in values):
        raise ValueError(f"max_abs_every_n_steps={value!r}: expected at least 1; None turns it off")
    return frozenset(values)


def _key(granularity: Granularity) -> str:
    return granularity if isinstance(granularity, str) else repr(sorted(granularity.items()))
