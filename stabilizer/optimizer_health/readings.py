"""What the figures of an optimizer's steps say: plain numbers on the host, in; findings, out."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer.numerics.finding import NumericsFinding
from stabilizer.optimizer_health.moments import first_step, largest_step, steps_until_back, whole_way

__all__ = ["OPTIMIZER_KINDS", "OptimizerHistory", "OptimizerLimits", "OptimizerReading"]

#: Kinds of findings about an optimizer.
OPTIMIZER_KINDS: tuple[str, ...] = (
    "learning_rate_jump",
    "second_moment_outdated",
    "second_moment_polluted",
    "silent_rows",
    "swallowed_updates",
    "swallowed_gradients",
)

# Readings that "usual" is the median of, and how many of them must be there.
_WINDOW, _MIN_READINGS = 16, 3
_MAX_LAYERS = 8


@dataclasses.dataclass(frozen=True)
class OptimizerLimits:
    """From where on a figure is a finding.

    Attributes:
        rms: Of g / sqrt(v), by layer: 2.3 is what Wortsman et al. (arXiv:2304.13013) take for the announcement of a
            loss spike.
        pollution: A second moment over its usual value, and over the g^2 of now.
        silent_share: Share of the trained rows of an embedding that are silent.
        swallowed_share: Share of the elements that a sum leaves as they were.
        rate: A learning rate over that of the step before.
    """

    rms: float = 2.3
    pollution: float = 10.0
    silent_share: float = 0.05
    swallowed_share: float = 0.25
    rate: float = 5.0


@dataclasses.dataclass(frozen=True)
class OptimizerReading:
    """Figures of one step.

    Attributes:
        step: The optimizer step.
        layers: Names.
        sums: Name of a sum -> its value for every layer; see `StepSums`.
        total_norm: Of the gradient.
        betas: Of Adam; `None` for another optimizer.
        rows: Embedding -> figure -> value, and its betas.
        rates: Learning rate of the step before and of this one, in the group where it jumped; else `None`.
        is_whole: Whether there is anything but updates and parameters.
    """

    step: int
    layers: Sequence[str]
    sums: Mapping[str, Sequence[float]]
    total_norm: float
    betas: tuple[float, float] | None
    rows: Mapping[str, Mapping[str, float]]
    rates: tuple[float, float] | None
    is_whole: bool


class OptimizerHistory:
    """Usual figures of an optimizer, and what was told of it. What stands out never becomes usual.

    Args:
        limits: From where on a figure is a finding.
        warmup_steps: First steps, at which only sums that change nothing are told of: everything else is on its way.
        cooldown_steps: Steps in which a kind is not told again.
        optimizer_index: Position of the optimizer.
    """

    def __init__(
        self, limits: OptimizerLimits, *, warmup_steps: int, cooldown_steps: int, optimizer_index: int = 0
    ) -> None:
        self._limits, self._warmup_steps, self._cooldown_steps = limits, warmup_steps, cooldown_steps
        self._index = optimizer_index
        # Figure -> layer -> its last values.
        self._usual: dict[str, dict[str, list[float]]] = {"ratio": {}, "second": {}, "norm": {}}
        self._told: dict[str, int] = {}

    def see(self, reading: OptimizerReading) -> list[NumericsFinding]:
        """Take the figures of a step that was made.

        Args:
            reading: Of later steps than all before.

        Returns:
            What is to be told.
        """
        is_warm = reading.step >= self._warmup_steps
        found: list[NumericsFinding | None] = []
        if reading.rates is not None and is_warm:
            found.append(self._jump(reading, reading.rates))
        if reading.is_whole:
            polluted = self._polluted(reading)
            found += [self._outdated(reading), polluted, *self._silent(reading)] if is_warm else []
            found += [self._swallowed(reading, "updates"), self._swallowed(reading, "gradients")]
            self._learn(reading, without=() if polluted is None else polluted.layers)
        return [one for one in found if one is not None and self._is_news(one)]

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        usual = {figure: {name: list(v) for name, v in layers.items()} for figure, layers in self._usual.items()}
        return {"usual": usual, "told": dict(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a state.

        Args:
            state: What `state_dict` gave.
        """
        for figure, layers in state["usual"].items():
            self._usual[figure] = {name: [float(one) for one in values] for name, values in layers.items()}
        self._told = {kind: int(step) for kind, step in state["told"].items()}

    def _is_news(self, finding: NumericsFinding) -> bool:
        told = self._told.get(finding.kind)
        if told is not None and finding.step - told < self._cooldown_steps:
            return False
        self._told[finding.kind] = finding.step
        return True

    def _usually(self, figure: str, name: str) -> float:
        """The usual value; NaN while it is not known."""
        values = self._usual[figure].get(name, ())
        return statistics.median(values) if len(values) >= _MIN_READINGS else math.nan

    def _learn(self, reading: OptimizerReading, *, without: Sequence[str]) -> None:
        figures = [("ratio", name, value) for name, value in _ratios(reading).items() if reading.rates is None]
        seconds = _per_element(reading, "second")
        figures += [("second", name, value) for name, value in seconds.items() if name not in without]
        for figure, name, value in [*figures, ("norm", "total", reading.total_norm)]:
            if math.isfinite(value) and value > 0:
                values = self._usual[figure].setdefault(name, [])
                values.append(value)
                del values[:-_WINDOW]

    def _finding(self, reading: OptimizerReading, kind: str, layers: Sequence[str], **rest: Any) -> NumericsFinding:
        return NumericsFinding(
            kind=kind,
            step=reading.step,
            layer=layers[0] if layers else None,
            layers=tuple(layers[:_MAX_LAYERS]),
            optimizer_index=self._index,
            **rest,
        )

    def _jump(self, reading: OptimizerReading, rates: tuple[float, float]) -> NumericsFinding:
        before, now = rates
        times = {name: value / self._usually("ratio", name) for name, value in _ratios(reading).items()}
        known = {name: value for name, value in times.items() if math.isfinite(value)}
        evidence = {"rate_before": before, "rate": now, "factor": now / before}
        text = f"the learning rate went from {before:.3g} to {now:.3g} in one step, {now / before:.3g} times as much"
        if known:
            evidence["update_ratio"] = statistics.median(known.values())
            text += f"; updates are {evidence['update_ratio']:.3g} times their usual size (median of the layers)"
        norm = reading.total_norm / self._usually("norm", "total")
        if math.isfinite(norm):
            evidence["norm_ratio"] = norm
            text += f", the gradient norm {norm:.3g} times"
        remedy = (
            "check the scheduler (is it the one that was saved with the checkpoint, and is it stepped once a step?); a "
            "restart that is planned is no fault; UpdateClipCallback(mode='act') bounds what such a step can do"
        )
        return self._finding(reading, "learning_rate_jump", [], text=text, remedy=remedy, evidence=evidence)

    def _outdated(self, reading: OptimizerReading) -> NumericsFinding | None:
        roots = {name: math.sqrt(value) for name, value in _per_element(reading, "normalized").items() if value >= 0}
        far = _worst({name: value for name, value in roots.items() if value >= self._limits.rms})
        # A mean over more steps than there were is of the first ones, which are unlike all others.
        if not far or reading.betas is None or reading.step * (1 - reading.betas[1]) < 1:
            return None
        beta2, value = reading.betas[1], roots[far[0]]
        text = (
            f"gradients of {far[0]} are {value:.3g} times what the optimizer's second moment expects (RMS of g^2/v; 1 "
            f"is healthy; {len(far)} of {len(roots)} layers over {self._limits.rms:g}): its steps are too large for "
            "them, and a loss spike often comes within a few steps"
        )
        remedy = f"bound the step with UpdateClipCallback(mode='act'), or lower beta2 ({beta2:g}) so that v follows"
        evidence = {"rms": value, "num_layers": float(len(far)), "beta2": beta2}
        return self._finding(reading, "second_moment_outdated", far, text=text, remedy=remedy, evidence=evidence)

    def _polluted(self, reading: OptimizerReading) -> NumericsFinding | None:
        gradients = _per_element(reading, "gradient")
        times = {}
        for name, value in _per_element(reading, "second").items():
            usual = self._usually("second", name)
            # A level that lasts is one of the gradients too: nothing is left over from a spike then.
            if usual > 0 and name in gradients:
                times[name] = value / max(usual, gradients[name])
        far = _worst({name: value for name, value in times.items() if value >= self._limits.pollution})
        if not far or reading.betas is None:
            return None
        beta2, value = reading.betas[1], times[far[0]]
        steps = steps_until_back(value, beta2)
        text = (
            f"a spike is still in the second moment of {far[0]}: it is {value:.3g} times its usual value ({len(far)} "
            f"of {len(times)} layers), so steps are {math.sqrt(value):.3g} times too small there for about {steps} "
            f"steps more (beta2 {beta2:g})"
        )
        remedy = (
            "skip such steps before they are made (LayerClipCallback(on_spike='skip_step')), or clip them; a smaller "
            "beta2 forgets sooner"
        )
        evidence = {"ratio": value, "num_layers": float(len(far)), "steps_left": float(steps), "beta2": beta2}
        return self._finding(reading, "second_moment_polluted", far, text=text, remedy=remedy, evidence=evidence)

    def _silent(self, reading: OptimizerReading) -> list[NumericsFinding]:
        found = []
        for name, row in reading.rows.items():
            if math.isnan(row["beta2"]) or not row["num_trained"]:
                continue
            betas = row["beta1"], row["beta2"]
            share = row["num_silent"] / row["num_trained"]
            # Below 1 the first step is smaller than any other.
            if share < self._limits.silent_share or first_step(*betas) <= 1:
                continue
            step, way = first_step(*betas), whole_way(*betas)
            text = (
                f"{row['num_silent']:.0f} rows of {name} ({share:.1%} of the {row['num_trained']:.0f} trained ones) "
                f"have had no gradient for so long that their second moments are gone: the next one moves such a row "
                f"by {step:.3g} learning rates at once, by {way:.3g} in all, whatever its size"
            )
            remedy = (
                f"a smaller beta2 for {name} in a parameter group of its own (0.95 makes it "
                f"{first_step(betas[0], 0.95):.2g} and {whole_way(betas[0], 0.95):.2g}), or a smaller learning rate"
            )
            evidence = {
                "num_silent": row["num_silent"],
                "share": share,
                "first_step": step,
                "whole_way": way,
                "largest_step": largest_step(*betas),
                "never_trained_share": 1 - row["num_trained"] / row["num_rows"],
            }
            found.append(self._finding(reading, "silent_rows", [name], text=text, remedy=remedy, evidence=evidence))
        return found[:1]

    def _swallowed(self, reading: OptimizerReading, what: str) -> NumericsFinding | None:
        is_update = what == "updates"
        lost, of = ("num_swallowed", "num_to_move") if is_update else ("num_lost_parts", "num_parts")
        pairs = zip(reading.layers, reading.sums[lost], reading.sums[of], strict=True)
        shares = {name: num / whole for name, num, whole in pairs if whole > 0 and math.isfinite(num)}
        whole = sum(value for value in reading.sums[of] if math.isfinite(value))
        total = sum(value for value in reading.sums[lost] if math.isfinite(value)) / whole if whole else 0.0
        if total < self._limits.swallowed_share:
            return None
        far = _worst(shares)
        if is_update:
            text = (
                f"{total:.1%} of the elements of low-precision parameters did not move though there was something to "
                f"move them by: the update is under half of their last bit (worst: {far[0]}, {shares[far[0]]:.1%})"
            )
            remedy = "keep float32 parameters for the optimizer (mixed precision), or round stochastically"
        else:
            text = (
                f"{total:.1%} of what micro-batches add to low-precision gradients changes nothing in the sum (worst: "
                f"{far[0]}, {shares[far[0]]:.1%})"
            )
            remedy = "accumulate gradients in float32, or take fewer and larger micro-batches"
        evidence = {"share": total, "worst_share": shares[far[0]]}
        return self._finding(reading, f"swallowed_{what}", far, text=text, remedy=remedy, evidence=evidence)


def _ratios(reading: OptimizerReading) -> dict[str, float]:
    """Norm of the update over norm of the parameters, by layer."""
    pairs = zip(reading.layers, reading.sums["moved"], reading.sums["held"], strict=True)
    return {name: math.sqrt(moved / held) for name, moved, held in pairs if held > 0 and math.isfinite(moved)}


def _per_element(reading: OptimizerReading, sum_name: str) -> dict[str, float]:
    """Means over the elements with a second moment, by layer."""
    pairs = zip(reading.layers, reading.sums[sum_name], reading.sums["num_second"], strict=True)
    return {name: value / num for name, value, num in pairs if num > 0 and math.isfinite(value)}


def _worst(values: Mapping[str, float]) -> list[str]:
    """Names, the largest value first."""
    return sorted(values, key=lambda name: -values[name])
