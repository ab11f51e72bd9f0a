"""Incidents for tests, with a value in every field."""

from __future__ import annotations

import dataclasses
from typing import Any

from stabilizer.localize.incident import (
    CandidateGroup,
    FoundToken,
    Incident,
    LayerReport,
    MicroBatchReport,
    Origin,
    OtherMicroBatches,
)

TOKEN = FoundToken(
    rank=1,
    micro_batch=2,
    row=3,
    position=77,
    token_id=42,
    text=" sat",
    grad_norm=812.0,
    share=0.97,
    log_ratio=0.25,
    advantage=-1.5,
    document=2,
    document_position=5,
    context="the cat>>> sat<<< on",
    sequence_log_ratio=0.5,
)

INCIDENT = Incident(
    step=412,
    type="D",
    observed_norm=812.4,
    threshold=27.9,
    threshold_of="total (AdaptiveClipThreshold)",
    optimizer_index=1,
    summary="What, where, proof.",
    counterfactual_norm=4.7,
    counterfactual_is_bound=True,
    num_passes=3,
    num_forwards=1,
    num_rebuild_passes=4,
    seconds=0.5,
    reproducible=True,
    replayed_norm=1625.2,
    replayed_rank=1,
    replayed_micro_batch=2,
    local_norm=1624.8,
    is_complete=False,
    action="drop_tokens",
    ratio="observed",
    layers=(LayerReport(name="layers.0", norm=80.0, baseline=2.0, ratio=40.0, attention_norm=1.0, mlp_norm=2.0),),
    micro_batches=(MicroBatchReport(rank=1, micro_batch=2, norm=1624.8, baseline=5.0, is_suspect=True),),
    other_micro_batches=OtherMicroBatches(num=79968, median_norm=1.25, largest_norm=3.5, num_suspects=4),
    tokens=(TOKEN, dataclasses.replace(TOKEN, position=None, text=None)),
    origin=Origin(layer="layers.0", row=3, position=77, value=1e4, kind="growth", rank=1, micro_batch=2),
    candidates=(CandidateGroup(rank=0, micro_batch=1, num_units=9, units=((0, 1), (2, None))),),
    error="rank 1 failed",
    notes=("the LM head is outside",),
)


def make_token(**changes: Any) -> FoundToken:
    return dataclasses.replace(TOKEN, **changes)


def make_incident(**changes: Any) -> Incident:
    return dataclasses.replace(INCIDENT, **changes)


def make_layers(*ratios: float | None) -> list[LayerReport]:
    """Layers with these norms, of which 1 is usual."""
    return [
        LayerReport(name=str(number), norm=ratio or 1.0, baseline=1.0, ratio=ratio)
        for number, ratio in enumerate(ratios)
    ]
