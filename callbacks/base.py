"""StabilizerCallback: arguments that all callbacks have, their hooks, and what they leave in a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from stabilizer.callbacks._bases import HostCallback
from stabilizer.callbacks.charts import Chart
from stabilizer.callbacks.checks import check_interval, check_state, compare_arguments
from stabilizer.callbacks.console import RunConsole
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.order import Order
from stabilizer.names import Granularity, layer_names, select_layers
from stabilizer.observation_tally import ObservationTally
from stabilizer.tally import Weight
from stabilizer.view import LayerView, NormType

__all__ = ["Order", "StabilizerCallback"]


class StabilizerCallback(HostCallback):
    """Base of all callbacks, and of a user's own monitor: implement `on_gradients`, `on_step_end` or both.

    Both run once an optimizer step on every rank, with numbers that are the same on every rank. They must not start a
    collective of their own. An exception in one disables the callback on all ranks and is logged once; training goes
    on. A monitor that proposes something to `context.plan` says so in its class: `acts`, `may_skip`, `may_stop`.

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
    # Whether the suite calls the hooks at every n-th step only; a callback with several intervals looks itself.
    is_gated: ClassVar[bool] = True
    # What a subclass needs of the store.
    norm_type: NormType = 2
    history: int = 1
    # Groupings that it reads besides its `granularity`; `attach_more_views` gets their views.
    more_granularities: Sequence[Granularity] = ()
    max_abs_every_n_steps: int | None = None
    # What weighs the micro-batches in `context.loss`; without it a step's loss is not looked at.
    loss_weight: Weight | None = None
    # Whether it is of no use without a loss; else it only takes the weights that come with one.
    needs_loss: bool = True
    # At which steps `context.after` and `context.loss.extremes` are read. What is exchanged at a step follows from
    # these numbers, which are the same on every rank, and from nothing that could come out differently there.
    after_every_n_steps: Sequence[int] = ()
    extremes_every_n_steps: int | None = None

    # At which steps `context.parts` is read, and in what the sizes of micro-batches are counted there.
    parts_every_n_steps: int | None = None
    part_unit: Weight | None = None
    # Takes what a loop tells by `observe`; without it `context.observed` is `None`.
    observations: ObservationTally | None = None

    # What it may do to a step: propose anything but skips and stops, multiply gradients, skip, skip what is not finite,
    # end the run, clip elements. These decide what the host is asked and what ranks exchange, whatever comes out.
    acts: bool = False
    clips: bool = False
    may_skip: bool = False
    skips_nonfinite: bool = False
    may_stop: bool = False
    clips_values: bool = False
    # Whether it wants the parameters named whose gradient is not finite.
    names_nonfinite: bool = False
    # Whether it may let the optimizer take steps with a smaller learning rate, by `context.plan.scale_lr`.
    lowers_lr: bool = False
    # Whether it may ask, by `context.plan.search`, for `localize` before anything is done to the gradients.
    localizes: bool = False

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
        # The host's, while it runs: what drives the steps, and a RunHost.
        self.driver: Any = None
        self.host: Any = None
        self.console = RunConsole()  # while a run lasts, the one that all of its callbacks share
        self.has_failed = False
        self._steps: dict[int, int] = {}
        self._views: dict[int, LayerView] = {}

    def on_gradients(self, context: StepContext) -> None:
        """Called when a step's gradients are complete and measured, before anybody changes them."""

    def localize(self, context: StepContext, steps: Any) -> bool:
        """Called, where `localizes` is set, on every rank together after a rank has asked for it; may be a collective.

        Args:
            context: Of the step.
            steps: What there is to run again, a `stabilizer.callbacks.replays.StepReplay`.

        Returns:
            Whether the gradients are other ones now, the same on every rank; they are measured anew then.
        """
        return False

    def request_search(self, optimizer_index: int = 0) -> bool:
        """Asked by another callback, on every rank, to have a closer look at the next step.

        Args:
            optimizer_index: Position of the optimizer.

        Returns:
            Whether this callback searches at all.
        """
        return False

    def on_step_end(self, context: StepContext) -> None:
        """Called after the optimizer step with the same context."""

    def on_run_end(self, context: StepContext) -> None:
        """Called when training ends, with the context of the last step."""

    def summary(self, optimizer_index: int) -> list[tuple[str, str]]:
        """Rows of the summary at the end of a run, names and texts; called on rank 0, and may wait for the device.

        Args:
            optimizer_index: Position of the optimizer.
        """
        return []

    def join_run(self, host: Any) -> None:
        """Called on every rank when a run begins, before its first step: the model is wrapped as it will train.

        Args:
            host: A `stabilizer.callbacks.run_host.RunHost`; it is in `self.host` too, while the run lasts.

        Raises:
            ValueError: If this callback cannot work there as it was told to; the run does not begin then.
        """

    def check_model(self, model: Any) -> None:
        """Refuse a model that this callback cannot work with as it was told to; called before the first step.

        Args:
            model: As it will train.

        Raises:
            ValueError: Says what there is.
        """

    def limitations(self, setting: Any) -> list[str]:
        """What this callback promises and cannot do in a run, with the reasons; shown when training starts.

        Args:
            setting: What the host knows of the run, a `stabilizer.callbacks.preflight.Setting`.
        """
        return []

    def charts(self) -> list[Chart]:
        """Charts to arrange in TensorBoard's Custom Scalars; see `stabilizer.callbacks.Chart`."""
        return []

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

    def attach_more_views(self, optimizer_index: int, views: Sequence[LayerView]) -> None:
        """Take the views of `more_granularities`, after `attach_view`; the suite calls this.

        Args:
            optimizer_index: Position of the optimizer.
            views: In that order, of the same units as the callback's own.
        """

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
        if self.driver is not None:
            # Somebody saves after the optimizer has moved and before the host has told us.
            self.driver.settle()
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
        check_state(self.state_key, state_dict)
        compare_arguments(self.state_key, state_dict["hyperparameters"], self.hyperparameters())
        self._steps = {int(index): int(step) for index, step in state_dict["steps"].items()}
        self.load_extra_state(copy.deepcopy(state_dict["extra"]))

    def __getstate__(self) -> dict[str, Any]:
        # Views and drivers hold process groups, device memory and the model; Lightning puts methods of the model on
        # every callback (`log`, `log_dict`). A copy gets its own when it runs.
        state = {key: value for key, value in self.__dict__.items() if key not in ("log", "log_dict")}
        return {**state, "driver": None, "host": None, "console": RunConsole(), "_views": {}}
