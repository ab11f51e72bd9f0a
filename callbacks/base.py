"""StabilizerCallback, what it sees of a step, and what it leaves in a checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from stabilizer.callbacks._bases import HostCallback
from stabilizer.errors import warn
from stabilizer.late import LateLog
from stabilizer.names import Granularity, layer_names, select_layers
from stabilizer.store import LayerView, NormType

__all__ = ["AfterClip", "Order", "Selection", "StabilizerCallback", "StepContext", "check_interval"]


class Order(enum.IntEnum):
    """When a callback runs within a step, whatever its place in the user's list."""

    LOCALIZE = 10
    CLIP_LAYERS = 20
    CLIP_TOTAL = 30
    SKIP = 40
    LOG = 50


@dataclasses.dataclass(frozen=True)
class AfterClip:
    """What the optimizer gets after the host's own clip.

    Attributes:
        norms: By layer, shape (layers,).
        total_norm: Shape ().
    """

    norms: Tensor
    total_norm: Tensor


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
        after: Norms after the host's own clip, if it may clip; only in `on_step_end`.
    """

    def __init__(
        self,
        *,
        store: LayerView,
        selection: Selection,
        late: LateLog,
        tag_prefix: str,
        optimizer_index: int = 0,
        is_scaled: bool = False,
    ) -> None:
        self.step = store.step
        self.optimizer_index = optimizer_index
        self.store = store
        self.selected_names = selection.names
        self.is_scaled = is_scaled
        self.after: AfterClip | None = None
        self._selection = selection
        self._late = late
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

    def log(self, name: str, value: Tensor | float, *, show: bool = False) -> None:
        """Log a number under this step; it is written when it has reached the host.

        Args:
            name: Tag; the prefix of the callback and the optimizer is added.
            value: A number, or a tensor of one element on any device.
            show: Show it on the progress bar too.
        """
        self._late.add(value, tags=[self._prefix + name], show=show)

    def log_layers(self, name: str, values: Tensor) -> None:
        """Log one number for each selected layer.

        Args:
            name: Tag before the layer's name.
            values: Shape (layers,).
        """
        self._late.add(self.select(values), tags=[f"{self._prefix}{name}/{layer}" for layer in self.selected_names])

    def log_picture(self, name: str, render: Callable[[Tensor], Any], values: Tensor) -> None:
        """Log a picture.

        Args:
            name: Tag.
            render: Makes a matplotlib figure of the values, on the host, later.
            values: Any shape, on any device.
        """
        shape, sink, tag = values.shape, self._late.sink, self._prefix + name
        self.later(values, lambda step, flat: sink.picture(tag, render(flat.view(shape)), step))

    def later(self, values: Tensor, function: Callable[[int, Tensor], None]) -> None:
        """Call a function with values when they have reached the host, on the rank that logs.

        Args:
            values: On any device.
            function: Takes the step and the values, flat, in float32, on the CPU.
        """
        self._late.add(values, then=function)


class StabilizerCallback(HostCallback):
    """Base of all callbacks, and of a user's own monitor: implement `on_gradients`, `on_step_end` or both.

    Both run once an optimizer step on every rank, with numbers that are the same on every rank. They must not start a
    collective of their own. An exception in one disables the callback on all ranks and is logged once; training goes
    on.

    Args:
        every_n_steps: Interval in optimizer steps.
        layers: Which layers: block numbers, names or regular expressions; `None` means all.
        exclude: Which layers not.
        granularity: What a layer is: "block", "module", "parameter", or a mapping of regular expression -> layer name.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> class Spikes(StabilizerCallback):
        ...     def on_gradients(self, context):
        ...         context.log("spikes/largest_layer", context.store.norms.max())
        >>> Spikes(name="vision").state_key
        'Spikes[vision]'
    """

    order: ClassVar[int] = Order.LOG
    # What a subclass needs of the store.
    norm_type: NormType = 2
    history: int = 1
    max_abs_every_n_steps: int | None = None

    def __init__(
        self,
        *,
        every_n_steps: int = 1,
        layers: list[int | str] | None = None,
        exclude: Sequence[str] = (),
        granularity: Granularity = "block",
        name: str = "",
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.every_n_steps = check_interval("every_n_steps", every_n_steps)
        for argument, value in (("layers", layers), ("exclude", exclude)):
            if isinstance(value, str | int):
                raise ValueError(f"{argument}={value!r}: expected a list, such as [{value!r}]")
        self.layers = None if layers is None else list(layers)
        self.exclude = list(exclude)
        layer_names([], granularity)  # a bad granularity is an error here, not at the first step
        self.granularity = granularity
        self.name = name
        self.strict = strict
        self.driver: Any = None  # the host's, if this callback speaks for all of ours
        self._steps: dict[int, int] = {}
        self._views: dict[int, LayerView] = {}

    def on_gradients(self, context: StepContext) -> None:
        """Called when a step's gradients are complete and measured, before anybody changes them."""

    def on_step_end(self, context: StepContext) -> None:
        """Called after the optimizer step with the same context."""

    def on_run_end(self, context: StepContext) -> None:
        """Called when training ends, with the context of the last step."""

    def charts(self) -> dict[str, list[str]]:
        """Charts to arrange in TensorBoard: title -> regular expressions of tags."""
        return {}

    def choose(self, names: Sequence[str]) -> frozenset[str]:
        """Layers of a model that `layers=` and `exclude=` leave.

        Args:
            names: Clean names of the model's trainable parameters.

        Returns:
            Layer names.

        Raises:
            ValueError: If an item of `layers` or `exclude` matches nothing.
        """
        layers = list(dict.fromkeys(layer_names(names, self.granularity)))
        return frozenset(layers[position] for position in select_layers(layers, self.layers, self.exclude))

    def next_step(self, optimizer_index: int = 0) -> int:
        """Number of the optimizer step that comes next.

        Args:
            optimizer_index: Position of the optimizer.
        """
        return self._steps.get(optimizer_index, 0)

    def advance(self, optimizer_index: int, step: int) -> None:
        """Note that a step is done; the suite calls this.

        Args:
            optimizer_index: Position of the optimizer.
            step: Its number.
        """
        self._steps[optimizer_index] = step + 1

    def attach_view(self, optimizer_index: int, view: LayerView) -> None:
        """Take the view that this callback reads, before the first step of a run; the suite calls this.

        Args:
            optimizer_index: Position of the optimizer.
            view: Of the suite's store.
        """
        self._views[optimizer_index] = view

    def detach_view(self, optimizer_index: int) -> None:
        """Let go of the view, and with it of the model, when a run ends; the suite calls this.

        Args:
            optimizer_index: Position of the optimizer.
        """
        self._views.pop(optimizer_index, None)

    @property
    def state_key(self) -> str:
        """Name of this callback's state in a checkpoint: class and `name`, no other argument."""
        return type(self).__name__ + (f"[{self.name}]" if self.name else "")

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers, plain types; a resumed run that differs is warned."""
        plain = copy.deepcopy(self.granularity)
        return {
            "every_n_steps": self.every_n_steps,
            "layers": self.layers,
            "exclude": self.exclude,
            "granularity": plain if isinstance(plain, str) else dict(plain),
        }

    def extra_state(self) -> dict[str, Any]:
        """What a subclass adds to the state: plain types and CPU tensors."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `extra_state` gave."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: plain types and CPU clones, readable with `weights_only=True`."""
        return {
            "version": 1,
            "hyperparameters": self.hyperparameters(),
            "steps": {str(index): step for index, step in self._steps.items()},
            "extra": self.extra_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back a state.

        Args:
            state_dict: What `state_dict` gave; not changed.

        Raises:
            ValueError: If it is of another version or lacks a key.
        """
        expected = {"version", "hyperparameters", "steps", "extra"}
        if state_dict.get("version") != 1 or not expected <= state_dict.keys():
            raise ValueError(
                f"{self.state_key}: cannot load a state of version {state_dict.get('version')!r} with keys "
                f"{sorted(state_dict)}; expected version 1 with {sorted(expected)}. Train on without it by removing "
                "the callback's entry from the checkpoint."
            )
        saved, current = state_dict["hyperparameters"], self.hyperparameters()
        changed = {key: (saved.get(key), value) for key, value in current.items() if saved.get(key) != value}
        if changed:
            described = ", ".join(f"{key}: {before!r} -> {now!r}" for key, (before, now) in changed.items())
            warn(f"{self.state_key}: arguments differ from the checkpoint's ({described}); the new ones are used")
        self._steps = {int(index): int(step) for index, step in state_dict["steps"].items()}
        self.load_extra_state(copy.deepcopy(state_dict["extra"]))

    def __getstate__(self) -> dict[str, Any]:
        # Views and drivers hold process groups, device memory and the model; Lightning puts methods of the model on
        # every callback (`log`, `log_dict`). A copy gets its own when it runs.
        state = {key: value for key, value in self.__dict__.items() if key not in ("log", "log_dict")}
        return {**state, "driver": None, "_views": {}}


def check_interval(name: str, value: int | None, *, optional: bool = False) -> int:
    """Check an interval in steps.

    Args:
        name: Of the argument.
        value: What the user gave.
        optional: Whether `None` (off) is allowed.

    Returns:
        The value.

    Raises:
        ValueError: If it is not a whole number of at least 1.
    """
    if value is None and optional:
        return value  # type: ignore[return-value]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        off = "; None turns it off" if optional else ""
        raise ValueError(f"{name}={value!r}: expected a whole number of steps, at least 1{off}")
    return value
