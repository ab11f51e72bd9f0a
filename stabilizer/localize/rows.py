"""The tables of an incident: tokens, candidates, micro-batches and layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from stabilizer.localize.incident import (
    CandidateGroup,
    FoundToken,
    Incident,
    LayerReport,
    MicroBatchReport,
    OtherMicroBatches,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["by_ratio", "incident_tables", "number"]

_T = TypeVar("_T")
#: Heading, and the cell of a row; a column without any cell is left out.
_Column: TypeAlias = tuple[str, Callable[[_T], "str | None"]]

_MAX_ROWS = 20
_TEXTS = ("text", "context", "layer", "largest: row:position")


def number(value: float | None) -> str:
    """A number of any size in few characters; `None` as nothing.

    Args:
        value: The number.

    Example:
        >>> number(1234567.0), number(0.51234), number(float("nan")), number(None)
        ('1.235e+06', '0.5123', 'nan', '')
    """
    return "" if value is None else f"{value:.4g}"


def incident_tables(incident: Incident) -> list[Table]:
    """Tables of what an incident has.

    Args:
        incident: What was found.
    """
    with_context = [token for token in incident.tokens if token.context is not None]
    layers = sorted(incident.layers, key=by_ratio)
    tables = [
        _table(f"Tokens ({len(incident.tokens)})", incident.tokens, _TOKENS),
        _table("Their context", with_context, [*_PLACE, ("context", lambda token: token.context)]),
        _table("Undecided", incident.candidates, _CANDIDATES),
        _table(
            "Local norms of the micro-batches",
            _suspects_first(incident.micro_batches),
            _MICRO_BATCHES,
            beside=_others(incident.other_micro_batches),
        ),
        _table("Layers", layers, _LAYERS),
    ]
    return [table for table in tables if table is not None]


def by_ratio(layer: LayerReport) -> float:
    """Sorts layers: not finite, then the largest ratio, then those without a baseline.

    Args:
        layer: The layer.
    """
    if layer.nonfinite or not math.isfinite(layer.norm):
        return -math.inf
    return math.inf if layer.ratio is None or math.isnan(layer.ratio) else -layer.ratio


def _suspects_first(found: Sequence[MicroBatchReport]) -> list[MicroBatchReport]:
    return sorted(found, key=lambda one: not one.is_suspect)


def _others(others: OtherMicroBatches | None) -> str:
    if others is None:
        return ""
    suspects = f", {others.num_suspects} of them suspicious" if others.num_suspects else ""
    return f"{others.num} others{suspects}: median {number(others.median_norm)}, largest {number(others.largest_norm)}"


def _table(title: str, rows: Sequence[Any], columns: Sequence[_Column[Any]], *, beside: str = "") -> Table | None:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return None
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    shown = rows[:_MAX_ROWS]
    cells = [(heading, [cell(row) for row in shown]) for heading, cell in columns]
    used = [(heading, column) for heading, column in cells if any(column)]
    for heading, _ in used:
        is_text = heading in _TEXTS
        table.add_column(
            heading,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
            min_width=6 if is_text else None,
        )
    for row in range(len(shown)):
        # Text, never markup: a token may be "[bold]".
        table.add_row(*(Text(column[row] or "") for _, column in used))
    captions = [f"and {len(rows) - len(shown)} more in the JSON"] if len(rows) > len(shown) else []
    if captions or beside:
        table.caption = Text("\n".join([*captions, *([beside] if beside else [])]))
        table.caption_justify = "left"
    return table


def _places(group: CandidateGroup) -> str:
    found = [f"{row}" if position is None else f"{row}:{position}" for row, position in group.units[:8]]
    return ", ".join(found) + (", ..." if group.num_units > len(found) else "")


def _document(token: FoundToken) -> str | None:
    return None if token.document is None else f"{token.document}:{token.document_position}"


_PLACE: list[_Column[FoundToken]] = [
    ("rank", lambda token: str(token.rank)),
    ("micro", lambda token: str(token.micro_batch)),
    ("row", lambda token: str(token.row)),
    ("pos", lambda token: None if token.position is None else str(token.position)),
]
_TOKENS: list[_Column[FoundToken]] = [
    *_PLACE,
    ("doc:pos", _document),
    ("id", lambda token: None if token.token_id is None else str(token.token_id)),
    ("text", lambda token: None if token.text is None else f"'{token.text}'"),
    ("norm", lambda token: f"{token.grad_norm:.3g}"),
    ("share", lambda token: None if math.isnan(token.share) else f"{100 * token.share:.1f} %"),
    ("log-ratio", lambda token: None if token.log_ratio is None else f"{token.log_ratio:.3g}"),
    ("advantage", lambda token: None if token.advantage is None else f"{token.advantage:.3g}"),
]
_CANDIDATES: list[_Column[CandidateGroup]] = [
    ("rank", lambda group: str(group.rank)),
    ("micro", lambda group: str(group.micro_batch)),
    ("tokens", lambda group: str(group.num_units)),
    ("largest: row:position", _places),
]
_MICRO_BATCHES: list[_Column[MicroBatchReport]] = [
    ("", lambda one: "!" if one.is_suspect else None),
    ("rank", lambda one: str(one.rank)),
    ("micro", lambda one: str(one.micro_batch)),
    ("norm", lambda one: number(one.norm)),
    ("usual", lambda one: number(one.baseline)),
]
_LAYERS: list[_Column[LayerReport]] = [
    ("layer", lambda layer: layer.name),
    ("norm", lambda layer: number(layer.norm)),
    ("usual", lambda layer: number(layer.baseline)),
    ("ratio", lambda layer: None if layer.ratio is None else f"{layer.ratio:.3g}"),
    ("attention", lambda layer: number(layer.attention_norm)),
    ("MLP", lambda layer: number(layer.mlp_norm)),
    ("", lambda layer: "not finite" if layer.nonfinite else None),
]
