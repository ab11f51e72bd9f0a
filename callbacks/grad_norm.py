"""GradNormCallback: the gradient norm of every layer and of all parameters together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.charts import Chart, ChartPage, SharedTitle
from stabilizer.callbacks.checks import check_interval, check_optional_interval
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.pictures import SkipRing, can_draw, norm_heatmap
from stabilizer.errors import warn
from stabilizer.names import Granularity
from stabilizer.view import LayerView, NormType, parse_norm_type

__all__ = ["GradNormCallback", "NormHistory"]


@dataclasses.dataclass(frozen=True)
class NormHistory:
    """Norms of past steps, on the CPU.

    Attributes:
        layer_names: Names of the layers.
        steps: Optimizer steps, ascending; at most the last `history` ones.
        norms: By step and layer, shape (steps, layers).
        totals: By step, shape (steps,).
    """

    layer_names: tuple[str, ...]
    steps: list[int]
    norms: Tensor
    totals: Tensor


class GradNormCallback(StabilizerCallback):
    """Logs gradient norms, in total and by layer, raw and after the host's own clip.

    The norms are those of the whole model's gradients over all ranks, unscaled, reduced, not yet clipped. They reach
    the loggers at least one step late, under the step that they belong to; the host waits for nothing. In TensorBoard:
    the group `grad_norm`, all layers in one chart under Custom Scalars, and a picture layers x steps under Images.

    Args:
        every_n_steps: Interval of the total norm, in optimizer steps.
        layer_every_n_steps: Interval of the norms by layer, which are logged at every step that was searched as well;
            `None` is off.
        norm_type: 2 or "inf".
        max_abs_every_n_steps: Interval of the largest absolute value by layer, which costs about ten norms; `None` is
            off.
        heatmap_every_n_steps: Interval of the picture; one more is drawn when training ends. `None` is off.
        history: How many steps the picture shows, and how many are kept on the device and in checkpoints.
        progress_bar: Show the total norm there.
        layers: Which layers: block numbers, names or regular expressions; `None` means all.
        exclude: Which layers not.
        granularity: What a layer is: "block", "module", "parameter", or a mapping of regular expression -> layer name.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> callback = GradNormCallback(layers=[0, -1], layer_every_n_steps=1)
        >>> callback.state_key
        'GradNormCallback'
    """

    is_gated = False

    def __init__(
        self,
        *,
        every_n_steps: int = 1,
        layer_every_n_steps: int | None = 10,
        norm_type: int | float | str = 2,
        max_abs_every_n_steps: int | None = None,
        heatmap_every_n_steps: int | None = 1000,
        history: int = 1024,
        progress_bar: bool = False,
        layers: list[int | str] | None = None,
        exclude: Sequence[str] = (),
        granularity: Granularity = "block",
        name: str = "",
        strict: bool = False,
    ) -> None:
        super().__init__(
            every_n_steps=every_n_steps,
            layers=layers,
            exclude=exclude,
            granularity=granularity,
            name=name,
            strict=strict,
        )
        self.layer_every_n_steps = check_optional_interval("layer_every_n_steps", layer_every_n_steps)
        intervals = (every_n_steps, layer_every_n_steps)
        self.after_every_n_steps = [interval for interval in intervals if interval is not None]
        self.norm_type: NormType = parse_norm_type(norm_type)
        self.max_abs_every_n_steps = check_optional_interval("max_abs_every_n_steps", max_abs_every_n_steps)
        self.heatmap_every_n_steps = check_optional_interval("heatmap_every_n_steps", heatmap_every_n_steps)
        self.history = check_interval("history", history)
        self.progress_bar = progress_bar
        self._has_warned = False
        self._drawn_at: dict[int, int] = {}
        self._skipped: dict[int, SkipRing] = {}
        self._saved: dict[int, dict[str, Any]] = {}

    def on_gradients(self, context: StepContext) -> None:
        """Log this step's norms where they are due."""
        store, step = context.store, context.step
        if step % self.every_n_steps == 0:
            context.log(tags.GRAD_NORM_TOTAL, store.total_norm, show=self.progress_bar)
            nonfinite = store.nonfinite
            context.log(tags.GRAD_NORM_NONFINITE, nonfinite.sum())
            if not context.is_scaled and not self._has_warned and not self._is_told_by_others():
                names = store.layer_names
                context.later(nonfinite, lambda step, flags: self._warn_nonfinite(step, flags, names))
        if _is_due(step, self.layer_every_n_steps):
            context.log_layers(tags.GRAD_NORM_LAYER, store.norms)
        if _is_due(step, self.max_abs_every_n_steps):
            largest = store.max_abs
            assert largest is not None  # the store measures what the callbacks say they need
            context.log_layers(tags.GRAD_NORM_MAX_ABS, largest)
        if step and _is_due(step, self.heatmap_every_n_steps):
            self._draw(context)

    def on_step_end(self, context: StepContext) -> None:
        """Log what the optimizer got, if the host may have clipped; and the layers of a step that was searched."""
        interval = self.layer_every_n_steps
        if context.was_searched and interval is not None and not _is_due(context.step, interval):
            context.log_layers(tags.GRAD_NORM_LAYER, context.store.norms)
        self._note_skip(context)
        if context.after is None:
            return
        if context.step % self.every_n_steps == 0:
            context.log(tags.GRAD_NORM_TOTAL_AFTER, context.after.total_norm)
        if _is_due(context.step, self.layer_every_n_steps):
            context.log_layers(tags.GRAD_NORM_LAYER_AFTER, context.after.norms)

    def on_run_end(self, context: StepContext) -> None:
        """Draw the last picture."""
        if self.heatmap_every_n_steps is not None and self._drawn_at.get(context.optimizer_index) != context.step:
            self._draw(context)

    def norm_history(self, optimizer_index: int = 0) -> NormHistory:
        """Norms of past steps.

        Args:
            optimizer_index: Position of the optimizer.

        Returns:
            The last `history` steps of this run, and of the runs that it resumed.

        Raises:
            ValueError: If this optimizer has not made a step.
        """
        snapshot = self._snapshot(optimizer_index)
        if snapshot is None:
            raise ValueError(f"optimizer {optimizer_index} has not made a step yet: there is no history")
        norms = snapshot["norms"]
        return NormHistory(tuple(snapshot["layer_names"]), list(snapshot["steps"]), norms[:, :-1], norms[:, -1])

    def limitations(self, setting: Any) -> list[str]:
        """Pictures without matplotlib, and clips that nobody tells of."""
        found = []
        if self.heatmap_every_n_steps is not None and not can_draw():
            found.append("no heat map: matplotlib is missing (pip install 'torch-stabilizer[plots]')")
        if setting.host == "plain loop" and not any(callback.clips for callback in setting.callbacks):
            found.append("no total_after: a plain loop's own clip is not seen; call handle.measure() before it")
        return found

    def charts(self) -> list[Chart]:
        """All layers in one chart, and the total before and after a clip in another."""
        found = [Chart(ChartPage.NORMS, SharedTitle.TOTAL_NORM, lines=(f"{tags.GRAD_NORM_TOTAL}(_after)?",))]
        if self.layer_every_n_steps is not None:
            found.insert(0, Chart(ChartPage.NORMS, SharedTitle.LAYER_NORMS, lines=(f"{tags.GRAD_NORM_LAYER}/.*",)))
        if self.max_abs_every_n_steps is not None:
            found.append(
                Chart(
                    ChartPage.NORMS,
                    "Largest element of the gradient, by layer",
                    lines=(f"{tags.GRAD_NORM_MAX_ABS}/.*",),
                )
            )
        return found

    def attach_view(self, optimizer_index: int, view: LayerView) -> None:
        """Put back the history of a checkpoint, or of the layers before a layer was unfrozen."""
        snapshot = self._snapshot(optimizer_index)
        super().attach_view(optimizer_index, view)
        is_same_kind = snapshot is not None and snapshot["norm_type"] == view.norm_type
        if snapshot is not None and is_same_kind and set(snapshot["layer_names"]) & set(view.layer_names):
            view.restore(snapshot["steps"], snapshot["norms"], snapshot["layer_names"])
        self._saved.pop(optimizer_index, None)

    def detach_view(self, optimizer_index: int) -> None:
        """Keep the history on the CPU."""
        snapshot = self._snapshot(optimizer_index)
        super().detach_view(optimizer_index)
        self._skipped.pop(optimizer_index, None)
        if snapshot is not None:
            self._saved[optimizer_index] = snapshot

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        names = ("layer_every_n_steps", "norm_type", "max_abs_every_n_steps", "heatmap_every_n_steps", "history")
        return {**super().hyperparameters(), **{name: getattr(self, name) for name in names}}

    def extra_state(self) -> dict[str, Any]:
        """The history of every optimizer."""
        indices = sorted({*self._views, *self._saved})
        snapshots = {str(index): self._snapshot(index) for index in indices}
        return {"history": {index: snapshot for index, snapshot in snapshots.items() if snapshot is not None}}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Keep the history until the layers are known."""
        self._saved = {int(index): snapshot for index, snapshot in state["history"].items()}
        self._views.clear()

    def _snapshot(self, optimizer_index: int) -> dict[str, Any] | None:
        view = self._views.get(optimizer_index)
        if view is None:
            return self._saved.get(optimizer_index)
        steps, norms = view.past(self.history)
        return {
            "norm_type": view.norm_type,
            "layer_names": list(view.layer_names),
            "steps": steps,
            "norms": norms.cpu().clone(),
        }

    def _is_told_by_others(self) -> bool:
        """Whether a callback is there that tells more of such steps."""
        return self.driver is not None and any(other.names_nonfinite for other in self.driver.callbacks)

    def _warn_nonfinite(self, step: int, flags: Tensor, names: Sequence[str]) -> None:
        found = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
        if found and not self._has_warned:
            self._has_warned = True
            warn(
                f"step {step}: the gradient norm is not finite in {len(found)} of {len(names)} layers ({found[:5]}): "
                "elements are NaN or infinite, or the norm is above 1.8e19, where float32 squares end "
                "(max_abs_every_n_steps=1 tells which)"
            )

    def _draw(self, context: StepContext) -> None:
        is_first = not self._drawn_at
        self._drawn_at[context.optimizer_index] = context.step
        if not can_draw():
            if is_first:
                warn(
                    "GradNormCallback draws no heat map without matplotlib: pip install 'torch-stabilizer[plots]', or "
                    "set heatmap_every_n_steps=None"
                )
            return
        steps, rows = context.store.past(self.history)
        names, console, ring = context.selected_names, self.console, self._skipped.get(context.optimizer_index)
        flags = rows.new_zeros(len(steps)) if ring is None else ring.flags(steps)

        def draw(values: Tensor) -> Any:
            marks = {**console.marks(), "skipped step": [steps[row] for row in values[:, -1].nonzero().flatten()]}
            return norm_heatmap(values[:, :-1], steps=steps, layer_names=names, marks=marks)

        values = torch.cat([context.select(rows[:, :-1]), flags.unsqueeze(1).to(rows.dtype)], dim=1)
        context.log_picture(tags.GRAD_NORM_HEATMAP, draw, values)

    def _note_skip(self, context: StepContext) -> None:
        others = () if self.driver is None else self.driver.callbacks
        may_skip = context.is_scaled or any(other.may_skip for other in others)
        if context.outcome is None or self.heatmap_every_n_steps is None or not may_skip:
            return
        index, skipped = context.optimizer_index, context.outcome.skipped | context.outcome.overflowed
        if index not in self._skipped:
            self._skipped[index] = SkipRing(self.history, device=skipped.device)
        self._skipped[index].see(context.step, skipped)

    def __getstate__(self) -> dict[str, Any]:
        saved = {int(index): snapshot for index, snapshot in self.extra_state()["history"].items()}
        return {**super().__getstate__(), "_saved": saved, "_skipped": {}}


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
