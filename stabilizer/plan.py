"""StepPlan: what callbacks propose for one step's gradients.

Deciding is arithmetic on a few numbers on the device; nothing here waits for it. Numbers are those of the whole model,
so that every rank proposes the same. `stabilizer.applying` does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from stabilizer.view import LayerView

__all__ = ["LayerPlan", "StepPlan", "Stop"]


@dataclasses.dataclass(frozen=True)
class Stop:
    """A wish to end the run before this step's update.

    Attributes:
        flag: Whether, shape (), bool.
        describe: Gives the reason, when the flag is up.
    """

    flag: Tensor
    describe: Callable[[], str]


class StepPlan:
    """What is to happen to one step's gradients, by unit of the store.

    Coefficients multiply, skips add up; the order of proposals does not matter, except that `squares_after` looks at
    what has been proposed so far.

    Args:
        squares: Sums of squares of the units, shape (units,), over all ranks.

    Attributes:
        squares: As given.
        skip: Whether the step is to be skipped, shape (), bool; `None` if nobody may ask for it.
        search: Whether the step is to be searched before anything is done, shape (), bool; `None` if nobody may ask.
        searches: The same by callback: its number -> flag.
        stops: Wishes to end the run.
        limits: Largest absolute value of an element by unit, shape (units,); `None` if nobody clips by value.
        limited: Units that have such a limit, as the host knows them.
        lr_factor: What the learning rates are multiplied by for this step.
        zeroed: Units whose gradient is to be zero, shape (units,), bool; `None` if nobody may ask for it.
    """

    def __init__(self, squares: Tensor) -> None:
        self.squares = squares
        self.skip: Tensor | None = None
        self.search: Tensor | None = None
        self.searches: dict[int, Tensor] = {}
        self.stops: list[Stop] = []
        self.limits: Tensor | None = None
        self.limited: frozenset[int] = frozenset()
        self.zeroed: Tensor | None = None
        self.lr_factor = 1.0
        self._units: Tensor | None = None
        self._total: Tensor | None = None
        self._squares_after: Tensor | None = None

    @property
    def has_coefficients(self) -> bool:
        """Whether anybody has proposed a coefficient, be it 1."""
        return self._units is not None or self._total is not None

    @property
    def is_empty(self) -> bool:
        """Whether nobody has proposed to change a gradient."""
        return not self.has_coefficients and self.zeroed is None and self.limits is None

    @property
    def is_uniform(self) -> bool:
        """Whether one coefficient is that of all units."""
        return self._units is None

    @property
    def coefficients(self) -> Tensor:
        """What every unit's gradient is multiplied by, shape (units,), float64 where the device has it."""
        if self._units is None:
            ones = torch.ones_like(self.squares)
            return ones if self._total is None else ones * self._total
        return self._units if self._total is None else self._units * self._total

    @property
    def squares_after(self) -> Tensor:
        """Sums of squares of what is left of the units, shape (units,); a clip by value is not in them."""
        if self._squares_after is None:
            squares = self.squares if self.zeroed is None else self.squares.masked_fill(self.zeroed, 0.0)
            self._squares_after = squares * self.coefficients.square() if self.has_coefficients else squares
        return self._squares_after

    def multiply(self, coefficients: Tensor) -> None:
        """Propose coefficients.

        Args:
            coefficients: Shape (units,). One that is not in (0, 1], and that of a unit whose norm is not finite, counts
                as 1: nothing here turns a gradient around, makes it larger, or spreads a NaN.
        """
        safe = self._safe(coefficients, torch.isfinite(self.squares))
        self._units = safe if self._units is None else self._units * safe
        self._squares_after = None

    def multiply_total(self, coefficient: Tensor) -> None:
        """Propose a coefficient for all units.

        Args:
            coefficient: Shape (); see `multiply`.
        """
        safe = self._safe(coefficient, torch.isfinite(self.squares_after.sum()))
        self._total = safe if self._total is None else self._total * safe
        self._squares_after = None

    def zero(self, flags: Tensor) -> None:
        """Propose that units get a gradient of zero.

        Args:
            flags: Shape (units,), bool.
        """
        self.zeroed = flags if self.zeroed is None else self.zeroed | flags
        self._squares_after = None

    def limit(self, limits: Tensor, limited: Iterable[int] = ()) -> None:
        """Propose largest absolute values of elements.

        Args:
            limits: Shape (units,); infinity where there is none.
            limited: Units that have one.
        """
        self.limited |= frozenset(limited)
        self.limits = limits if self.limits is None else torch.minimum(self.limits, limits)

    def request_skip(self, flag: Tensor) -> None:
        """Ask that the step leave parameters and optimizer as they are.

        Args:
            flag: Shape (), bool.
        """
        self.skip = flag if self.skip is None else self.skip | flag

    def cancel(self, is_void: Tensor) -> None:
        """Take all proposals back, because a rank could not make its own; the skip is the caller's affair.

        Args:
            is_void: Whether, shape (), bool, the same on every rank.
        """
        self._units = None if self._units is None else self._units.masked_fill(is_void, 1.0)
        self._total = None if self._total is None else self._total.masked_fill(is_void, 1.0)
        self.zeroed = None if self.zeroed is None else self.zeroed & ~is_void
        self.limits = None if self.limits is None else self.limits.masked_fill(is_void, torch.inf)
        self._squares_after = None

    def _safe(self, coefficients: Tensor, is_usable: Tensor) -> Tensor:
        values = coefficients.to(self.squares.dtype)
        return torch.where(is_usable & (values > 0) & (values < 1), values, torch.ones_like(values))


