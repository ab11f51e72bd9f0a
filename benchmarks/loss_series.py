"""Losses that are made up, and what a detector does with them. All sizes are in sigmas of the noise."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["HEALTHY", "NOISES", "Setting", "Watcher", "measure"]

Array = npt.NDArray[np.float64]
Figures = dict[str, dict[str, float]]

#: A loss late in a run: sigma is 2 % of it.
LEVEL, SIGMA = 2.5, 0.05
_COOLDOWN = 100
_BEFORE = 2000

#: With a median absolute deviation of 1 / 1.4826: sigma is the same for all of them. Normal noise has a standard
#: deviation of 1, Laplace's of 1.38, t5's of 1.20, t3's of 1.53.
NOISES: Mapping[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda rng, num: rng.standard_normal(num),
    "Laplace": lambda rng, num: rng.laplace(size=num) / (1.4826 * math.log(2)),
    "t5": lambda rng, num: rng.standard_t(5, num) / (1.4826 * 0.726687),
    "t3": lambda rng, num: rng.standard_t(3, num) / (1.4826 * 0.764892),
}


class Watcher(Protocol):
    """A detector; what it returns is not empty if there is an alarm."""

    def update(self, step: int, value: float) -> Sequence[Any]:
        """Take the next loss."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How long and how many.

    Attributes:
        healthy_runs: Of each noise.
        healthy_steps: Of each of these.
        num_runs: That something happens in, of each noise.
        num_points: Steps of each of these at which it happens, each on its own.
        seed: Of all random numbers.
    """

    healthy_runs: int = 100
    healthy_steps: int = 10_000
    num_runs: int = 50
    num_points: int = 20
    seed: int = 6


def _falling(rng: np.random.Generator, num: int) -> Array:
    steps = np.arange(num)
    # From 11 to 2.5: fast, then slowly, then not at all.
    trend = 6.0 * np.exp(-steps / 150) + 2.5 * np.exp(-steps / 1500)
    return trend / SIGMA + rng.standard_normal(num)


def _staircase(rng: np.random.Generator, num: int) -> Array:
    # Flat, then down by ten sigmas within 200 steps (a learning rate that is lowered), and so on.
    steps = np.arange(num)
    return -10.0 * (steps // 2000 + np.clip((steps % 2000) / 200, 0, 1)) + rng.standard_normal(num)


def _rounded(rng: np.random.Generator, num: int) -> Array:
    # As bfloat16 would: at 2.5 it has steps of 2^-6.
    grain = 2.0**-6 / SIGMA
    return np.round((LEVEL / SIGMA + rng.standard_normal(num)) / grain) * grain - LEVEL / SIGMA


def _related(rng: np.random.Generator, num: int) -> Array:
    # Each loss has 0.3 of the one before.
    noise = rng.standard_normal(num) * math.sqrt(1 - 0.3**2)
    result = np.empty(num)
    value = 0.0
    for step in range(num):
        value = result[step] = 0.3 * value + noise[step]
    return result


#: What is healthy, beside the noises: name -> what makes it.
HEALTHY: Mapping[str, Callable[[np.random.Generator, int], Array]] = {
    **NOISES,
    "falling, normal": _falling,
    "falling in steps, normal": _staircase,
    "rounded to bfloat16, normal": _rounded,
    "autocorrelation 0.3, normal": _related,
}


def _events(num: int) -> dict[str, Array]:
    """What is added to the noise."""
    steps = np.arange(1, num + 1)
    return {
        "jump of 5 sigma": np.full(num, 5.0),
        "spike of 7 sigma": np.where(steps == 1, 7.0, 0.0),
        "ramp of 5 sigma in 100 steps": np.minimum(steps * 0.05, 5.0),
    }


def measure(make: Callable[[], Watcher], setting: Setting) -> Figures:
    """All figures of one detector.

    Args:
        make: Gives a new one.
        setting: Sizes.

    Returns:
        Question -> what -> figure. NaN is a delay of something that was never seen.
    """
    figures: Figures = {}
    figures["false alarms per 10,000 healthy steps"] = false_alarms(make, setting)
    for noise in NOISES:
        for question, what, value in _detected(make, noise, setting):
            figures.setdefault(question, {})[f"{noise}{what}"] = value
    figures["bursts, NaN, first losses, lasting shifts"] = _trials(make, setting)
    return figures


def false_alarms(make: Callable[[], Watcher], setting: Setting) -> dict[str, float]:
    """Alarms in runs in which nothing happens, one of a kind in 100 steps.

    Args:
        make: Gives a new detector.
        setting: Sizes.

    Returns:
        What -> alarms per 10,000 steps: of all kinds, then of each kind that the detector tells apart.
    """
    result: dict[str, float] = {}
    for name, healthy in HEALTHY.items():
        rng = np.random.default_rng([setting.seed, len(name)])
        # The noises have the targets: more of them.
        num_runs = setting.healthy_runs if name in NOISES else max(setting.healthy_runs // 4, 1)
        counts = {"": 0} | dict.fromkeys(getattr(make(), "kinds", ()), 0)
        for _ in range(num_runs):
            watcher, told_at = make(), dict.fromkeys(counts, -_COOLDOWN)
            for step, value in enumerate(_losses(healthy(rng, setting.healthy_steps))):
                found = watcher.update(step, value)
                for kind in ["", *found] if found else ():
                    if kind in counts and step - told_at[kind] >= _COOLDOWN:
                        counts[kind] += 1
                        told_at[kind] = step
        for kind, count in counts.items():
            result[name + (f": {kind}" if kind else "")] = 1e4 * count / (num_runs * setting.healthy_steps)
    return result


def _losses(noise: Array) -> list[float]:
    losses: list[float] = (LEVEL + SIGMA * noise).tolist()
    return losses


def _points(make: Callable[[], Watcher], noise: str, setting: Setting) -> Iterator[tuple[bytes, np.random.Generator]]:
    """Detectors in the middle of a healthy run, at many points of many runs."""
    for run in range(setting.num_runs):
        rng = np.random.default_rng([setting.seed, run, len(noise)])
        watcher, step = make(), 0
        for point in range(setting.num_points):
            for value in _losses(NOISES[noise](rng, _BEFORE if point == 0 else 40)):
                watcher.update(step, value)
                step += 1
            yield pickle.dumps((watcher, step)), rng


def _first_alarm(saved: bytes, losses: Sequence[float]) -> float:
    """How many steps after the first of these losses there is an alarm; infinity if there is none."""
    watcher, start = pickle.loads(saved)
    for delay, value in enumerate(losses):
        if watcher.update(start + delay, value):
            return delay
    return math.inf


def _detected(make: Callable[[], Watcher], noise: str, setting: Setting) -> Iterator[tuple[str, str, float]]:
    delays: dict[str, list[float]] = {}
    sizes = []
    for saved, rng in _points(make, noise, setting):
        values = NOISES[noise](rng, 100)
        for name, event in _events(100).items():
            num = 1 if name.startswith("spike") else 100
            delays.setdefault(name, []).append(_first_alarm(saved, _losses((values + event)[:num])))
        for factor in (2, 3):
            name = f"sigma times {factor}"
            delays.setdefault(name, []).append(_first_alarm(saved, _losses(factor * values)))
        sizes.append(_smallest_seen(saved, values[0]))
    within = {name: [np.mean(np.array(found) < num) for num in (2, 5, 60, 100)] for name, found in delays.items()}
    median = {name: float(np.median(found)) for name, found in delays.items()}
    jump, ramp = "jump of 5 sigma", "ramp of 5 sigma in 100 steps"
    yield "lasting jump of 5 sigma, %", ", within 1 step", 100 * within[jump][0]
    yield "lasting jump of 5 sigma, %", ", within 5 steps", 100 * within[jump][1]
    yield "one-step spikes", ", of 7 sigma seen, %", 100 * within["spike of 7 sigma"][0]
    yield "one-step spikes", ", 99 % seen from ... sigma on", float(np.quantile(sizes, 0.99, method="higher"))
    yield "ramp of 5 sigma in 100 steps", ", within 60, %", 100 * within[ramp][2]
    yield "ramp of 5 sigma in 100 steps", ", median delay, steps", median[ramp]
    for factor in (2, 3):
        name = f"sigma times {factor}"
        yield "steps of variance", f", {name}: within 100 steps, %", 100 * within[name][3]
        yield "steps of variance", f", {name}: median delay, steps", median[name]


def _smallest_seen(saved: bytes, noise: float) -> float:
    """The smallest spike on top of this noise that is an alarm, to 2 %; infinity beyond 1,000 sigmas."""
    low, high = 1.0, 1000.0
    if not _first_alarm(saved, _losses(np.array([noise + high]))) < 1:
        return math.inf
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        if _first_alarm(saved, _losses(np.array([noise + middle]))) < 1:
            high = middle
        else:
            low = middle
    return high


def _trials(make: Callable[[], Watcher], setting: Setting) -> dict[str, float]:
    """Single situations, in normal noise."""
    result: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        result.setdefault(what, []).append(value)

    for saved, rng in _points(make, "normal", setting):
        for name, is_bad in (
            ("scattered", rng.permutation(100) < 30),
            ("in a row", np.arange(100) < 30),
        ):
            watcher, step = pickle.loads(saved)
            values = _losses(rng.standard_normal(100) + np.where(is_bad, 12.0, 0.0))
            seen = [bool(watcher.update(step + delay, value)) for delay, value in enumerate(values)]
            note(f"30 of 100 steps at 12 sigma, {name}: seen, %", 100 * np.mean(np.array(seen)[is_bad]))
        watcher, step = pickle.loads(saved)
        for value in [math.nan, *_losses(rng.standard_normal(9))]:
            watcher.update(step, value)
            step += 1
        note(
            "a spike of 10 sigma 10 steps after a NaN: seen, %", 100.0 * bool(watcher.update(step, LEVEL + 10 * SIGMA))
        )
        watcher, step = pickle.loads(saved)
        values = _losses(rng.standard_normal(500) + 12.0)
        seen = [bool(watcher.update(step + delay, value)) for delay, value in enumerate(values)]
        note("a lasting shift of 12 sigma: alarms from the 64th step on, % of steps", 100 * np.mean(seen[64:]))
        note("a spike of 10 sigma 64 steps into that shift: seen, %", _spike_in_a_shift(saved, values))
        watcher = make()
        for step, value in enumerate([1e6, *(2.0 + 0.1 * rng.standard_normal(100))]):
            watcher.update(step, float(value))
        note("1e6 first, 100 losses near 2.0, then 8.0: seen, %", 100.0 * bool(watcher.update(101, 8.0)))
    return {what: float(np.mean(values)) for what, values in result.items()}


def _spike_in_a_shift(saved: bytes, values: Sequence[float]) -> float:
    watcher, step = pickle.loads(saved)
    for value in values[:64]:
        watcher.update(step, value)
        step += 1
    return 100.0 * bool(watcher.update(step, values[64] + 10 * SIGMA))
