"""The card of an incident: what it was, where, the proof, and the norms before it, in one picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from stabilizer.console import printable
from stabilizer.drawing import ACCENT, BLUE, GREEN, drawable, new_figure
from stabilizer.localize.incident import FoundToken, Incident
from stabilizer.localize.pictures import draw_history
from stabilizer.localize.rows import number
from stabilizer.localize.table import incident_advice, incident_title

__all__ = ["incident_card"]

_WIDTH, _HEIGHT = 10.0, 6.4
_COLUMNS, _CONTEXT = 124, 40
# Heights in parts of the upper half.
_LINE = 0.135


def incident_card(incident: Incident, norms: Sequence[float], *, steps: Sequence[int]) -> Any:
    """One picture of an incident.

    Args:
        incident: What was found.
        norms: Total gradient norms up to it.
        steps: Step of each norm.

    Returns:
        A matplotlib figure: what was found and where; below the norms before it, and with and without its cause.
    """
    figure = new_figure(_WIDTH, _HEIGHT)
    grid = figure.add_gridspec(2, 2, height_ratios=[1.0, 1.15], width_ratios=[1.7, 1.0])
    _write(figure.add_subplot(grid[0, :]), incident)
    history = figure.add_subplot(grid[1, 0])
    draw_history(history, norms, step=incident.step, threshold=incident.threshold, steps=steps)
    history.set_title("Before it: a quiet line and one peak is data, a rise before the peak is training", fontsize=9)
    _compare(figure.add_subplot(grid[1, 1]), incident)
    return figure


def _write(axes: Any, incident: Incident) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    _text(axes, 0.97, incident_title(incident), size=14, weight="bold", colour=ACCENT)
    height = 0.97 - 1.3 * _LINE
    for line in textwrap.wrap(incident.summary, _COLUMNS)[:2]:
        _text(axes, height, line, size=10)
        height -= _LINE
    token = incident.tokens[0] if incident.tokens else None
    for name, text in _places(incident, token):
        _text(axes, height, name, size=10, weight="bold")
        _text(axes, height, text, left=0.13, size=10)
        height -= _LINE
    if token is not None and token.context is not None:
        _text(axes, height, "context", size=10, weight="bold")
        _write_context(axes, height, token)
        height -= _LINE
    for line in textwrap.wrap(f"next: {incident_advice(incident)}", _COLUMNS)[:2]:
        _text(axes, height, line, size=9, colour="0.3")
        height -= _LINE


def _places(incident: Incident, token: FoundToken | None) -> list[tuple[str, str]]:
    found = []
    if token is not None:
        where = f"rank {token.rank}, micro-batch {token.micro_batch}, row {token.row}"
        where += "" if token.position is None else f", position {token.position}"
        found.append(("where", f"step {incident.step}, {where}"))
        text = "" if token.text is None else f"'{printable(token.text, limit=40)}'"
        text += "" if token.token_id is None else f"  id {token.token_id}"
        share = "" if math.isnan(token.share) else f"  {100 * token.share:.1f} % of its micro-batch's squares"
        more = f"  (the first of {len(incident.tokens)})" if len(incident.tokens) > 1 else ""
        found.append(("token", f"{text}{share}{more}".strip()))
    elif incident.origin is not None:
        origin = incident.origin
        row = "" if origin.row is None else f", row {origin.row}"
        position = "" if origin.position is None else f", position {origin.position}"
        where = f"rank {origin.rank}, micro-batch {origin.micro_batch}{row}{position}"
        found.append(("where", f"step {incident.step}, {where}, in {origin.layer}"))
    else:
        found.append(("where", f"step {incident.step}; no token was found"))
    return found


def _write_context(axes: Any, height: float, found: FoundToken) -> None:
    """The text around the token, the token in colour and in a box."""
    before, token, after = found.pieces
    pieces = [
        (f"...{printable(before, limit=2000)[-_CONTEXT:]}", {"color": "0.25"}),
        (printable(token, limit=_CONTEXT), {"color": ACCENT, "weight": "bold"}),
        (f"{printable(after, limit=2000)[:_CONTEXT]}...", {"color": "0.25"}),
    ]
    last: Any = None
    for text, options in pieces:
        place: dict[str, Any] = {"xy": (0.13, height), "xycoords": "data", "va": "top"}
        if last is not None:
            place = {"xy": (1, 0), "xycoords": last, "va": "bottom"}
        shown = drawable(text, family="monospace") or " "
        last = axes.annotate(shown, family="monospace", fontsize=10, parse_math=False, **place, **options)


def _text(
    axes: Any, height: float, text: str, *, size: int, left: float = 0.0, weight: str = "normal", colour: str = "0"
) -> None:
    shown = drawable(printable(text))
    axes.text(left, height, shown, fontsize=size, fontweight=weight, color=colour, va="top", parse_math=False)


def _compare(axes: Any, incident: Incident) -> None:
    """The norm with and without what was found, beside the threshold."""
    bound = " (at most)" if incident.counterfactual_is_bound else ""
    bars = [("the step", incident.observed_norm, ACCENT), ("threshold", incident.threshold, "0.45")]
    if incident.counterfactual_norm is not None:
        bars.append((f"without\nthe tokens{bound}", incident.counterfactual_norm, GREEN))
    usual = [value for _, value, _ in bars if math.isfinite(value) and value > 0]
    smallest, largest = (min(usual), max(usual)) if usual else (1.0, 1.0)
    for place, (_, value, colour) in enumerate(bars):
        is_usual = value in usual
        axes.barh(place, value if is_usual else largest, color=colour if is_usual else "0.85", height=0.6)
        axes.text(value if is_usual else largest, place, f" {number(value)}", va="center", fontsize=10)
    axes.set_xscale("log")  # a bar has no natural foot there
    axes.set_xlim(smallest / 3, largest * 8)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel("gradient norm (L2, log scale)")
    proved = incident.counterfactual_norm is not None and incident.counterfactual_norm < incident.threshold
    title = "The proof: without them it is under the threshold" if proved else "The norm and its threshold"
    axes.set_title(title, fontsize=9, color=BLUE if proved else "0")
