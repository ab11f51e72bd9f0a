"""GradientStore: the statistics of one optimizer's gradients, measured once a step, on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stabilizer.applying import apply_plan_, clip_values_, without_parts
from stabilizer.diagnosis import BadParameter, nonfinite_parameters
from stabilizer.errors import warn
from stabilizer.measurement import Measurement, Measurer
from stabilizer.names import Granularity, layer_names
from stabilizer.parameters import ParameterIndex
from stabilizer.plan import StepPlan
from stabilizer.reduction import Reducer
from stabilizer.view import LayerView, NormType

__all__ = ["GradientStore"]


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
        reducer: Reaches the other ranks.
        unit_ids: Unit of every one of this rank's parameters; a unit is what no grouping tells apart.
        num_units: How many units there are.
        failure: What local statistics of this step failed with (they are NaN then), else `None`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
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
        self.reducer = reducer = Reducer(self.device)
        self.names = names = index.all_names(reducer)
        layers = {_key(granularity): layer_names(names, granularity) for granularity in granularities}
        # A unit is what no grouping tells apart: all that has to be reduced over ranks.
        keys = list(zip(*layers.values(), strict=True))
        units = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        overall = {name: number for number, name in enumerate(names)}
        self._positions = positions = [overall[name] for name in index.names]
        self.unit_ids = [units[keys[position]] for position in positions]
        self._measurer = Measurer(
            index,
            reducer,
            positions=positions,
            num_parameters=len(names),
            unit_ids=self.unit_ids,
            num_units=len(units),
            norm_types=frozenset(norm_types),
            max_abs_intervals=_intervals(max_abs_every_n_steps),
            num_flags=num_flags,
        )
        self._unit_layers = {key: [unit[number] for unit in units] for number, key in enumerate(layers)}
        self._views: dict[tuple[str, NormType], LayerView] = {}
        self.current: Measurement | None = None
        self.num_units = len(units)
        self.failure: Exception | None = None
        self._has_warned_of_parts = False

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
            self._views[key, norm_type] = LayerView(
                self._unit_layers[key], norm_type, ring=self.ring, device=self.device
            )
            if self.current is not None:
                self._views[key, norm_type].record(self.current)
        return self._views[key, norm_type]

    def agree_on_step(self, step: int) -> None:
        """Raise if the ranks are at different steps: what is due at a step would differ, and so would collectives.

        A collective, for the beginning of a run.

        Args:
            step: Number of this rank's next optimizer step.

        Raises:
            ValueError: On every rank, with the smallest and the largest number.
        """
        if self.reducer.world_size == 1:
            return
        numbers = torch.tensor([float(step), -float(step)], dtype=torch.float64, device=self.device)
        highest, lowest = self.reducer.maximum(numbers).tolist()
        if highest != -lowest:
            raise ValueError(
                f"the ranks are at different steps ({-lowest:.0f} to {highest:.0f}): load the states of the callbacks "
                "on every rank, or on none"
            )

    @torch.no_grad()
    def measure(
        self,
        step: int,
        *,
        grad_scale: Tensor | None = None,
        flags: Tensor | None = None,
        sums: Tensor | None = None,
        compare: bool = False,
        keep: bool = False,
    ) -> Measurement:
        """Measure the gradients as they are now; they are not changed, not even by a bit.

        Args:
            step: The optimizer step that is about to happen, counted from 0.
            grad_scale: What the loss was multiplied by, if the gradients have not been divided yet; shape ().
            flags: This rank's flags, shape (num_flags,).
            sums: This rank's part of further numbers that are summed over ranks in the same collective, shape (n,); n
                is the same on every rank. They cost a small collective of their own where norms need none.
            compare: Whether ranks that all hold whole gradients compare them (a collective on a step that needs none).
            keep: Whether `apply_` follows at once, and then `release`.

        Returns:
            The measurement, which is also what the views show from now on.
        """
        self.current = self._measurer.measure(step, grad_scale=grad_scale, flags=flags, sums=sums, compare=compare)
        self.failure = self._measurer.failure
        if not keep:
            self.release()
        for view in self._views.values():
            view.record(self.current)
        return self.current

    def total_norm(self) -> Tensor | None:
        """L2 norm of all gradients as they were measured last, shape (), float32; `None` where that is not known."""
        if self.current is None or self.failure is not None or 2 not in self._measurer.norm_types:
            return None
        return self.current.squares.sum().sqrt().to(torch.float32)

    @property
    def needs_replan(self) -> bool:
        """Whether this rank has seen gradients become Partial since the ranks agreed on which are."""
        return self._measurer.needs_replan

    def replan(self) -> None:
        """Agree anew on which gradients are Partial sums: a collective, after a backward pass."""
        self._measurer.replan()

    @torch.no_grad()
    def remeasure(self, *, grad_scale: Tensor | None = None) -> Measurement:
        """Measure once more within the step, after a clip: one more pass, and one more collective.

        Args:
            grad_scale: As of `measure`.

        Returns:
            The measurement; the views keep the first one.
        """
        step = 0 if self.current is None else self.current.step
        found = self._measurer.measure(step, grad_scale=grad_scale, flags=None, sums=None, compare=False)
        self.release()
        return found

    @torch.no_grad()
    def apply_(self, plan: StepPlan, *, grad_scale: Tensor | None = None) -> None:
        """Change the gradients as planned; no collective, and the host waits for nothing.

        Args:
            plan: Made of this step's measurement.
            grad_scale: What the gradients are still multiplied by, shape ().
        """
        if plan.is_empty:
            return
        # Those of the measurement, if it was just made: to look at a DTensor's elements takes its time.
        gradients = self._measurer.local_gradients or self._local_gradients()
        apply_plan_(plan, gradients, self.unit_ids)
        if plan.limits is not None:
            gradients, left_out = without_parts(self.index, gradients, [unit in plan.limited for unit in self.unit_ids])
            clip_values_(plan, gradients, self.unit_ids, grad_scale=grad_scale)
            self._warn_of_parts(left_out)

    def release(self) -> None:
        """Let go of the gradients that were measured; whoever measures to change them calls this afterwards."""
        self._measurer.local_gradients = None

    @torch.no_grad()
    def nonfinite_parameters(self) -> list[BadParameter]:
        """Parameters with elements that are not finite, in the order of a backward pass; see `stabilizer.diagnosis`.

        A collective, and the host waits: for steps that are known to have some.
        """
        index = self.index
        gradients = index.gradients()
        placements = [index.placements(position, gradient) for position, gradient in enumerate(gradients)]
        return nonfinite_parameters(
            self._local_gradients(),
            weights=[index.weight(position, where) for position, where in enumerate(placements)],
            positions=self._positions,
            names=self.names,
            reducer=self.reducer,
        )

    def sum(self, values: Tensor) -> Tensor:
        """Sums over all ranks: a collective.

        Args:
            values: Shape (n,), where the gradients are.

        Returns:
            Shape (n,), the same on every rank.
        """
        return self.reducer.sum(values)

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks: a collective, and a wait.

        Args:
            values: Shape (n,), on the CPU.

        Returns:
            Shape (ranks, n), on the CPU.
        """
        return self.reducer.gather(values.to(self.device)).cpu()

    def _warn_of_parts(self, names: Sequence[str]) -> None:
        if names and not self._has_warned_of_parts:
            self._has_warned_of_parts = True
            warn(
                f"the gradients of {names[:5]} ({len(names)} in all) are Partial sums or sparse: their elements are "
                "not clipped by value, only by norm"
            )

    def _local_gradients(self) -> list[Tensor | None]:
        gradients = self.index.gradients()
        return [None if gradient is None else self.index.local(gradient) for gradient in gradients]


def _intervals(value: int | Sequence[int] | None) -> frozenset[int]:
    values = [] if value is None else [value] if isinstance(value, int) else list(value)
    if any(interval < 1 for interval in values):
        raise ValueError(f"max_abs_every_n_steps={value!r}: expected at least 1; None turns it off")
    return frozenset(values)


def _key(granularity: Granularity) -> str:
    return granularity if isinstance(granularity, str) else repr(sorted(granularity.items()))
