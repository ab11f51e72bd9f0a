"""Localizer: from a step whose gradient is out of the ordinary to the units behind it, on all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabilizer.localize.guarded import guarded
from stabilizer.localize.prober import Prober, no_gate
from stabilizer.localize.rebuilding import Difference, copy_into_
from stabilizer.localize.replaying import Replayer
from stabilizer.localize.result import Result, Suspicion
from stabilizer.localize.searching import Budget, LocalFinding, MicroBatchSearch
from stabilizer.localize.step_runner import StepRunner
from stabilizer.localize.surveying import agreed
from stabilizer.localize.tap import Tap
from stabilizer.localize.without import Without
from stabilizer.progress import Progress
from stabilizer.store import GradientStore

__all__ = ["Localizer"]


class Localizer(StepRunner):
    """Searches one step.

    Args:
        store: Holds the step's gradients.
        replayer: The host's.
        tap: What is gated where the model has no `token_gate`.
        blocks: Repeated blocks of the model.
        **step: See `StepRunner`.
    """

    def __init__(
        self,
        store: GradientStore,
        replayer: Replayer,
        *,
        tap: Tap,
        blocks: Sequence[tuple[str, nn.Module]],
        **step: Any,
    ) -> None:
        super().__init__(store, replayer, **step)
        self._tap, self._blocks = tap, blocks
        self._own: dict[int, LocalFinding] = {}
        self._outside: Tensor | None = None
        self._tokenizer: Any = None
        self._redact: Sequence[str] = ()
        self._max_passes = 0

    def run(
        self,
        suspicion: Suspicion,
        *,
        max_passes: int,
        max_seconds: float | None,
        tolerance: float,
        rebuilds: bool,
        grad_scale: Tensor | None,
        tokenizer: Any = None,
        redact: Sequence[str] = (),
    ) -> Result:
        """Search; a collective, like nearly everything here. Whatever it changes is put back.

        Args:
            suspicion: What is out of the ordinary.
            max_passes: Largest number of passes.
            max_seconds: When to stop; `None` for never.
            tolerance: Largest relative difference between a norm and its replay.
            rebuilds: Whether the step's gradient is to be that without the found units, in place.
            grad_scale: What the step's gradients are still multiplied by, shape ().
            tokenizer: Makes text of tokens; `None` for no text.
            redact: Keys of the batch that are not read.

        Returns:
            The same on every rank.
        """
        self._tokenizer, self._redact = tokenizer, redact
        start, result = time.monotonic(), Result()
        self._max_passes = max_passes
        # What is searched, and how many passes there are, follows from it: no rank may have one of its own.
        suspicion, _ = agreed(suspicion, self._reducer)
        budget = Budget(max_passes, math.inf if max_seconds is None else start + max_seconds, tolerance)
        self._lock.attempt(self._check)
        order = self._survey.run(suspicion, result)
        if order is not None and result.largest is None:
            gradients = [parameter.grad for parameter in self._parameters]
            rebuilt = self._lock.attempt(
                lambda: self._replay(suspicion, order, budget, result, gradients, grad_scale, rebuilds=rebuilds)
            )
            if self._lock.agree().has_failed:
                result.errors = self._lock.errors()
            elif rebuilt is not None:
                copy_into_(gradients, rebuilt, factor=self._factor(grad_scale))
                result.is_rebuilt = True
        result.seconds = time.monotonic() - start
        return result

    def _replay(
        self,
        suspicion: Suspicion,
        order: Sequence[int],
        budget: Budget,
        result: Result,
        gradients: Sequence[Tensor | None],
        grad_scale: Tensor | None,
        *,
        rebuilds: bool,
    ) -> list[Tensor | None] | None:
        """All that runs the model; whatever it changes is put back.

        Returns:
            The gradient without the found units, if that was asked for and there are any.
        """
        lock, rebuilt, difference = self._lock, None, None
        with contextlib.ExitStack() as stack:
            needs_gate = math.isfinite(suspicion.norm)
            prober = lock.attempt(lambda: stack.enter_context(self._guarded(needs_gate=needs_gate)))
            if not lock.agree().has_failed and prober is not None:
                found = order or self._survey.by_replay(prober, suspicion, result)
                if found:
                    difference = self._search(prober, suspicion, found, budget, result, gradients)
            self._exchange(result)
            if result.has_tokens and not self._replayer.knows_reduction:
                result.notes.append(
                    "the loop adds up the ranks' gradients by itself: no norm of the step without the tokens is known, "
                    "and no gradient is rebuilt"
                )
            elif prober is not None and result.has_tokens and not result.errors:
                factor = self._factor(grad_scale)
                without = Without(self._store, self._replayer, lock, gradients, factor=factor, grad_scale=grad_scale)
                chosen = self._inside(suspicion, result)
                without.measure(difference, dataclasses.replace(suspicion, chosen=chosen), result)
                if rebuilds and not result.errors and bool((chosen == suspicion.chosen).all()):
                    rebuilt = without.rebuild(prober, self._survey.micro_batches, self._own, result)
        return rebuilt

    @contextlib.contextmanager
    def _guarded(self, *, needs_gate: bool) -> Iterator[Prober]:
        what = "searching the step" if self._store.current is None else f"searching step {self._store.current.step}"
        with (
            Progress(what, total=self._max_passes, unit="passes") as progress,
            guarded(self._replayer, store=self._store, sensors=self._sensors) as (guard, sensors),
        ):
            prober = Prober(
                self._replayer,
                self._lock,
                guard=guard,
                sensors=sensors,
                segments=self._segments,
                parameters=self._parameters,
                tap=self._tap,
                blocks=self._blocks,
                group=self._survey.group,
                needs_gate=needs_gate,
                on_pass=progress.advance,
            )
            try:
                yield prober
            finally:
                prober.drop()

    def _search(
        self,
        prober: Prober,
        suspicion: Suspicion,
        order: Sequence[int],
        budget: Budget,
        result: Result,
        gradients: Sequence[Tensor | None],
    ) -> Difference | None:
        """Search the micro-batches one after another.

        Returns:
            What was taken out; `None` if it is not known of all of them.
        """
        difference: Difference | None = Difference(gradients)
        for number in order:
            if budget.passes <= 0:
                result.is_complete = False
                break
            search = MicroBatchSearch(
                prober,
                self._lock,
                chosen=suspicion.chosen,
                budget=budget,
                tokenizer=self._tokenizer,
                redact=self._redact,
            )
            found = search.run(self._survey.micro_batches[number], self._survey.own[number])
            if found is None:
                break
            self._own[number] = found
            self._outside = search.outside if self._outside is None else self._outside | search.outside
            if search.opened is None or search.proved is None:
                difference = None
            elif difference is not None:
                difference.add_(search.opened, search.proved)
        result.num_passes, result.num_forwards = prober.num_passes, prober.num_forwards
        return difference

    def _inside(self, suspicion: Suspicion, result: Result) -> Tensor:
        """Units of the store whose gradients come through the gates of all ranks."""
        own = torch.zeros_like(suspicion.chosen) if self._outside is None else self._outside
        outside = self._reducer.sum(own.to(torch.float32)) > 0
        if bool(outside.any()):
            result.notes.append(
                "the norm without the tokens is that of the layers below the gate alone, and no gradient is rebuilt: "
                "that of the others cannot be told apart by tokens"
            )
        return suspicion.chosen & ~outside

    def _exchange(self, result: Result) -> None:
        result.errors = self._lock.errors()
        speaks = self._survey.group.is_first
        own = [finding for finding in self._own.values() if finding.verdict != "clean" and speaks]
        for number, findings in enumerate(self._reducer.objects(own)):
            result.findings += [(number, finding) for finding in findings]
        if any(finding.verdict == "unfinished" for _, finding in result.findings):
            result.is_complete = False
        if any(not finding.is_gated for _, finding in result.findings):
            result.notes.append(f"tokens cannot be told: {no_gate(self._tap)}")
        if (scale := _missing_scale(result)) is not None:
            for _, finding in result.findings:
                finding.verdict = "scaled"
            result.errors.append(
                f"the gradients that were seen are {scale:g} times those of the replay: tell the loop's gradient "
                "scaler, handle.measure(scaler=scaler) before the step, or let loss_fn divide as the loop does"
            )

    def _factor(self, grad_scale: Tensor | None) -> Tensor | float:
        """Brings replayed gradients, which have the loss scale in them, to the scale of the step's."""
        scale = self._replayer.scale()
        return 1.0 if scale is None or grad_scale is not None else scale.to(torch.float32).reciprocal()


def _missing_scale(result: Result) -> float | None:
    """The power of two by which all replays are too small, as without the scale of a scaler that nobody told of."""
    ratios = [
        finding.suspect.norm / finding.replayed_norm
        for _, finding in result.findings
        if finding.verdict == "not_reproducible" and finding.replayed_norm
    ]
    if not ratios or len(ratios) < len(result.findings) or not all(map(math.isfinite, ratios)):
        return None
    power = round(math.log2(ratios[0])) if ratios[0] > 0 else 0
    is_same = all(abs(ratio / 2.0**power - 1) < 0.01 for ratio in ratios)
    return 2.0**power if is_same and power else None
