"""Incident: what is known of one spike, and its JSON, which any parser reads."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Literal, TypeAlias

from stabilizer.localize.plain_json import from_plain, to_plain

__all__ = [
    "MARKS",
    "SCHEMA",
    "Action",
    "CandidateGroup",
    "FoundToken",
    "Incident",
    "IncidentType",
    "LayerReport",
    "MicroBatchReport",
    "Origin",
    "OtherMicroBatches",
    "Ratio",
    "Unit",
]

#: Version of the JSON; it rises when a reader of the old one would read something wrong.
SCHEMA = 1

IncidentType: TypeAlias = Literal["A.1", "A.2", "B", "N", "T", "X", "D"]
Action: TypeAlias = Literal["report", "drop_tokens", "skip_step"]
Ratio: TypeAlias = Literal["observed", "not observable"]
#: Before and after the token in its context.
MARKS = (">>>", "<<<")
#: Row, and position in it; no position where units are samples.
Unit: TypeAlias = tuple[int, int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundToken:
    """A token, or a sample, that is behind a spike.

    Attributes:
        rank: Process that had it.
        micro_batch: Index of its micro-batch in the step.
        row: Index of its row in the tensor at the gate.
        position: In the row; `None` for a sample.
        token_id: The token that the loss at this position is about.
        text: That token decoded.
        grad_norm: Norm of the gradient that arrives at the gate from this unit alone.
        share: Its square's part of the sum of such squares over the micro-batch's units, in [0, 1].
        log_ratio: Logarithm of its importance ratio.
        advantage: Of the token, or of its row.
        document: In a packed row, which document, from 0.
        document_position: In that document, from 0.
        context: Text around it, with the token marked.
        sequence_log_ratio: Sum of the log-ratios of its sequence.
    """

    rank: int
    micro_batch: int
    row: int
    position: int | None = None
    token_id: int | None = None
    text: str | None = None
    grad_norm: float = math.nan
    share: float = math.nan
    log_ratio: float | None = None
    advantage: float | None = None
    document: int | None = None
    document_position: int | None = None
    context: str | None = None
    sequence_log_ratio: float | None = None

    @property
    def pieces(self) -> tuple[str, str, str]:
        """The context: before the token, the token, and after it. Text may hold the marks itself, as doctests do."""
        context = self.context or ""
        marked = f"{MARKS[0]}{self.text or ''}{MARKS[1]}"
        if marked in context:
            before, _, after = context.partition(marked)
            return before, self.text or "", after
        before, _, rest = context.partition(MARKS[0])
        token, _, after = rest.partition(MARKS[1])
        return before, token, after


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerReport:
    """A layer's gradient norm at the spike.

    Attributes:
        name: Of the layer.
        norm: What was measured.
        baseline: What is usual.
        ratio: `norm / baseline`.
        nonfinite: Whether any element of the gradient is not finite.
        attention_norm: Of its attention part, where it has one.
        mlp_norm: Of its MLP part, where it has one.
    """

    name: str
    norm: float
    baseline: float | None = None
    ratio: float | None = None
    nonfinite: bool = False
    attention_norm: float | None = None
    mlp_norm: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchReport:
    """One rank's gradient norm of one micro-batch, before any reduction.

    Attributes:
        rank: The process.
        micro_batch: Index in the step.
        norm: Local norm.
        baseline: What is usual.
        is_suspect: Whether it was searched.
    """

    rank: int
    micro_batch: int
    norm: float
    baseline: float | None = None
    is_suspect: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherMicroBatches:
    """Local norms that are too many to be listed.

    Attributes:
        num: How many they are.
        median_norm: Of them.
        largest_norm: Of them.
        num_suspects: How many of them were suspicious too.
    """

    num: int
    median_norm: float
    largest_norm: float
    num_suspects: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where below the gate a spike or a non-finite value begins.

    Attributes:
        layer: Name of the block.
        row: Row of the micro-batch.
        position: In the row.
        value: Factor by which the gradient grows there, or the value that is not finite.
        kind: What was found, such as "growth" or "nonfinite".
        rank: Process that had it.
        micro_batch: Index of the micro-batch in the step.
    """

    layer: str
    row: int | None = None
    position: int | None = None
    value: float = math.nan
    kind: str = ""
    rank: int = 0
    micro_batch: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateGroup:
    """Units among which the cause is, when the budget ended before it was known.

    Attributes:
        rank: Process that has them.
        micro_batch: Index of the micro-batch in the step.
        num_units: How many there are.
        units: Row and position of the first ones, those with the largest gradients.
    """

    rank: int
    micro_batch: int
    num_units: int
    units: tuple[Unit, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Incident:
    """What is known of one spike.

    Attributes:
        step: Optimizer step, from 0.
        type: "A.1" importance ratio of a token, "A.2" of a sequence, "B" some layers only, "N" not finite, "T"
            transient, "X" outside the tokens, "D" data otherwise.
        observed_norm: Gradient norm at the spike.
        threshold: What it was over, times the trigger's ratio.
        threshold_of: Whose: "total (AdaptiveClipThreshold)", "layers.3 (robust_log)".
        optimizer_index: Position of the optimizer.
        summary: One sentence: what, where and the proof.
        counterfactual_norm: Norm with the found tokens' gradient left out.
        counterfactual_is_bound: Whether that is an upper bound instead.
        num_passes: Backward passes of one micro-batch that the search ran.
        num_forwards: Forward passes that it ran.
        num_rebuild_passes: Passes that rebuilt the gradient without the found tokens.
        seconds: Time that all this took.
        reproducible: Whether a replay gave the observed norm; `None` if none was tried.
        replayed_norm: Local norm of the replay of one micro-batch (the worst one), not of the step.
        replayed_rank: Whose micro-batch that is.
        replayed_micro_batch: Its index in the step.
        local_norm: What its local norm was in the step: `replayed_norm` is to be the same.
        is_complete: False if the budget, or an error, ended the search before the cause was known.
        action: What was done.
        ratio: Whether importance ratios could be seen.
        layers: Norm of every layer.
        micro_batches: Local norms of all ranks; of very many the suspicious ones and the largest others.
        other_micro_batches: What there is beside those; `None` if all are listed.
        tokens: The cause, largest gradient first.
        origin: Where below the gate it begins.
        candidates: What is left of the search if it is not complete.
        error: What went wrong in the search.
        notes: What else a reader should know.
        schema: Version of the JSON.

    Example:
        >>> incident = Incident(step=7, type="D", observed_norm=float("inf"), threshold=3.0)
        >>> '"observed_norm": "inf"' in incident.to_json()
        True
        >>> Incident.from_json(incident.to_json()) == incident
        True
    """

    step: int
    type: IncidentType
    observed_norm: float
    threshold: float
    threshold_of: str = "total"
    optimizer_index: int = 0
    summary: str = ""
    counterfactual_norm: float | None = None
    counterfactual_is_bound: bool = False
    num_passes: int = 0
    num_forwards: int = 0
    num_rebuild_passes: int = 0
    seconds: float = 0.0
    reproducible: bool | None = None
    replayed_norm: float | None = None
    replayed_rank: int | None = None
    replayed_micro_batch: int | None = None
    local_norm: float | None = None
    is_complete: bool = True
    action: Action = "report"
    ratio: Ratio = "not observable"
    layers: tuple[LayerReport, ...] = ()
    micro_batches: tuple[MicroBatchReport, ...] = ()
    other_micro_batches: OtherMicroBatches | None = None
    tokens: tuple[FoundToken, ...] = ()
    origin: Origin | None = None
    candidates: tuple[CandidateGroup, ...] = ()
    error: str | None = None
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA

    def to_json(self, *, indent: int | None = 2) -> str:
        """Write as JSON; numbers that are not finite, which JSON does not have, as "nan", "inf" and "-inf".

        Args:
            indent: Spaces a level; `None` for one line.
        """
        fields = to_plain(self)
        return json.dumps({"schema": self.schema, **fields}, indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Incident:
        """Read what `to_json` has written; keys that are not known are left out.

        Args:
            text: The JSON.

        Raises:
            ValueError: If it is no JSON, has another schema, or a value is missing or of another type.
        """
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"an incident: no JSON ({error})") from None
        schema = found.get("schema") if isinstance(found, dict) else None
        if schema != SCHEMA or isinstance(schema, bool):
            raise ValueError(
                f"an incident: schema={schema!r}, and this version reads {SCHEMA}; read it with the version of "
                "torch-stabilizer that wrote it"
            )
        return from_plain(cls, found, path="incident")
