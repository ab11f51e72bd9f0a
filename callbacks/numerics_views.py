"""What one rank sees of a step that is out of the ordinary, and of its machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from stabilizer.callbacks.numerics_signs import RunTimes, local_part
from stabilizer.callbacks.searches import StepReplay
from stabilizer.callbacks.trigger import Observation
from stabilizer.diagnosis import BadParameter
from stabilizer.errors import logger
from stabilizer.localize.runs import Reruns
from stabilizer.names import clean_name
from stabilizer.norms import count_nan, count_nonfinite
from stabilizer.numerics.hardware import Machine, read_machine
from stabilizer.numerics.judging import Judgement, is_suspect, norm_of
from stabilizer.numerics.report import RankReport
from stabilizer.numerics.weights import BadWeight, bad_weights

__all__ = ["RankView", "Worst", "rank_reports", "view_of"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Worst:
    """The norm that is farthest over its threshold.

    Attributes:
        name: Of a layer, or "total".
        norm: As measured.
        threshold: Its own.
        excess: The norm in thresholds.
        layers: All layers over theirs, the farthest first.
    """

    name: str = "total"
    norm: float = math.nan
    threshold: float = math.nan
    excess: float = math.nan
    layers: tuple[str, ...] = ()

    @property
    def size(self) -> float:
        """The excess; infinite where it is not finite."""
        return self.excess if math.isfinite(self.excess) else math.inf


@dataclasses.dataclass(frozen=True)
class RankView:
    """One rank's view.

    Attributes:
        reasons: Why the step is looked at: kind -> numbers.
        worst: Norm that is farthest out.
        weights: Parameters and buffers that cannot be as they should be.
        gradients: Gradients that are not finite among this rank's own elements, in the order of a backward pass.
        machine: What it says.
        step_seconds: See `RunTimes`.
        collective_seconds: Likewise.
    """

    reasons: Mapping[str, Mapping[str, float]]
    worst: Worst
    weights: Sequence[BadWeight]
    gradients: Sequence[BadParameter]
    machine: Machine
    step_seconds: float | None
    collective_seconds: float | None


def view_of(
    reasons: Mapping[str, Mapping[str, float]],
    steps: StepReplay,
    seen: Observation,
    times: RunTimes,
    *,
    ratio: float,
) -> RankView:
    """This rank's; the host waits, and nothing is raised: the other ranks wait for the answer.

    Args:
        reasons: As of `RankView`.
        steps: What there is to run again.
        seen: The norms against their thresholds.
        times: Of this rank's run.
        ratio: Of the trigger.
    """
    return RankView(
        reasons=reasons,
        worst=_tried(lambda: _worst(seen, ratio), Worst()),
        weights=_tried(lambda: _bad_weights(steps), []),
        gradients=_tried(lambda: _bad_gradients(steps), []),
        machine=read_machine(steps.store.device),
        step_seconds=times.step_seconds,
        collective_seconds=times.collective_seconds,
    )


def rank_reports(views: Sequence[RankView], runs: Reruns | None, judged: Judgement | None) -> tuple[RankReport, ...]:
    """What a report says of the ranks.

    Args:
        views: Of all of them.
        runs: What they have run again, if anything.
        judged: What that says.
    """
    rows = []
    for number, view in enumerate(views):
        own = runs.ranks[number] if runs is not None and number < len(runs.ranks) else None
        row = RankReport(
            rank=number,
            step_seconds=view.step_seconds,
            collective_seconds=view.collective_seconds,
            machine=view.machine,
        )
        if own is not None:
            row = dataclasses.replace(
                row,
                verdict=None if judged is None else judged.verdicts.get(number),
                is_suspect=is_suspect(own),
                step_norm=None if own.step is None else norm_of(own.step),
                replay_norms=tuple(map(norm_of, own.runs)),
                unscaled_norm=None if own.unscaled is None else norm_of(own.unscaled),
            )
        rows.append(row)
    return tuple(rows)


def _worst(seen: Observation, ratio: float) -> Worst:
    at, excess = seen.worst(ratio), seen.excess.tolist()
    sizes = [one if math.isfinite(one) else math.inf for one in excess]
    order = sorted(range(1, len(sizes)), key=lambda number: -sizes[number])
    layers = tuple(seen.names[number] for number in order if sizes[number] > 1)
    return Worst(seen.names[at], float(seen.norms[at]), float(seen.thresholds[at]), excess[at], layers)


def _bad_weights(steps: StepReplay) -> list[BadWeight]:
    replayer, index = steps.replayer, steps.store.index
    parameters = [(name, index.local(one.detach())) for name, one in zip(index.names, index.parameters, strict=True)]
    buffers = [] if replayer is None else [(clean_name(name), one) for name, one in replayer.model.named_buffers()]
    # Masks are buffers of minus infinity, and a buffer may hold anything that is finite.
    bad_buffers = [bad for bad in bad_weights([(name, local_part(one)) for name, one in buffers]) if bad.num_nan]
    return bad_weights(parameters) + bad_buffers


def _bad_gradients(steps: StepReplay) -> list[BadParameter]:
    index, device = steps.store.index, steps.store.device
    gradients = [None if one is None else index.local(one) for one in index.gradients()]
    bad, nan = count_nonfinite(gradients, device=device).tolist(), count_nan(gradients, device=device).tolist()
    rows = zip(index.names, bad, nan, strict=True)
    return [BadParameter(name, int(of_nan), int(all_bad - of_nan)) for name, all_bad, of_nan in rows if all_bad][::-1]


def _tried(function: Callable[[], T], default: T) -> T:
    try:
        return function()
    except Exception:
        logger.exception("a look at a step failed on this rank; the others go on")
        return default
