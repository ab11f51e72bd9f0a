"""LayerView: a store's statistics by layer, and a ring of past norms, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from stabilizer.measurement import Measurement
from stabilizer.segments import Segments

if TYPE_CHECKING:
    from stabilizer.plan import StepPlan

__all__ = ["LayerView", "NormType", "parse_norm_type"]

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


class LayerView:
    """One grouping and one norm of a store: what callbacks call `context.store`.

    Args:
        unit_layers: Layer of every unit of the store.
        norm_type: 2 or "inf".
        ring: How many past steps are kept.
        device: Where the statistics are.

    Attributes:
        layer_names: Names of the layers, in the model's order.
        unit_layers: Position of its layer for every unit of the store.
        ring: Norms of past steps, shape (steps, layers + 1), the last column is the total; rows of `ring_steps`.
        ring_steps: Step of every row of the ring, -1 where there is none yet.
    """

    def __init__(self, unit_layers: Sequence[str], norm_type: NormType, *, ring: int, device: torch.device) -> None:
        self.layer_names: tuple[str, ...] = tuple(dict.fromkeys(unit_layers))
        self.norm_type = norm_type
        numbers = {name: number for number, name in enumerate(self.layer_names)}
        ids = [numbers[name] for name in unit_layers]
        self.unit_layers = ids
        self._segments = Segments(ids, num_segments=len(numbers), device=device)
        self._current: Measurement | None = None
        self._cache: tuple[Measurement, Tensor, Tensor] | None = None
        self.ring = torch.zeros(ring, len(numbers) + 1, device=device)
        self.ring_steps = [-1] * ring

    @property
    def measurement(self) -> Measurement:
        """The measurement of the current step."""
        if self._current is None:
            raise ValueError("the store has not measured any step yet: call store.measure(step) first")
        return self._current

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
            values = self.norms_of_squares(measurement.squares)
        else:
            maxima = self._segments.max(measurement.maxima)
            values = maxima, maxima.max()
        self._cache = (measurement, *values)
        return values

    def norms_of_squares(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        """L2 norms by layer and in total.

        Args:
            squares: Sums of squares of the store's units, shape (units,).

        Returns:
            Shapes (layers,) and (), float32.
        """
        layers = self._segments.sum(squares).sqrt().to(torch.float32)
        return layers, squares.sum().sqrt().to(torch.float32)

    def sums_of(self, values: Tensor) -> Tensor:
        """Sums by layer of what is known by unit.

        Args:
            values: Shape (units,).

        Returns:
            Shape (layers,).
        """
        return self._segments.sum(values)

    def norms_after(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Norms of what a plan leaves of the gradients; a clip by value is not in them.

        Args:
            plan: Of this step.

        Returns:
            Shapes (layers,) and (), float32; NaN if the step is skipped.
        """
        if self.norm_type == 2:
            layers, total = self.norms_of_squares(plan.squares_after)
        else:
            maxima = self.measurement.maxima * plan.coefficients.to(torch.float32)
            maxima = maxima if plan.zeroed is None else maxima.masked_fill(plan.zeroed, 0.0)
            layers = self._segments.max(maxima)
            total = layers.amax()
        if plan.skip is not None:
            layers, total = layers.masked_fill(plan.skip, torch.nan), total.masked_fill(plan.skip, torch.nan)
        return layers, total

    def spread(self, values: Tensor) -> Tensor:
        """The value of its layer for every unit of the store.

        Args:
            values: Shape (layers,).

        Returns:
            Shape (units,).
        """
        return self._segments.spread(values)

    def past(self, limit: int | None = None) -> tuple[list[int], Tensor]:
        """Norms of past steps.

        Args:
            limit: At most so many, the newest ones.

        Returns:
            The steps, ascending, and their norms, shape (steps, layers + 1), on the device; the last column is the
            total.
        """
        size = len(self.ring_steps)
        steps = sorted(step for step in self.ring_steps if step >= 0)
        steps = steps if limit is None else steps[-limit:]
        if steps and steps[-1] - steps[0] + 1 == len(steps):
            # Steps that follow one another are one or two slices; an index tensor would be copied from the host.
            first = steps[0] % size
            end = first + len(steps)
            return steps, torch.cat([self.ring[first:end], self.ring[: max(0, end - size)]])
        rows = [self.ring[step % size] for step in steps]
        return steps, torch.stack(rows) if rows else self.ring[:0]

    def restore(self, steps: Sequence[int], rows: Tensor, layer_names: Sequence[str]) -> None:
        """Fill the ring from a checkpoint.

        Args:
            steps: Step of every row.
            rows: Shape (steps, layers + 1), the last column is the total.
            layer_names: Of the columns; columns of layers that are no more are dropped, new layers get NaN.
        """
        columns = {name: column for column, name in enumerate(layer_names)}
        padded = torch.cat([rows, rows.new_full((len(steps), 1), torch.nan)], dim=1)
        order = [columns.get(name, len(columns) + 1) for name in self.layer_names] + [len(columns)]
        values = padded[:, order].to(self.ring.device)
        for step, row in list(zip(steps, values, strict=True))[-len(self.ring_steps) :]:
            self.ring[step % len(self.ring_steps)] = row
            self.ring_steps[step % len(self.ring_steps)] = step

    def record(self, measurement: Measurement) -> None:
        """Show a measurement from now on, and keep its norms in the ring; the store calls this.

        Args:
            measurement: Of the step at hand.
        """
        self._current = measurement
        row = self.step % len(self.ring_steps)
        norms, total = self.norms_of(measurement)
        self.ring[row].copy_(torch.cat([norms, total.view(1)]))  # one write: each costs a few microseconds
        self.ring_steps[row] = self.step
