"""StepContext: what a callback sees of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stabilizer.callbacks.run_facts import RunFacts
from stabilizer.drawing import drawn
from stabilizer.late import LateLog
from stabilizer.losses import StepLoss
from stabilizer.observations import StepObservations
from stabilizer.plan import LayerPlan
from stabilizer.step_parts import StepParts
from stabilizer.view import LayerView

__all__ = ["AfterClip", "Position", "Selection", "StepContext", "StepOutcome"]


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a host is in its data.

    Attributes:
        batch_index: Number of the last micro-batch of the step, as the host counts; -1 if it does not.
        num_micro_batches: How many of them this rank has propagated for the step; 0 if that is not known.
        divisor: How many the loss was divided by; 0 if that is not known.
        epoch: As the host counts; -1 if it does not.
    """

    batch_index: int = -1
    num_micro_batches: int = 0
    divisor: int = 0
    epoch: int = -1

    @property
    def is_short(self) -> bool:
        """Whether the step has fewer micro-batches than its loss was divided by, so that its gradient is too small."""
        return 0 < self.num_micro_batches < self.divisor


@dataclasses.dataclass(frozen=True)
class AfterClip:
    """What the optimizer gets after all clips, ours and the host's.

    Attributes:
        norms: By layer, shape (layers,).
        total_norm: Shape ().
    """

    norms: Tensor
    total_norm: Tensor


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """What has become of a step.

    Attributes:
        skipped: Whether the optimizer was kept from it, shape (), bool.
        overflowed: Whether its gradients were not finite under a loss scale, so that the scaler left it out, shape (),
            bool; such a step is not among the skipped ones.
    """

    skipped: Tensor
    overflowed: Tensor


class Selection:
    """The layers of a view that a callback looks at.

    Args:
        view: All layers.
        chosen: Names of the wanted ones; names of other optimizers' layers may be among them.
    """

    def __init__(self, view: LayerView, chosen: frozenset[str]) -> None:
        positions = [position for position, name in enumerate(view.layer_names) if name in chosen]
        self.names = [view.layer_names[position] for position in positions]
        is_all = len(positions) == len(view.layer_names)
        self.index = None if is_all else torch.tensor(positions, dtype=torch.long, device=view.ring.device)


