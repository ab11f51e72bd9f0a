"""From a step that is out of the ordinary to findings: what NumericsCallback does on all ranks together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.nonfinite import describe_parameters
from stabilizer.callbacks.numerics_signs import RunTimes
from stabilizer.callbacks.numerics_views import RankView, Worst, rank_reports, view_of
from stabilizer.callbacks.searches import StepReplay
from stabilizer.callbacks.trigger import Observation
from stabilizer.diagnosis import BadParameter
from stabilizer.localize.reruns import Rerun
from stabilizer.localize.runs import Reruns
from stabilizer.names import layer_names
from stabilizer.numerics.finding import NumericsFinding
from stabilizer.numerics.hardware import describe_machine
from stabilizer.numerics.judging import Judgement, has_bad_loss, judgement, norm_of
from stabilizer.numerics.producers import ProducerWatch
from stabilizer.numerics.report import NumericsReport, ParameterCount
from stabilizer.numerics.tracing import Producer
from stabilizer.numerics.verdicts import settled
from stabilizer.numerics.wording import PARAMETER_REMEDY, remedy_for, verdict_text

__all__ = ["Found", "Inquiry"]

_MAX_LAYERS = 8


@dataclasses.dataclass(frozen=True)
class Found:
    """A finding and its report, the same on every rank."""

    finding: NumericsFinding
    report: NumericsReport


class Inquiry:
    """Looks into one step; made and run on every rank.

    Args:
        context: Of the step.
        steps: What there is to run again.
        seen: The norms against their thresholds.
        ratio: Of the trigger.
        max_replays: How often a micro-batch is run again, at most.
        tolerance: Largest relative difference between a norm and its replay.
        granularity: What a layer is.

    Attributes:
        ranks: What each of them sees, after `ask`.
    """

    def __init__(
        self,
        context: StepContext,
        steps: StepReplay,
        seen: Observation,
        *,
        ratio: float,
        max_replays: int,
        tolerance: float,
        granularity: Any,
    ) -> None:
        self._context, self._steps, self._seen = context, steps, seen
        self._ratio, self._max_replays, self._tolerance = ratio, max_replays, tolerance
        self._granularity = granularity
        self.ranks: list[RankView] = []

    def ask(self, reasons: Mapping[str, Mapping[str, float]], times: RunTimes) -> dict[str, dict[str, float]]:
        """What all ranks see; a collective.

        Args:
            reasons: Why this rank looks at the step: kind -> numbers.
            times: Of this rank's run.

        Returns:
            The reasons of all of them; of a kind that several have, the first rank's numbers.
        """
        own = view_of(reasons, self._steps, self._seen, times, ratio=self._ratio)
        self.ranks = self._steps.store.reducer.objects(own)
        found: dict[str, dict[str, float]] = {}
        for rank in self.ranks:
            for kind, numbers in rank.reasons.items():
                found.setdefault(kind, dict(numbers))
        return found

    def weights(self) -> Found | None:
        """The finding about parameters and buffers, if any of them is bad on any rank."""
        owners = [(number, bad) for number, rank in enumerate(self.ranks) for bad in rank.weights]
        if not owners:
            return None
        is_finite = all(bad.is_finite for _, bad in owners)
        same = [(number, bad) for number, bad in owners if bad.is_finite == is_finite]
        number, first = same[0]
        ranks, names = sorted({number for number, _ in same}), list(dict.fromkeys(bad.name for _, bad in same))
        what = f"{first.name} is not finite ({first.num_nan} NaN, {first.num_inf} Inf)"
        if is_finite:
            what = f"an element of {first.name} is {first.largest:.3g}, a million times the mean of the others or more"
        is_alone = len(ranks) < len(self.ranks)
        where = f" on rank {', '.join(map(str, ranks[:8]))} alone" if is_alone else ""
        finding = self._finding(
            "corrupt_parameter" if is_finite else "nonfinite_parameter",
            text=what + (f" and {len(names) - 1} more" if len(names) > 1 else "") + where,
            remedy=PARAMETER_REMEDY,
            rank=number if is_alone or len(self.ranks) == 1 else None,
            layers=tuple(dict.fromkeys(map(self._layer, names)))[:_MAX_LAYERS],
            evidence={
                "num_nan": float(first.num_nan),
                "num_inf": float(first.num_inf),
                **({"largest": first.largest} if is_finite else {}),
            },
        )
        counts = tuple(ParameterCount(name=bad.name, num_nan=bad.num_nan, num_inf=bad.num_inf) for _, bad in same)
        return self._found(finding, parameters=counts)

    def gradient(self, kind: str, numbers: Mapping[str, float], *, has_tokens: bool) -> Found:
        """The finding about a loss or a gradient; the step is run again, a collective.

        Args:
            kind: "nonfinite_loss", "nonfinite_gradient", "spike" or "stuck_loss_scale".
            numbers: Evidence.
            has_tokens: Whether GradLoc is there to be asked.
        """
        is_spike = kind == "spike"
        # Counted over all ranks; what one of several replicas has alone is less than one.
        bad = [] if is_spike else self._steps.store.nonfinite_parameters()
        owners = [number for number, view in enumerate(self.ranks) if view.gradients]
        bad = bad or [one for number in owners[:1] for one in self.ranks[number].gradients]
        runs = self._run_again(watches=not is_spike)
        judged = judgement(runs, tolerance=self._tolerance, world_size=len(self.ranks))
        if judged.rank is None and len(owners) == 1:  # after the reduction, and in its elements alone
            judged = dataclasses.replace(judged, rank=owners[0])
        verdict = judged.verdict
        producer: Producer | None = None
        if judged.runs is not None and verdict in ("repeats", "nondeterministic"):
            producer = judged.runs.found
            if kind == "nonfinite_gradient" and verdict == "repeats" and has_bad_loss(judged.runs):
                kind = "nonfinite_loss"
        num_replays = max((len(own.runs) for own in runs.ranks), default=0)
        says = verdict_text(verdict, num_replays=num_replays, reason=judged.reason)
        texts = [
            self._what(kind, bad, numbers),
            self._where(judged.rank, runs.micro_batch),
            judged.reason if verdict == "transient" and judged.reason else says,
            "" if producer is None else str(producer),
        ]
        is_machine = verdict == "transient" and judged.rank is not None
        machines = [describe_machine(self.ranks[judged.rank or 0].machine)] if is_machine else []
        finding = self._finding(
            kind,
            verdict=verdict,
            text="; ".join(text for text in texts if text),
            remedy=remedy_for(verdict, machines=machines, has_tokens=has_tokens),
            rank=judged.rank,
            layers=self._layers(bad, producer),
            micro_batch=runs.micro_batch,
            evidence={**numbers, **self._evidence(kind, bad, judged, num_replays)},
        )
        counts = tuple(ParameterCount(name=one.name, num_nan=one.num_nan, num_inf=one.num_inf) for one in bad)
        return self._found(finding, runs=runs, judged=judged, parameters=counts, producer=producer)

    def other(self, kind: str, *, text: str, remedy: str, evidence: Mapping[str, float], rank: int | None) -> Found:
        """A finding that nothing is run again for.

        Args:
            kind: What it is.
            text: In words.
            remedy: What helps.
            evidence: Numbers.
            rank: Whose it is.
        """
        return self._found(self._finding(kind, text=text, remedy=remedy, rank=rank, evidence=evidence))

    @property
    def step_skew(self) -> float | None:
        """By how many seconds the ranks' last steps differ."""
        seconds = [rank.step_seconds for rank in self.ranks if rank.step_seconds is not None]
        return max(seconds) - min(seconds) if len(seconds) > 1 else None

    @property
    def _worst(self) -> Worst:
        return max((rank.worst for rank in self.ranks), key=lambda worst: worst.size)

    def _run_again(self, *, watches: bool) -> Reruns:
        context, steps, replayer = self._context, self._steps, self._steps.replayer
        if replayer is None:
            return Reruns(errors=[steps.reason or "nothing here can run it again"])
        rerun = Rerun(
            steps.store,
            replayer,
            micro_batches=steps.micro_batches,
            local=steps.gradients.local,
            sensors=steps.gradients.sensors,
            segments=steps.gradients.segments,
            reason=steps.reason,
        )
        view, worst = context.store, self._seen.worst(self._ratio)
        return rerun.run(
            self._seen.suspicion(worst, layer_names=view.layer_names, unit_layers=view.unit_layers),
            max_replays=self._max_replays,
            stops=lambda runs: settled(runs, tolerance=self._tolerance),
            make_watch=(lambda: ProducerWatch(replayer.model)) if watches else None,
        )

    def _what(self, kind: str, bad: Sequence[BadParameter], numbers: Mapping[str, float]) -> str:
        gradient = f"the gradient is not finite in {describe_parameters(bad)}" if bad else ""
        if kind == "spike":
            worst = self._worst
            of = "" if worst.name == "total" else f" of {worst.name}"
            return f"the gradient norm{of} is {worst.norm:.4g}, {worst.excess:.3g} times its threshold"
        if kind == "nonfinite_loss":
            return "the loss is not finite" + (f", and {gradient}" if gradient else "")
        if kind == "stuck_loss_scale":
            scale, times = numbers.get("loss_scale", math.nan), numbers.get("num_overflows", 0.0)
            told = f"{times:.0f} steps in a row overflow, down to a loss scale of {scale:g}"
            return told + (f"; {gradient}" if gradient else "")
        return gradient or "the gradient norm is not finite, though all elements are"

    def _where(self, rank: int | None, micro_batch: int | None) -> str:
        host = f" ({self.ranks[rank].machine.host})" if rank is not None and len(self.ranks) > 1 else ""
        places = [
            "" if rank is None else f"rank {rank}{host}",
            "" if micro_batch is None else f"micro-batch {micro_batch}",
        ]
        return ", ".join(place for place in places if place)

    def _evidence(
        self, kind: str, bad: Sequence[BadParameter], judged: Judgement, num_replays: int
    ) -> dict[str, float]:
        found: dict[str, float] = {"num_replays": float(num_replays)}
        if kind == "spike":
            worst = self._worst
            found |= {"norm": worst.norm, "threshold": worst.threshold, "ratio": worst.excess}
        if bad:
            counts = {"num_nan": bad[0].num_nan, "num_inf": bad[0].num_inf, "num_parameters": len(bad)}
            found |= {name: float(count) for name, count in counts.items()}
        if judged.runs is not None and judged.runs.runs:
            found |= {"replayed_norm": norm_of(judged.runs.runs[0]), "loss": judged.runs.losses[0]}
        if judged.runs is not None and judged.runs.step is not None:
            found["local_norm"] = norm_of(judged.runs.step)
        skew = self.step_skew
        return found if skew is None else {**found, "step_seconds_skew": skew}

    def _layers(self, bad: Sequence[BadParameter], producer: Producer | None) -> tuple[str, ...]:
        """The first one is the one that is named."""
        if not bad and producer is None:
            worst = self._worst
            own = () if worst.name == "total" else (worst.name,)
            return tuple(dict.fromkeys((*own, *worst.layers)))[:_MAX_LAYERS]
        names = [self._layer(one.name) for one in bad]
        if producer is not None and producer.is_of_a_module:
            names.insert(
                0, self._layer(f"{producer.module}.{producer.path if producer.is_of_a_parameter else 'weight'}")
            )
        return tuple(dict.fromkeys(names))[:_MAX_LAYERS]

    def _layer(self, name: str) -> str:
        return layer_names([*self._steps.store.names, name], self._granularity)[-1]

    def _finding(self, kind: str, *, rank: int | None, layers: tuple[str, ...] = (), **what: Any) -> NumericsFinding:
        return NumericsFinding(
            kind=kind,
            step=self._context.step,
            rank=rank,
            host=None if rank is None else self.ranks[rank].machine.host,
            layer=layers[0] if layers else None,
            layers=layers,
            optimizer_index=self._context.optimizer_index,
            **what,
        )

    def _found(
        self, finding: NumericsFinding, *, runs: Reruns | None = None, judged: Judgement | None = None, **more: Any
    ) -> Found:
        rows = rank_reports(self.ranks, runs, judged)
        if runs is not None:
            more |= {"notes": tuple(runs.notes), "errors": tuple(runs.errors)}
        return Found(finding, dataclasses.replace(NumericsReport.of(finding), ranks=rows, **more))
