"""GradNoiseScaleCallback: how noisy the gradient is for the batch that it is made of, from what is there anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from stabilizer import tags
from stabilizer.callbacks.base import StabilizerCallback
from stabilizer.callbacks.charts import Chart, ChartPage
from stabilizer.callbacks.checks import check_choice, check_interval
from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.noise_reports import NoiseReports
from stabilizer.callbacks.noise_scales import BatchReading, LossReduction, NoiseScales
from stabilizer.names import Granularity
from stabilizer.noise import NoiseScale
from stabilizer.step_parts import StepParts

__all__ = ["BatchUnit", "GradNoiseScaleCallback", "NoiseSource"]

NoiseSource: TypeAlias = Literal["auto", "local", "micro_batch"]
BatchUnit: TypeAlias = Literal["samples", "tokens"]


class GradNoiseScaleCallback(StabilizerCallback):
    """Logs the gradient noise scale: the batch at which half of a step's progress is lost to noise.

    It compares the norms of each rank's own gradient of each micro-batch, before any reduction, with that of the step:
    no pass, no copy of a gradient, and no collective where the step has one. With one process and one micro-batch a
    step there is nothing to compare, and it says so. The noise scale is that of the raw gradient, whatever the
    optimizer makes of it and whatever clips follow. It advises, and never changes the batch.

    From: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1.

    Args:
        every_n_steps: Interval of the steps that are looked at; the others are free.
        source: What the small batches are: "auto" (the micro-batches of every rank), "local" (likewise, and only where
            there are several ranks) or "micro_batch" (likewise, and only where a rank has several of them).
        decay: Of the running means, a step that is looked at.
        min_samples: Steps before the first reading that is called reliable.
        per_layer: Whether each layer has a noise scale of its own too.
        batch_unit: What the batch is counted in: "samples", or "tokens" (labels other than -100).
        reliable_z: How many standard errors the squared norm of the gradient must be above zero.
        loss_reduction: "mean" if a micro-batch's loss is a mean over its samples; "sum" if it is a sum, or divided by
            a number that is the same for all micro-batches of the step (as transformers does); "auto" looks which of
            both are alike. It matters only where micro-batches differ in size.
        log_every_n_steps: Interval of what is logged.
        layers: Which layers count; see `StabilizerCallback`.
        exclude: Which layers not.
        granularity: What a layer is.
        name: Prefix of tags; two callbacks of one class need different names.
        strict: Let an exception in this callback end the run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> GradNoiseScaleCallback(batch_unit="tokens", every_n_steps=4).part_unit
        'tokens'
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 1,
        source: NoiseSource = "auto",
        decay: float = 0.99,
        min_samples: int = 100,
        per_layer: bool = False,
        batch_unit: BatchUnit = "samples",
        reliable_z: float = 2.0,
        loss_reduction: LossReduction = "auto",
        log_every_n_steps: int = 10,
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
        check_choice("source", source, ("auto", "local", "micro_batch"))
        check_choice("batch_unit", batch_unit, ("samples", "tokens"))
        check_choice("loss_reduction", loss_reduction, ("auto", "mean", "sum"))
        # Bad numbers are an error here.
        NoiseScale(decay=decay, min_samples=min_samples, reliable_z=reliable_z, device="cpu")
        self.source, self.batch_unit, self.loss_reduction = source, batch_unit, loss_reduction
        self.decay, self.min_samples, self.reliable_z = float(decay), min_samples, float(reliable_z)
        self.per_layer = bool(per_layer)
        self.log_every_n_steps = check_interval("log_every_n_steps", log_every_n_steps)
        self.parts_every_n_steps = self.every_n_steps
        self.part_unit = batch_unit
        self._scales: dict[int, NoiseScales] = {}
        self._saved: dict[int, dict[str, Any]] = {}
        self._reports: dict[int, NoiseReports] = {}
        self._logged: dict[int, int] = {}

    def on_step_end(self, context: StepContext) -> None:
        """Take the step in, now that it is one, and log where it is due."""
        parts, outcome, index = context.parts, context.outcome, context.optimizer_index
        if parts is None or outcome is None:
            return
        scales = self._scales_of(context)
        small, big = (context.select(context.store.sums_of(values)) for values in (parts.squares, parts.whole))
        is_odd = context.is_bad | outcome.skipped | outcome.overflowed
        scales.update(parts, small=small, big=big, valid=self._is_wanted(parts) & ~is_odd)
        last = self._logged.get(index)
        if last is None or context.step - last >= self.log_every_n_steps:
            self._logged[index] = context.step
            self._log(context, scales.read())

    def latest(self, optimizer_index: int = 0) -> Tensor | None:
        """The noise scale now, shape (), on the device, NaN while it is not known; `None` before the first step.

        Args:
            optimizer_index: Position of the optimizer.
        """
        scales = self._scales.get(optimizer_index)
        return None if scales is None else scales.read().scales.noise_scale[0]

    def reading(self, optimizer_index: int = 0) -> dict[str, float]:
        """What is known now, or was at the end of the run; waits for the device.

        Args:
            optimizer_index: Position of the optimizer.

        Returns:
            `noise_scale`, `grad_sq`, `trace`, `stderr`, `ratio_to_batch`, `reliable` (0 or 1), `batch` and `num_steps`,
            and `layer/<layer>` with `per_layer`; empty before the first step.
        """
        scales = self._scales.get(optimizer_index)
        if scales is None and optimizer_index in self._saved:  # of a run that is over, or was saved
            saved = self._saved[optimizer_index]
            scales = self._new_scales(saved["names"], device=torch.device("cpu"))
            scales.load_state_dict(saved)
        if scales is None:
            return {}
        found, batch = scales.read()
        total = {name: float(value[0]) for name, value in found._asdict().items()}
        own = {f"layer/{name}": float(value) for name, value in zip(scales.names, found.noise_scale[1:], strict=True)}
        return {**total, "ratio_to_batch": float(found.noise_scale[0] / batch), "batch": float(batch), **own}

    def limitations(self, setting: Any) -> list[str]:
        """What a plain loop must tell."""
        found = []
        if setting.host == "plain loop":
            found.append(
                "counts the batch in micro-batches unless handle.record_loss(loss) is called for each of them, and "
                "takes gradients that the loop reduces by itself for averaged ones"
            )
            found.append("with a GradScaler: nothing is reliable unless handle.measure(scaler=scaler) is called")
        return found

    def charts(self) -> list[Chart]:
        """The noise scale in a band of its standard error, and what it is beside the batch."""
        page, ratio = ChartPage.WINDOWS, (tags.GNS_RATIO_TO_BATCH,)
        found = [
            Chart(
                page, "Noise scale and its standard error", band=(tags.GNS_NOISE_SCALE, tags.GNS_LOWER, tags.GNS_UPPER)
            ),
            Chart(page, "Noise scale over batch: far above 1 a larger batch pays", lines=ratio),
        ]
        if self.per_layer:
            found.append(Chart(page, "Noise scale by layer", lines=(f"{tags.GNS_LAYER}/.*",)))
        return found

    def hyperparameters(self) -> dict[str, Any]:
        """Arguments that a checkpoint remembers."""
        names = ("source", "decay", "min_samples", "per_layer", "batch_unit", "reliable_z", "loss_reduction")
        return {**super().hyperparameters(), **{name: getattr(self, name) for name in names}}

    def extra_state(self) -> dict[str, Any]:
        """The running means of every optimizer."""
        found = {**self._saved, **{index: scales.state_dict() for index, scales in self._scales.items()}}
        reports = {str(index): report.state_dict() for index, report in self._reports.items()}
        logged = {str(index): step for index, step in self._logged.items()}
        scales = {str(index): found[index] for index in sorted(found)}
        return {"scales": scales, "reports": reports, "logged": logged}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the layers are known."""
        self._scales.clear()
        self._saved = {int(index): saved for index, saved in state["scales"].items()}
        self._logged = {int(index): int(step) for index, step in state["logged"].items()}
        self._reports = {int(index): self._new_reports(int(index)) for index in state["reports"]}
        for index, saved in state["reports"].items():
            self._reports[int(index)].load_state_dict(saved)

    def detach_view(self, optimizer_index: int) -> None:
        """Keep what was learned, on the CPU."""
        scales = self._scales.pop(optimizer_index, None)
        if scales is not None:
            self._saved[optimizer_index] = scales.state_dict()
        super().detach_view(optimizer_index)

    def _scales_of(self, context: StepContext) -> NoiseScales:
        index = context.optimizer_index
        names = tuple(context.selected_names) if self.per_layer else ()
        scales = self._scales.get(index)
        if scales is None or scales.names != names:
            saved = self._saved.pop(index, None) if scales is None else scales.state_dict()
            scales = self._new_scales(names, device=context.store.norms.device)
            if saved is not None:
                scales.load_state_dict(saved)
            self._scales[index] = scales
        return scales

    def _new_scales(self, names: Sequence[str], *, device: torch.device) -> NoiseScales:
        return NoiseScales(
            names,
            reduction=self.loss_reduction,
            decay=self.decay,
            min_samples=self.min_samples,
            reliable_z=self.reliable_z,
            device=device,
        )

    def _is_wanted(self, parts: StepParts) -> Tensor:
        """Whether the parts are such as the user has asked for, shape (), bool."""
        if self.source == "local":
            return parts.num_ranks > 1
        return parts.num_parts > (parts.num_ranks if self.source == "micro_batch" else 1)

    def _log(self, context: StepContext, reading: BatchReading) -> None:
        found, batch = reading
        ratio = found.noise_scale[0] / batch
        error = found.stderr[0].nan_to_num(0.0, posinf=0.0)
        for tag, value in (
            (tags.GNS_NOISE_SCALE, found.noise_scale[0]),
            (tags.GNS_GRAD_SQ, found.grad_sq[0]),
            (tags.GNS_TRACE, found.trace[0]),
            (tags.GNS_STDERR, found.stderr[0]),
            # At the same steps as the noise scale, or TensorBoard draws no band.
            (tags.GNS_LOWER, (found.noise_scale[0] - error).clamp_min(0.0)),
            (tags.GNS_UPPER, found.noise_scale[0] + error),
            (tags.GNS_RATIO_TO_BATCH, ratio),
            # Nothing is drawn where nothing can be known.
            (tags.GNS_RELIABLE, found.reliable[0].to(ratio.dtype).masked_fill(found.num_steps[0] == 0, torch.nan)),
        ):
            context.log(tag, value, finite_only=True)
        if self.per_layer:
            context.log_layers(tags.GNS_LAYER, context.spread(found.noise_scale[1:], fill=torch.nan), finite_only=True)
        self._report(context, ratio, found.stderr[0] / batch, found.reliable[0], found.num_steps[0])

    def _report(self, context: StepContext, *numbers: Tensor) -> None:
        index = context.optimizer_index
        reports = self._reports.setdefault(index, self._new_reports(index))
        parts = context.parts
        assert parts is not None
        values = torch.stack([value.to(torch.float32) for value in (*numbers, parts.num_parts, parts.num_ranks)])
        context.later(values, reports.reader(context, parts))

    def _new_reports(self, optimizer_index: int) -> NoiseReports:
        owner = f"{self.state_key}, optimizer {optimizer_index}" if optimizer_index else self.state_key
        return NoiseReports(owner=owner, source=self.source, unit=self.batch_unit)

    def __getstate__(self) -> dict[str, Any]:
        saved = {int(index): state for index, state in self.extra_state()["scales"].items()}
        return {**super().__getstate__(), "_saved": saved, "_scales": {}}
