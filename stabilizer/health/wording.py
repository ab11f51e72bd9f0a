"""What the numbers mean, in one line each: plain functions on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from stabilizer.health.explosions import CLASSES
from stabilizer.health.findings import KINDS, SEVERITIES, Finding, Kind
from stabilizer.health.layout import PARTS, Layout
from stabilizer.health.limits import Limits

__all__ = ["Reading", "describe"]

_MAX_LAYERS = 8


@dataclasses.dataclass(frozen=True)
class Reading:
    """The numbers of `examine`, on the host.

    Attributes:
        step: At which they were made.
        steps: Of the rows that were new then.
        layout: The layers.
        limits: What they were held against.
        values: As `reading_shapes` says.
    """

    step: int
    steps: Sequence[int]
    layout: Layout
    limits: Limits
    values: Mapping[str, Tensor]


def describe(reading: Reading) -> list[Finding]:
    """Put into words what was found.

    Args:
        reading: The numbers.

    Returns:
        One finding of every kind whose level is not 0, in the order of `KINDS`.
    """
    found = []
    for kind, level in zip(KINDS, reading.values["levels"].tolist(), strict=True):
        if level:
            step, layers, evidence, text = _WORDS[kind](reading)
            severity = SEVERITIES[int(level) - 1]
            found.append(Finding(kind, severity, step, tuple(layers[:_MAX_LAYERS]), evidence, f"step {step}: {text}"))
    return found


_Words = tuple[int, Sequence[str], dict[str, float], str]


def _decay(reading: Reading) -> _Words:
    slope, r_squared, half_depth = reading.values["decay"].tolist()
    num, blocks = len(reading.layout.blocks), reading.layout.blocks
    small, large = (blocks[-1], blocks[0]) if slope < 0 else (blocks[0], blocks[-1])
    evidence = {"slope": slope, "r_squared": r_squared, "half_depth": half_depth, "num_blocks": float(num)}
    text = (
        f"gradient norms halve every {half_depth:.2g} blocks from {large} to {small} (R^2 {r_squared:.2f} over {num} "
        f"blocks, last {reading.limits.window} steps). Check residual connections, the scale of the initialization and "
        "saturating activations"
    )
    return reading.step, [small, large], evidence, text


def _vanishing(reading: Reading) -> _Words:
    [log_ratio], blocks = reading.values["vanishing"].tolist(), reading.layout.blocks
    shallow, deep = blocks[:2], blocks[-((len(blocks) + 3) // 4) :]
    small, large = ("deep", "shallow") if log_ratio < 0 else ("shallow", "deep")
    advice = {
        "deep": "whether the deep blocks do anything (norm placement, scale of their output projections)",
        "shallow": "residual connections, post-norm without warm-up and saturating activations",
    }[small]
    text = (
        f"the gradient norm of the {small} blocks ({_names(deep if small == 'deep' else shallow)}) is "
        f"{math.exp(-abs(log_ratio)):.2g} of that of the {large} ones (median of {reading.limits.window} steps). "
        f"Check {advice}"
    )
    return (
        reading.step,
        deep if small == "deep" else shallow,
        {"ratio": math.exp(log_ratio), "window": float(reading.limits.window)},
        text,
    )


def _explosion(name: str) -> Callable[[Reading], _Words]:
    number = CLASSES.index(name)

    def words(reading: Reading) -> _Words:
        values, layout = reading.values, reading.layout
        step = reading.steps[int(values["explosion_rows"][number])]
        excess, is_far = values["explosion_excess"][number].tolist(), values["explosion_far"][number].tolist()
        far = [at for at in range(len(layout.layers)) if is_far[at]]
        far.sort(key=lambda at: -excess[at])
        layers, times = [layout.layers[at] for at in far], math.exp(excess[far[0]])
        num_steps = int(values["explosion_counts"][number])
        evidence = {"ratio": times, "num_layers": float(len(far)), "num_steps": float(num_steps)}
        often = f", one of {num_steps} such steps in the last {len(reading.steps)}" if num_steps > 1 else ""
        where = f"{times:.3g} times its usual gradient norm in {layers[0]}{often}"
        parts = ""
        if name == "one" and layout.layer_blocks[far[0]] >= 0:
            at = len(layout.layers) + 2 * layout.layer_blocks[far[0]]
            own = {part: math.exp(value) for part, value in zip(PARTS, excess[at : at + 2], strict=True)}
            own = {part: value for part, value in own.items() if math.isfinite(value)}
            evidence |= {f"{part}_ratio": value for part, value in own.items()}
            parts = "".join(f", {part} {value:.3g} times" for part, value in own.items())
        advice = {
            "all": f"{len(far)} of {len(layout.layers)} layers far over theirs together. A clip of the total copes "
            "with that: wait, and look at the learning rate if it comes again",
            "shallow": f"only shallow layers with it ({_names(layers)}). Look at this step's batch: rare tokens, bad "
            "documents, its position in the data",
            "one": f"the other layers are normal{parts} (type B). Look at this layer: attention logits, its scale, its "
            "precision; LayerClipCallback holds it alone",
            "some": f"{len(far)} of {len(layout.layers)} layers with it ({_names(layers)}). Look at what they share; "
            "GradLocCallback names the tokens",
        }[name]
        return step, layers, evidence, f"{where}; {advice}"

    return words


def _parts(reading: Reading) -> _Words:
    logs, layout = reading.values["parts"], reading.layout
    known = [(value, block) for block, value in enumerate(logs.tolist()) if not math.isnan(value)]
    ordered = sorted(value for value, _ in known)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    limit = math.log(reading.limits.parts_ratio)
    apart = sorted((one for one in known if abs(one[0] - middle) > limit), key=lambda one: -abs(one[0] - middle))
    value = apart[0][0]
    high = "attention" if value > middle else "mlp"
    layers = [layout.blocks[block] for _, block in apart]
    evidence = {"ratio": math.exp(value), "usual_ratio": math.exp(middle), "num_blocks": float(len(apart))}
    text = (
        f"in {layers[0]} attention has {math.exp(value):.2g} times the gradient norm of the MLP, in the other blocks "
        f"{math.exp(middle):.2g} times ({len(apart)} of {len(known)} blocks so far off, median of "
        f"{reading.limits.window} steps): too much in its {high} part or too little in the other. Check its attention "
        "logits (QK-norm) and whether either part is saturated or dead"
    )
    return reading.step, layers, evidence, text


def _no_gradient(reading: Reading) -> _Words:
    idle, window = reading.values["idle"].tolist(), reading.limits.window
    names = [name for name, num in zip(reading.layout.modules, idle, strict=True) if num >= window]
    text = (
        f"{len(names)} of {len(idle)} trainable modules had no gradient in the last {window} steps or more "
        f"({_names(names)}). If they should train, check that the loss reaches them (adapter switched off, detached, "
        "unused expert); else set requires_grad=False"
    )
    return (
        reading.step,
        names,
        {"num_modules": float(len(names)), "num_steps": min(num for num in idle if num >= window)},
        text,
    )


def _drift(reading: Reading) -> _Words:
    medians = [math.exp(value) for value in reading.values["drift"].tolist()]
    evidence = {f"median_{number}": value for number, value in enumerate(medians)}
    shown = ", ".join(f"{value:.3g}" for value in medians)
    text = (
        f"the total gradient norm has grown {medians[-1] / medians[0]:.2g}-fold without a spike (medians of "
        f"{reading.limits.window} steps: {shown}). Check the learning rate against its schedule, the growth of weights "
        "and attention logits; lower the rate before it spikes"
    )
    return reading.step, (), {"ratio": medians[-1] / medians[0], **evidence}, text


def _plateau(reading: Reading) -> _Words:
    slopes, errors = reading.values["trends"].tolist()
    window = reading.limits.loss_window
    evidence = {"slope_0": slopes[0], "slope_1": slopes[1], "error_0": errors[0], "error_1": errors[1]}
    text = (
        f"the loss has not clearly fallen in two windows of {window} steps (slopes {slopes[0]:.2g} and {slopes[1]:.2g} "
        f"a step, standard errors {errors[0]:.2g} and {errors[1]:.2g}). Check whether the learning rate is too high or "
        "spent, and the validation loss; it may be done"
    )
    return reading.step, (), evidence, text


_WORDS: dict[Kind, Callable[[Reading], _Words]] = {
    "exponential_decay": _decay,
    "vanishing": _vanishing,
    "explosion_all": _explosion("all"),
    "explosion_shallow": _explosion("shallow"),
    "explosion_one": _explosion("one"),
    "explosion_some": _explosion("some"),
    "parts_apart": _parts,
    "no_gradient": _no_gradient,
    "total_drift": _drift,
    "loss_plateau": _plateau,
}


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
