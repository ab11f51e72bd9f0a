"""The tables of an incident: tokens, candidates, micro-batches and layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from stabilizer.localize.incident import (
    MARKS,
    CandidateGroup,
    FoundToken,
    Incident,
    LayerReport,
    MicroBatchReport,
    OtherMicroBatches,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["MAX_ROWS", "TEXTS", "Section", "by_ratio", "incident_sections", "incident_tables", "number", "short_token"]

_T = TypeVar("_T")
#: Heading, and the cell of a row; a column without any cell is left out.
_Column: TypeAlias = tuple[str, Callable[[_T], "str | None"]]

#: Of a table in a file.
MAX_ROWS = 20
#: Columns that are no numbers.
TEXTS = ("text", "context", "layer", "largest: row:position")
# Characters of a token, and of what stands on each side of it.
_TOKEN, _AROUND = 120, 60


def number(value: float | None) -> str:
    """A number of any size in few characters; `None` as nothing.

    Args:
        value: The number.

    Example:
        >>> number(1234567.0), number(0.51234), number(float("nan")), number(None)
        ('1.235e+06', '0.5123', 'nan', '')
    """
    return "" if value is None else f"{value:.4g}"


class Section(NamedTuple):
    """A table of an incident, whatever it is drawn with.

    Attributes:
        title: What it holds.
        headings: Of the columns.
        rows: Texts of the cells.
        captions: What else there is to say of it.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    captions: list[str]


def incident_sections(incident: Incident, *, max_rows: int = MAX_ROWS) -> list[Section]:
    """Tables of what an incident has.

    Args:
        incident: What was found.
        max_rows: Of each table; what is left out is counted.
    """
    tokens = [short_token(token) for token in incident.tokens]
    with_context = [token for token in tokens if token.context is not None]
    layers = sorted(incident.layers, key=by_ratio)
    place: list[_Column[FoundToken]] = [*_PLACE, ("context", lambda token: token.context)]
    near, others = _suspects_first(incident.micro_batches), _others(incident.other_micro_batches)
    found = [
        _section(f"Tokens ({len(incident.tokens)})", tokens, _TOKENS, max_rows=max_rows),
        _section("Their context", with_context, place, max_rows=max_rows),
        _section("Undecided", incident.candidates, _CANDIDATES, max_rows=max_rows),
        _section("Local norms of the micro-batches", near, _MICRO_BATCHES, max_rows=max_rows, beside=others),
        _section("Layers", layers, _LAYERS, max_rows=max_rows),
    ]
    return [section for section in found if section.rows]


def short_token(token: FoundToken) -> FoundToken:
    """A token whose texts are not long, with what stands next to it; a second time it stays as it is.

    Args:
        token: As it was found.

    Example:
        >>> short_token(FoundToken(rank=0, micro_batch=0, row=0, text="b", context="a" * 99 + ">>>b<<<c")).context[:6]
        '...aaa'
    """
    before, text, after = token.pieces
    if token.text is not None and len(token.text) > _TOKEN:
        token = dataclasses.replace(token, text=f"{token.text[:_TOKEN]}...")
    if token.context is None or MARKS[0] not in token.context:
        return token
    before = before if len(before) <= _AROUND else f"...{before[-_AROUND:]}"
    text = text if len(text) <= _TOKEN else f"{text[:_TOKEN]}..."
    after = after if len(after) <= _AROUND else f"{after[:_AROUND]}..."
    return dataclasses.replace(token, context=f"{before}{MARKS[0]}{text}{MARKS[1]}{after}")


def incident_tables(incident: Incident, *, max_rows: int = MAX_ROWS) -> list[Table]:
    """The tables for a console.

    Args:
        incident: What was found.
        max_rows: Of each table; what is left out is counted.
    """
    return [_table(section) for section in incident_sections(incident, max_rows=max_rows)]


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


def _section(
    title: str, rows: Sequence[Any], columns: Sequence[_Column[Any]], *, max_rows: int, beside: str = ""
) -> Section:
    shown = rows[:max_rows]
    cells = [(heading, [cell(row) for row in shown]) for heading, cell in columns]
    used = [(heading, column) for heading, column in cells if any(column)]
    lines = [[column[row] or "" for _, column in used] for row in range(len(shown))]
    captions = [f"and {len(rows) - len(shown)} more in the JSON"] if len(rows) > len(shown) else []
    return Section(title, [heading for heading, _ in used], lines, captions + ([beside] if beside else []))


def _table(section: Section) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(section.title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in section.headings:
        is_text = heading in TEXTS
        table.add_column(
            heading,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
            min_width=6 if is_text else None,
        )
    for row in section.rows:
        # Text, never markup: a token may be "[bold]".
        table.add_row(*map(Text, row))
    if section.captions:
        table.caption = Text("\n".join(section.captions))
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
