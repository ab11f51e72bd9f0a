"""UpdateClipCallback: a cap on what an optimizer's step may do to a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.charts import Chart, ChartPage
from stabilizer.callbacks.checks import check_choice
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.update_hooks import AfterStep, layers_of
from stabilizer.callbacks.update_memory import UpdateMemory
from stabilizer.callbacks.update_meter import RelativeTo, UpdateMeter, UpdateReading
from stabilizer.errors import warn
from stabilizer.names import Granularity
from stabilizer.thresholds.arguments import check_number
from stabilizer.view import LayerView

__all__ = ["UpdateClipCallback"]

_Mode: TypeAlias = Literal["act", "observe"]


class UpdateClipCallback(StabilizerCallback):
    """Caps the root mean square of every layer's update: what the optimizer's step has done to the parameters.

    A clip of gradients does not bound the steps of an optimizer that normalizes them: Adam takes its largest steps
    when its second moments are out of date, whatever the gradient's norm. This looks at the other end. A layer whose
    update u has an RMS over `max_rms` moves by u * max_rms / RMS(u) instead; all others keep their bits. It works
    after any optimizer (AdamW, SGD, Muon), which is not changed: its moments are what they would have been.

    In units of the learning rate, a limit of 1 is update clipping with d = 1: Shazeer and Stern, "Adafactor"
    (arXiv:1804.04235), section 6; "StableAdamW" of Wortsman et al. (arXiv:2304.13013) has the same for AdamW. The
    update is all that the step has changed, weight decay included.

    Args:
        max_rms: Largest RMS of a layer's update, in the unit of `relative_to`.
        relative_to: "learning_rate": the RMS is divided by the learning rate; a healthy AdamW stays at 0.2 to 0.4.
            "parameter": it is divided by the RMS of the layer's parameters (1e-3 at least), for optimizers whose
            updates have no scale of their own, such as SGD; 0.01 to 0.1 is a large step then.
        mode: "observe": measure at every `every_n_steps`-th step and change nothing; "act": look at every step.
        every_n_steps: Interval of what is logged, in optimizer steps.
        layers: Which layers: block numbers, names or regular expressions; `None` means all.
        exclude: Which layers not.
        granularity: What a layer is: "block", "module", "parameter", or a mapping of regular expression -> layer name.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> UpdateClipCallback(max_rms=0.05, relative_to="parameter", mode="act").mode
        'act'
    """

    is_gated = False

    def __init__(
        self,
        *,
        max_rms: float = 1.0,
        relative_to: RelativeTo = "learning_rate",
        mode: _Mode = "observe",
        every_n_steps: int = 10,
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
        check_choice("relative_to", relative_to, ("learning_rate", "parameter"))
        check_choice("mode", mode, ("act", "observe"))
        self.max_rms = check_number("max_rms", max_rms, above=0)
        self.relative_to, self.mode = relative_to, mode
        self._hooks: AfterStep | None = None
        self._memories: dict[int, UpdateMemory] = {}
        self._saved: dict[int, dict[str, Any]] = {}

    def on_gradients(self, context: StepContext) -> None:
        """Copy the parameters, at steps that are looked at."""
        memory = self._memories.get(context.optimizer_index)
        if memory is not None:
            memory.drop()
        is_due = self.mode == "act" or context.step % self.every_n_steps == 0
        if self.host is None or not is_due or not context.selected_names:
            return
        self._hooks = self._hooks or AfterStep(self, "_after_step")
        optimizer = self._hooks.watch(self.host, context.optimizer_index)
        memory = self._make(context, optimizer) if memory is None else memory
        memory.begin(optimizer)

    def on_step_end(self, context: StepContext) -> None:
        """Count what was clipped, and log."""
        memory, outcome = self._memories.get(context.optimizer_index), context.outcome
        if memory is None or outcome is None:
            return
        is_due = context.step % self.every_n_steps == 0
        self._tell(context.optimizer_index, waits=False)
        memory.finish()  # the host's hook may stand before ours
        reading = memory.take(outcome.skipped | outcome.overflowed)
        if reading is not None and is_due:
            self._log(context, reading, memory.rates.shares)
            memory.send(context.step)
        memory.check(is_due=is_due)

    def on_run_end(self, context: StepContext) -> None:
        """Tell of what the last steps have left."""
        self._tell(context.optimizer_index, waits=True)

    def attach_view(self, optimizer_index: int, view: LayerView) -> None:
        """Take the layers, which may be others than before."""
        super().attach_view(optimizer_index, view)
        self._keep(optimizer_index)

    def detach_view(self, optimizer_index: int) -> None:
        """Keep the counts, and let go of the parameters."""
        self._keep(optimizer_index)
        super().detach_view(optimizer_index)

    def limitations(self, setting: Any) -> list[str]:
        """What it costs to act, and optimizers that have no unit of their own."""
        found = []
        if self.mode == "act":
            found.append("a copy of the parameters is held while the optimizer steps, and compared with them after it")
        kinds = {type(optimizer).__name__ for optimizer in (() if self.host is None else self.host.optimizers)}
        if self.relative_to == "learning_rate" and "SGD" in kinds:
            found.append(
                'SGD\'s updates are as large as its gradients, not as its learning rate: use relative_to="parameter"'
            )
        return found

    def charts(self) -> list[Chart]:
        """RMS of all layers in one chart, coefficients in another."""
        rms, coefficient = f"{tags.UPDATE_CLIP_RMS}/.*", f"{tags.UPDATE_CLIP_COEFFICIENT}/.*"
        return [
            Chart(ChartPage.UPDATES, "RMS of every layer's update: watch for peaks", lines=(rms,)),
            Chart(ChartPage.UPDATES, "Coefficient of every layer's update: 1 is not clipped", lines=(coefficient,)),
            Chart(ChartPage.UPDATES, "Share of updates clipped: should stay near 0", lines=(tags.UPDATE_CLIP_RATE,)),
        ]

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        own = {name: getattr(self, name) for name in ("max_rms", "relative_to", "mode")}
        return {**super().hyperparameters(), **own}

    def extra_state(self) -> dict[str, Any]:
        """How often every layer was clipped."""
        found = {**self._saved, **{index: memory.state_dict() for index, memory in self._memories.items()}}
        return {"rates": {str(index): found[index] for index in sorted(found)}}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the layers are known."""
        self._memories.clear()
        self._saved = {int(index): saved for index, saved in state["rates"].items()}

    def _after_step(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer has moved."""
        if index in self._memories:
            self._memories[index].finish()

    def _make(self, context: StepContext, optimizer: torch.optim.Optimizer) -> UpdateMemory:
        layers = layers_of(self, context, optimizer)
        meter = UpdateMeter(layers, max_rms=self.max_rms, relative_to=self.relative_to, acts=self.mode == "act")
        memory = UpdateMemory(layers.layers, meter, device=layers.device)
        saved = self._saved.pop(context.optimizer_index, None)
        if saved is not None:
            memory.load_state_dict(saved)
        self._memories[context.optimizer_index] = memory
        return memory

    def _keep(self, index: int) -> None:
        memory = self._memories.pop(index, None)
        if memory is not None:
            self._saved[index] = memory.state_dict()

    def _log(self, context: StepContext, reading: UpdateReading, shares: Tensor) -> None:
        for tag, values in (
            (tags.UPDATE_CLIP_RMS, reading.rms),
            (tags.UPDATE_CLIP_COEFFICIENT, reading.coefficients),
        ):
            context.log_layers(tag, context.spread(values, fill=torch.nan), finite_only=True)
        context.log(tags.UPDATE_CLIP_RATE, shares.mean())

    def _tell(self, index: int, *, waits: bool) -> None:
        memory = self._memories.get(index)
        found = [] if memory is None else memory.nonfinite(waits=waits)
        if found:
            who = f"optimizer {index}" if index else "the optimizer"
            warn(
                f"{self.state_key}: {who} has moved {found[:5]} ({len(found)} layers in all) by an update that "
                "is not finite; no factor makes that finite, so it was left as it is. AdaptiveClipThreshold() or "
                "LayerClipCallback() skip such a step before it is made"
            )

    def __getstate__(self) -> dict[str, Any]:
        saved = {int(index): state for index, state in self.extra_state()["rates"].items()}
        return {**super().__getstate__(), "_saved": saved, "_memories": {}, "_hooks": None}