class LayerPlan:
    """A plan as one callback sees it: by its own layers.

    Args:
        plan: Of the step.
        view: The callback's.

    Example:
        >>> from torch import nn
        >>> from stabilizer import GradientStore, ParameterIndex
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> store = GradientStore(ParameterIndex(model))
        >>> plan = StepPlan(store.measure(step=0).squares)
        >>> LayerPlan(plan, store.view()).clip_layers(torch.tensor([0.2]))
        >>> LayerPlan(plan, store.view()).total_norm()
        tensor(1.)
        >>> store.apply_(plan)
        >>> model.weight.grad
        tensor([[0.6000, 0.8000]])
    """

    def __init__(
        self,
        plan: StepPlan,
        view: LayerView,
        *,
        may_act: bool = True,
        may_skip: bool = True,
        may_stop: bool = True,
        localizes: bool = True,
        lowers_lr: bool = True,
        owner: int = -1,
    ) -> None:
        self._plan, self._view, self._owner = plan, view, owner
        self._rights = {"acts": may_act, "may_skip": may_skip, "may_stop": may_stop}
        self._rights.update(localizes=localizes, lowers_lr=lowers_lr)

    def clip_layers(self, coefficients: Tensor) -> None:
        """Multiply layers' gradients.

        Args:
            coefficients: Shape (layers,), in (0, 1]; see `StepPlan.multiply` for others.
        """
        self._plan.multiply(self._view.spread(self._checked("acts", coefficients, len(self._view.layer_names))))

    def clip_total(self, coefficient: Tensor) -> None:
        """Multiply all gradients.

        Args:
            coefficient: Shape (), in (0, 1].
        """
        self._plan.multiply_total(self._checked("acts", coefficient))

    def zero_layers(self, flags: Tensor) -> None:
        """Set layers' gradients to zero.

        Args:
            flags: Shape (layers,), bool.
        """
        self._plan.zero(self._view.spread(self._checked("acts", flags, len(self._view.layer_names)) != 0))

    def clip_values(self, limits: Mapping[str, float]) -> None:
        """Clip every element of layers, after all else; directions change.

        Args:
            limits: Layer name -> largest absolute value.
        """
        names = self._view.layer_names
        values = torch.tensor([limits.get(name, torch.inf) for name in names])
        values = values.to(self._plan.squares.device, non_blocking=True)
        limited = [unit for unit, layer in enumerate(self._view.unit_layers) if names[layer] in limits]
        self._plan.limit(self._view.spread(self._checked("acts", values, len(names))), limited)

    def skip(self, flag: Tensor) -> None:
        """Skip the step: parameters and optimizer stay as they are.

        Args:
            flag: Whether, shape (), bool, the same on every rank.
        """
        self._plan.request_skip(self._checked("may_skip", flag) != 0)

    def stop(self, flag: Tensor, describe: Callable[[], str]) -> None:
        """End the run with an error before the update, on every rank. The host waits for the flag.

        Args:
            flag: Whether, shape (), bool, the same on every rank.
            describe: Gives the reason, when the flag is up.
        """
        self._plan.stops.append(Stop(self._checked("may_stop", flag) != 0, describe))

    def scale_lr(self, factor: float) -> None:
        """Let the optimizer take this step with a smaller learning rate; schedulers and checkpoints see nothing of it.

        Args:
            factor: In (0, 1], the same on every rank; several multiply.
        """
        self._check("lowers_lr")
        if not 0 < factor <= 1:
            raise ValueError(f"factor={factor!r}: expected a number in (0, 1]")
        self._plan.lr_factor *= factor

    def search(self, flag: Tensor) -> None:
        """Have `localize` called before anything is done to the gradients. The host waits for the flag.

        Args:
            flag: Whether, shape (), bool; one rank's is enough.
        """
        wanted = self._checked("localizes", flag) != 0
        self._plan.search = wanted if self._plan.search is None else self._plan.search | wanted
        self._plan.searches[self._owner] = wanted

    def norms(self) -> Tensor:
        """Norms of what the plan leaves of the layers so far, shape (layers,), float32."""
        return self._view.norms_of_squares(self._plan.squares_after)[0]

    def total_norm(self) -> Tensor:
        """Norm of what the plan leaves of all gradients so far, shape (), float32."""
        return self._view.norms_of_squares(self._plan.squares_after)[1]

    def _check(self, right: str) -> None:
        if not self._rights[right]:
            raise ValueError(
                f"a callback that proposes this must say so before the run, for all ranks to know: {right} = True in "
                "its class"
            )

    def _checked(self, right: str, value: Tensor | float, *shape: int) -> Tensor:
        """A proposal as it must be; a mistake is one here, in the hook that made it, and on every rank."""
        self._check(right)
        tensor = torch.as_tensor(value, device=self._plan.squares.device)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"a proposal of shape {tuple(tensor.shape)}: expected {shape}")
        return tensor