class StepContext:
    """One step as one callback sees it.

    Attributes:
        step: The optimizer step, counted from 0 by the update that is about to happen.
        optimizer_index: Position of the optimizer.
        store: This step's statistics by layer: `layer_names`, `norms`, `total_norm`, `nonfinite`, `step`.
        selected_names: The layers that `layers=` and `exclude=` of the callback leave.
        is_scaled: Whether a gradient scaler guards the step, so that a non-finite gradient is its business.
        is_bad: Whether any gradient is not finite, shape (), bool, the same on every rank.
        position: Which batch the step ends with, and how many micro-batches it has.
        loss: The step's loss over all ranks, for a callback with `loss_weight`; `None` for others.
        parts: What the step's gradient is made of, for a callback with `parts_every_n_steps` at those steps.
        observed: What was observed of the step over all ranks, for a callback with `observations`; `None` for others.
        run: What is known of the run (number of parameters, batch size); `None` where no host says.
        plan: Takes proposals for what is to happen to the gradients; only in `on_gradients`.
        after: Norms after all clips, ours and the host's, if anybody may clip; only in `on_step_end`.
        outcome: What has become of the step; only in `on_step_end`.
        was_searched: Whether something was wrong enough to be looked for: worth logging in full.
    """

    def __init__(
        self,
        *,
        store: LayerView,
        plan: LayerPlan,
        selection: Selection,
        late: LateLog,
        tag_prefix: str,
        optimizer_index: int = 0,
        is_scaled: bool = False,
        is_bad: Tensor,
        position: Position | None = None,
        loss: StepLoss | None = None,
        parts: StepParts | None = None,
        observed: StepObservations | None = None,
        observe: Callable[..., None] | None = None,
        run: RunFacts | None = None,
        owner: int = -1,
        defer: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.step = store.step
        self.optimizer_index = optimizer_index
        self.store = store
        self.plan = plan
        self.selected_names = selection.names
        self.is_scaled = is_scaled
        self.is_bad = is_bad
        self.position = Position() if position is None else position
        self.loss, self.parts, self.observed, self.run = loss, parts, observed, run
        self.after: AfterClip | None = None
        self.outcome: StepOutcome | None = None
        self.was_searched = False
        self._selection = selection
        self._late, self._owner, self._defer, self._observe = late, owner, defer, observe
        self._prefix = tag_prefix

    def select(self, values: Tensor) -> Tensor:
        """Values of the selected layers.

        Args:
            values: Shape (..., layers).

        Returns:
            Shape (..., selected).
        """
        index = self._selection.index
        return values if index is None else values.index_select(-1, index)

    def defer(self, function: Callable[[], None]) -> None:
        """Have a function called when this step is closed for all callbacks: to save a checkpoint, or to end the run.

        Args:
            function: Called on every rank that has asked, in order; what it raises is the callback's fault.
        """
        assert self._defer is not None
        self._defer(function)

    def observe(self, **observed: Any) -> None:
        """Observe something for `RolloutMismatchCallback` in a callback of one's own, on any rank.

        The numbers of this step have been exchanged before any callback sees it, so this counts for the next one.

        Args:
            **observed: See `RolloutMismatchCallback.observe`.

        Raises:
            ValueError: If a name is not known, or a shape does not fit.
        """
        assert self._observe is not None
        self._observe(**observed)

    def log(self, name: str, value: Tensor | float, *, show: bool = False, finite_only: bool = False) -> None:
        """Log a number under this step; it is written when it has reached the host.

        Args:
            name: Tag; the prefix of the callback and the optimizer is added.
            value: A number, or a tensor of one element on any device.
            show: Show it on the progress bar too.
            finite_only: Leave it out if it is not finite.
        """
        self._late.add(value, tags=[self._prefix + name], show=show, finite_only=finite_only)

    def log_many(self, values: Mapping[str, Tensor], *, finite_only: bool = False) -> None:
        """Log several numbers in one piece.

        Args:
            values: Tag -> tensor of shape (), all of one type on one device.
            finite_only: Leave out those that are not finite.
        """
        tags = [self._prefix + name for name in values]
        self._late.add(torch.stack(list(values.values())), tags=tags, finite_only=finite_only)

    def spread(self, values: Tensor, *, fill: float) -> Tensor:
        """Values of the selected layers at their places among all layers.

        Args:
            values: Shape (selected,).
            fill: For the other layers.

        Returns:
            Shape (layers,).
        """
        index = self._selection.index
        if index is None:
            return values
        return values.new_full((len(self.store.layer_names),), fill).index_copy(0, index, values)

    def log_layers(self, name: str, values: Tensor, *, finite_only: bool = False) -> None:
        """Log one number for each selected layer.

        Args:
            name: Tag before the layer's name.
            values: Shape (layers,).
            finite_only: Leave out those that are not finite.
        """
        tags = [f"{self._prefix}{name}/{layer}" for layer in self.selected_names]
        self._late.add(self.select(values), tags=tags, finite_only=finite_only)

    def log_picture(self, name: str, render: Callable[[Tensor], Any], values: Tensor) -> None:
        """Log a picture.

        Args:
            name: Tag.
            render: Makes a matplotlib figure of the values, on the host, later, in a thread that no step waits for.
            values: Any shape, on any device.
        """
        shape, sink, tag = values.shape, self._late.sink, self._prefix + name

        def draw(step: int, flat: Tensor) -> None:
            figure = render(flat.view(shape))
            with drawn([figure]):
                sink.picture(tag, figure, step)

        def hand_over(step: int, flat: Tensor) -> None:
            own = flat.clone()  # a part of a row, whose other values need not stay
            self._late.aside(f"the picture {tag}", lambda: draw(step, own), owner=self._owner, is_large=True)

        self.later(values, hand_over)

    @property
    def is_logging(self) -> bool:
        """Whether this process writes to the loggers."""
        return self._late.sink.is_logging

    def log_dir(self) -> Path:
        """The folder of the loggers; the current one where they have none."""
        found = self._late.sink.folder()
        return Path(".") if found is None else Path(found)

    def write_text(self, name: str, text: str) -> None:
        """Write a text under this step, on the process that logs; nobody waits for it.

        Args:
            name: Tag; the prefix of the callback and the optimizer is added.
            text: Markdown.
        """
        sink, tag, step = self._late.sink, self._prefix + name, self.step
        self._late.aside(f"the text {tag}", lambda: sink.text(tag, text, step), owner=self._owner)

    def write_pictures(
        self, name: str, render: Callable[[], Mapping[str, Any]], *, then: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Write pictures under this step, on the process that logs; nobody waits for them.

        Args:
            name: What their tags begin with; the prefix of the callback and the optimizer is added, and their own name.
            render: Makes matplotlib figures by name, in a thread of its own, from what does not change any more.
            then: Gets them, to write them elsewhere too.
        """
        sink, tag, step = self._late.sink, self._prefix + name, self.step

        def draw() -> None:
            figures = render()
            with drawn(figures.values()):
                for own, figure in figures.items():
                    sink.picture(f"{tag}/{own}", figure, step)
                then(figures)

        self._late.aside(f"pictures of {tag}", draw, owner=self._owner, is_large=True)

    def later(self, values: Tensor, function: Callable[[int, Tensor], None]) -> None:
        """Call a function with values when they have reached the host, on the rank that logs.

        Args:
            values: On any device.
            function: Takes the step and the values, flat, in float32, on the CPU.
        """
        self._late.add(values, then=function, owner=self._owner)
