"""What happens to a run that a threshold rule watches: norms that are made up or recorded, and what is then clipped."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.published_rules import Array
from stabilizer.thresholds import RuleSpec, make_rule

__all__ = ["Clipper", "Ours", "Setting", "healthy_run", "incident", "made_up_runs", "thresholds_of"]

_START = 300
_FACTORS = {"x3": 3.0, "x10": 10.0, "x100": 100.0, "/3": 1 / 3, "/10": 0.1, "/100": 0.01}
_STDS = (0.1, 0.25, 0.5)
_LEVEL = 0.2


class Clipper(Protocol):
    """A rule over a vector of runs, as numpy sees it."""

    def start(self, num_runs: int) -> None:
        """Forget everything."""

    def thresholds(self, norms: Array) -> Array:
        """What these norms are held against."""

    def update(self, norms: Array) -> None:
        """Let them enter."""


class Ours:
    """A rule of the package, as numpy sees it.

    Args:
        spec: The rule.
    """

    def __init__(self, spec: RuleSpec) -> None:
        self.rule = make_rule(spec)

    def start(self, num_runs: int) -> None:
        """Forget everything.

        Args:
            num_runs: Length of the vectors of norms.
        """
        self.rule.start(num_runs, device="cpu")

    def thresholds(self, norms: Array) -> Array:
        """What these norms are held against.

        Args:
            norms: Shape (runs,).
        """
        return self.rule.thresholds(torch.from_numpy(norms).float()).double().numpy()

    def update(self, norms: Array) -> None:
        """Let them enter.

        Args:
            norms: Shape (runs,).
        """
        self.rule.update(torch.from_numpy(norms).float())


@dataclasses.dataclass(frozen=True)
class Setting:
    """How long and how many.

    Attributes:
        num_steps: Of the made-up runs.
        num_runs: Of each kind; four times as many for false clips.
        incident_steps: Before the incident.
        healthy_run: Recorded norms, shape (steps, layers and the total), and their names.
        healthy_steps: How many of these.
    """

    num_steps: int = 1000
    num_runs: int = 8
    incident_steps: int = 47_000
    healthy_run: Path = Path(__file__).resolve().parent.parent / "tests" / "data" / "healthy_run.npz"
    healthy_steps: int = 2500


def thresholds_of(clipper: Clipper, norms: Array) -> Array:
    """Thresholds of all steps.

    Args:
        clipper: The rule.
        norms: Shape (steps, runs).

    Returns:
        The same shape.
    """
    clipper.start(norms.shape[1])
    rows = []
    for row in norms:
        rows.append(clipper.thresholds(row))
        clipper.update(row)
    return np.array(rows)


def made_up_runs(clipper: Clipper, setting: Setting) -> dict[str, dict[str, float]]:
    """Everything that log-normal norms (and Student's t with 4 degrees of freedom) can show, in one pass.

    Args:
        clipper: The rule.
        setting: Sizes.

    Returns:
        Question -> what -> figure.
    """
    runs = _Runs(setting)
    clipper.start(runs.norms.shape[1])
    thresholds = np.full(runs.norms.shape, np.nan)
    for step, row in enumerate(runs.norms):
        if step == _START:
            # Three times what a usual norm is held against, when the storm begins.
            bound = clipper.thresholds(runs.norms[step])
            runs.norms = np.where(runs.is_storm, 3 * bound, runs.norms)
            row = runs.norms[step]
        thresholds[step] = clipper.thresholds(row)
        if step == _START + 110:
            # What would happen to a spike ten steps after the NaN.
            spikes = np.where(np.isnan(thresholds[step]) | np.isinf(thresholds[step]), 1e3, 10 * thresholds[step])
            is_caught = spikes > clipper.thresholds(spikes)
        clipper.update(row)
    is_clipped = runs.norms > thresholds
    result: dict[str, dict[str, float]] = {"false clips, % of layer-steps": {}}
    for name in (*(f"log-std {std}" for std in _STDS), "t4, log-scale 0.25"):
        result["false clips, % of layer-steps"][name] = 100 * is_clipped[:, runs.groups[name]].mean()
    result |= _shifts(runs, thresholds, is_clipped)
    spike, control = runs.groups["spike"], runs.groups["control"]
    with np.errstate(invalid="ignore"):
        growth = thresholds[_START + 1 :, spike] / thresholds[_START + 1 :, control]
        after_nan = thresholds[_START + 101 :, runs.groups["nan"]] / thresholds[_START + 101 :, control]
    result["one spike of x1000"] = {"threshold afterwards, times (largest)": float(np.max(growth))}
    result["30 spikes of 3 x the threshold within 100 steps, clipped (fewest)"] = {
        f"{how}, log-std {std}": float(
            (is_clipped & runs.is_storm)[:, runs.groups[f"{how} {std}"]].sum(0).min(),
        )
        for how in ("scattered", "in a row")
        for std in _STDS
    }
    result["a NaN"] = {
        "spikes of x10 caught ten steps later, %": 100 * float(is_caught[runs.groups["nan"]].mean()),
        "threshold afterwards, times (largest)": float(np.max(after_nan)),
    }
    return result


def _shifts(runs: _Runs, thresholds: Array, is_clipped: Any) -> dict[str, dict[str, float]]:
    clipped, without, heights = {}, {}, {}
    for name in _FACTORS:
        for std in _STDS:
            group = runs.groups[f"{name} {std}"]
            label, after = f"{name}, log-std {std}", thresholds[_START:, group]
            if name.startswith("x"):
                clipped[label] = 100 * is_clipped[_START + 64 :, group].mean()
            without[label] = 100 * float((~np.isfinite(after)).mean())
            heights[label] = float(np.median(after[64])) / (_LEVEL * _FACTORS[name])
    return {
        "lasting shift: clipped from the 64th step on, %": clipped,
        "lasting shift: without a threshold, % of layer-steps": {"the worst": max(without.values())},
        "lasting shift: threshold over the new level at the 64th step": heights,
    }


class _Runs:
    """Norms of all made-up runs, side by side."""

    def __init__(self, setting: Setting) -> None:
        self.random = np.random.default_rng(20260101)
        self.num_steps, self.num_runs = setting.num_steps, setting.num_runs
        self.groups: dict[str, slice] = {}
        self._columns: list[Array] = []
        for std in _STDS:
            self._add(f"log-std {std}", self._normal(std, 4 * self.num_runs))
        heavy = self.random.standard_t(4, (self.num_steps, 4 * self.num_runs)) / math.sqrt(2)
        self._add("t4, log-scale 0.25", _LEVEL * np.exp(0.25 * heavy))
        for name, factor in _FACTORS.items():
            for std in _STDS:
                norms = self._normal(std)
                norms[_START:] *= factor
                self._add(f"{name} {std}", norms)
        control = self._normal(0.25)
        self._add("control", control)
        spike, nan = control.copy(), control.copy()
        spike[_START] *= 1000
        nan[_START + 100] = np.nan
        self._add("spike", spike)
        self._add("nan", nan)
        storms = {"in a row": np.arange(30), "scattered": np.sort(self.random.permutation(100)[:30])}
        for how in storms:
            for std in _STDS:
                self._add(f"{how} {std}", self._normal(std))
        self.norms = np.concatenate(self._columns, 1)
        self.is_storm = np.zeros(self.norms.shape, dtype=bool)
        for how, steps in storms.items():
            for std in _STDS:
                self.is_storm[_START + steps, self.groups[f"{how} {std}"]] = True

    def _normal(self, std: float, num_runs: int = 0) -> Array:
        noise = self.random.standard_normal((self.num_steps, num_runs or self.num_runs))
        return _LEVEL * np.exp(std * noise)

    def _add(self, name: str, norms: Array) -> None:
        start = sum(columns.shape[1] for columns in self._columns)
        self.groups[name] = slice(start, start + norms.shape[1])
        self._columns.append(norms)


def healthy_run(clipper: Clipper, total: Clipper, setting: Setting) -> dict[str, float]:
    """False clips of a recorded run that nothing was wrong with.

    Args:
        clipper: The rule, for the layers.
        total: The rule, for the total norm.
        setting: Where the norms are.
    """
    norms = np.load(setting.healthy_run)["norms"][: setting.healthy_steps].astype(np.float64)
    layers, whole = norms[:, :-1], norms[:, -1:]
    return {
        "layers, % of layer-steps": 100 * float((layers > thresholds_of(clipper, layers)).mean()),
        "total, % of steps": 100 * float((whole > thresholds_of(total, whole)).mean()),
    }


def incident(clipper: Clipper, setting: Setting) -> dict[str, float]:
    """A total norm of 0.21 +- 0.03 for a long time, then one of 53.7 (with it the loss rose by 2.4 nats).

    Args:
        clipper: The rule.
        setting: How long.
    """
    random = np.random.default_rng(47)
    norms = (0.21 + 0.03 * random.standard_normal((setting.incident_steps, 1))).clip(0.05)
    spike = np.array([53.7])
    clipper.start(1)
    for row in norms[:-1]:
        clipper.update(row)
    before = float(clipper.thresholds(norms[-1])[0])
    clipper.update(norms[-1])
    clipped = float(np.minimum(clipper.thresholds(spike), spike)[0])
    clipper.update(spike)
    result = {
        "norm after the clip": clipped,
        "threshold afterwards, times": float(clipper.thresholds(norms[0])[0]) / before,
    }
    for beta2 in (0.95, 0.999):
        usual = float(np.mean(norms**2))
        for what, norm in (("clipped", clipped), ("not clipped", 53.7)):
            ratio = beta2 + (1 - beta2) * norm**2 / usual
            result[f"Adam's v after / before, beta2 {beta2}, {what}"] = ratio
            # It falls back as 1 + (ratio - 1) beta2^n.
            steps = math.ceil(math.log(ratio - 1) / -math.log(beta2)) if ratio > 2 else 0
            result[f"steps until v is within x2, beta2 {beta2}, {what}"] = steps
    return result
