"""What becomes of a search: an incident."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from stabilizer.callbacks.context import StepContext
from stabilizer.callbacks.trigger import Observation
from stabilizer.errors import logger
from stabilizer.localize.classify import SpikeFacts, classify
from stabilizer.localize.incident import (
    CandidateGroup,
    FoundToken,
    Incident,
    LayerReport,
    MicroBatchReport,
    Origin,
)
from stabilizer.localize.result import Result
from stabilizer.localize.searching import LocalFinding
from stabilizer.localize.shortening import first_of, shortened
from stabilizer.localize.summary import summarize
from stabilizer.localize.tap import Tap

__all__ = ["make_incident", "try_incident"]

_MAX_ERRORS = 8


def try_incident(context: StepContext, seen: Observation, **what: Any) -> Incident | None:
    """What `make_incident` gives; `None`, and the reason in the log, where that fails: training goes on.

    Args:
        context: Of the step.
        seen: What started the search.
        **what: See `make_incident`.
    """
    try:
        return make_incident(context, seen, **what)
    except Exception:
        logger.exception("the incident of step %d could not be put together; training goes on", context.step)
        return None


def make_incident(
    context: StepContext,
    seen: Observation,
    *,
    worst: int,
    result: Result,
    tap: Tap,
    on_found: str,
) -> Incident:
    """Put together what all ranks know alike.

    Args:
        context: Of the step.
        seen: What started the search.
        worst: Position of the norm that was searched.
        result: Of the search.
        tap: What was gated.
        on_found: What was to be done.
    """
    layers = _layers(context, result.parts)
    tokens = _tokens(result)
    verdicts = {finding.verdict for _, finding in result.findings}
    compared = [(number, finding) for number, finding in result.findings if finding.replayed_norm is not None]
    reproducible = None if not compared or "scaled" in verdicts else "not_reproducible" not in verdicts
    if result.largest is not None and math.isfinite(float(seen.norms[worst])):
        reproducible = False
    observed = float(seen.norms[worst])
    kind = classify(
        SpikeFacts(
            observed_norm=observed,
            is_loss_finite=context.loss is None or not bool(context.loss.num_nonfinite > 0),
            reproducible=reproducible,
            verdict=_verdict(verdicts),
            tokens=tokens,
            layers=layers,
        )
    )
    notes = [*result.notes, *([tap.note] if tap.note else [])]
    rank, worst_replay = max(compared, key=lambda one: _replay_size(one[1]), default=(None, None))
    if result.largest is not None:
        notes.append(
            f"the ranks' own gradients add up to {result.largest:.6g} at most: the step's was changed after the "
            "backward pass, in the reduction, on the way between ranks, or by code that changes gradients"
        )
    if reproducible is False and worst_replay is not None:
        suspect = worst_replay.suspect
        norms = f"local norm {suspect.norm:.6g} observed, {worst_replay.replayed_norm:.6g} replayed"
        notes.append(f"rank {rank}, micro-batch {suspect.micro_batch}: {norms}")
    incident = Incident(
        step=context.step,
        type=kind,
        observed_norm=observed,
        threshold=float(seen.thresholds[worst]),
        threshold_of=f"{seen.names[worst]} ({seen.owners[worst]})",
        optimizer_index=context.optimizer_index,
        counterfactual_norm=result.counterfactual,
        counterfactual_is_bound=result.is_bound,
        num_passes=result.num_passes,
        num_forwards=result.num_forwards,
        num_rebuild_passes=result.num_rebuild_passes,
        seconds=result.seconds,
        reproducible=reproducible,
        replayed_norm=None if worst_replay is None else worst_replay.replayed_norm,
        replayed_rank=rank,
        replayed_micro_batch=None if worst_replay is None else worst_replay.suspect.micro_batch,
        local_norm=None if worst_replay is None else worst_replay.suspect.norm,
        is_complete=result.is_complete and not result.errors,
        action=_action(on_found, result),
        ratio="observed" if any(finding.sees_ratios for _, finding in result.findings) else "not observable",
        layers=tuple(layers),
        micro_batches=tuple(
            MicroBatchReport(
                rank=one.rank,
                micro_batch=one.micro_batch,
                norm=one.norm,
                baseline=one.baseline if math.isfinite(one.baseline) else None,
                is_suspect=one.is_suspect,
            )
            for one in result.suspects
        ),
        tokens=tuple(tokens),
        origin=_origin(result, kind),
        candidates=_candidates(result),
        error="; ".join(first_of(result.errors, num=_MAX_ERRORS)) or None,
        notes=tuple(notes),
    )
    # A token that only stands where something begins is no proven cause.
    is_begun = incident.origin is not None and incident.counterfactual_norm is None
    told = dataclasses.replace(incident, tokens=()) if is_begun else incident
    return shortened(dataclasses.replace(incident, summary=summarize(told)))


def _action(on_found: str, result: Result) -> Any:
    is_done = {"drop_tokens": result.is_rebuilt, "skip_step": bool(result.findings), "report": True}
    return on_found if is_done[on_found] else "report"


def _verdict(verdicts: set[str]) -> Any:
    for verdict in ("tokens", "unfinished", "no_token", "unexplained"):
        if verdict in verdicts:
            return verdict
    return None


def _replay_size(finding: LocalFinding) -> tuple[bool, float]:
    """The one that is no replay comes first."""
    return finding.verdict == "not_reproducible", _size(finding.suspect.norm)


def _size(norm: float) -> float:
    return norm if math.isfinite(norm) else math.inf


def _tokens(result: Result) -> list[FoundToken]:
    found = []
    for number, finding in result.findings:
        scores = finding.scores or [math.nan] * len(finding.tokens)
        shares = finding.share or [math.nan] * len(finding.tokens)
        for told, score, share in zip(finding.tokens, scores, shares, strict=True):
            found.append(
                FoundToken(rank=number, micro_batch=finding.suspect.micro_batch, grad_norm=score, share=share, **told)
            )
    return sorted(found, key=lambda token: -_size(token.grad_norm))


def _origin(result: Result, kind: str) -> Origin | None:
    """Where below the gate it begins: what is not finite, or the gradient's growth where tokens do not explain it."""
    for number, finding in result.findings:
        origin = finding.origin
        if origin is None or (origin.kind == "growth" and finding.verdict == "tokens"):
            continue
        return Origin(
            layer=origin.layer,
            row=origin.row,
            position=origin.position,
            value=origin.value,
            kind=origin.kind,
            rank=number,
            micro_batch=finding.suspect.micro_batch,
        )
    return None


def _candidates(result: Result) -> tuple[CandidateGroup, ...]:
    return tuple(
        CandidateGroup(
            rank=number, micro_batch=finding.suspect.micro_batch, num_units=len(group), units=tuple(group[:16])
        )
        for number, finding in result.findings
        for group in finding.groups
    )


def _layers(context: StepContext, parts: Mapping[str, Mapping[str, float]]) -> list[LayerReport]:
    """Every layer's norm against the median of its last ones."""
    view = context.store
    past_steps, rows = view.past()
    rows = rows[[number for number, step in enumerate(past_steps) if step != context.step]]
    usable = torch.where(torch.isfinite(rows) & (rows > 0), rows, torch.nan)
    baselines = torch.nanmedian(usable, 0).values.tolist() if len(rows) else []
    found = []
    for number, name in enumerate(view.layer_names):
        norm = float(view.norms[number])
        baseline = baselines[number] if baselines and math.isfinite(baselines[number]) else None
        found.append(
            LayerReport(
                name=name,
                norm=norm,
                baseline=baseline,
                ratio=None if baseline is None else norm / baseline,
                nonfinite=bool(view.nonfinite[number]),
                **parts.get(name, {}),
            )
        )
    return found
