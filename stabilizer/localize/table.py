"""An incident as a table that a person reads, in 80 columns."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stabilizer.console import MAX_WIDTH, WIDTH, make_console, print_block, printable
from stabilizer.localize.incident import Incident, Origin
from stabilizer.localize.rows import MAX_ROWS, incident_tables, number, short_token

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["TYPE_NAMES", "incident_advice", "incident_lines", "incident_text", "incident_title", "print_incident"]

TYPE_NAMES = {
    "A.1": "importance ratio of a token",
    "A.2": "importance ratio of a sequence",
    "B": "some layers only",
    "N": "not finite",
    "T": "transient",
    "X": "outside the tokens",
    "D": "data",
}

# What to do next, by type.
_ADVICE = {
    "A.1": "truncate or mask such ratios (rollout.TokenClip), and compare training with the rollout engine",
    "A.2": "truncate or mask such sequences (rollout.SeqClip), and compare training with the rollout engine",
    "B": "look at this layer: its initialization, its scale, its learning rate; LayerClipCallback bounds it alone",
    "N": "look at the operation there: its precision, its epsilon, what it divides by or takes the logarithm of",
    "T": "another run of the step came out differently: look at the machine, and at code that draws at random",
    "X": "look at what adds to the loss without a token: auxiliary losses, penalties, weights that are tied",
    "D": "look at these tokens in their document; on_found='drop_tokens' or 'skip_step' leaves such out",
}


def incident_advice(incident: Incident) -> str:
    """What to do next.

    Args:
        incident: What was found.

    Example:
        >>> incident_advice(Incident(step=7, type="D", observed_norm=9.0, threshold=3.0, error="no batch"))
        'mend what the error says: until then no token can be found'
    """
    if incident.error is not None and not incident.tokens:
        return "mend what the error says: until then no token can be found"
    if incident.type == "D" and not incident.tokens:
        return "look at the batch of this step: no single token was found in it"
    return _ADVICE[incident.type]


def print_incident(
    incident: Incident,
    console: Console | None = None,
    *,
    max_rows: int = MAX_ROWS,
    more: Sequence[tuple[str, str]] = (),
) -> None:
    """Print an incident, without colour where the output is no terminal.

    Args:
        incident: What was found.
        console: Where; default stdout.
        max_rows: Of each table.
        more: Further rows, as name and text.
    """
    _print(incident, make_console() if console is None else console, max_rows=max_rows, more=more)


def incident_text(incident: Incident, *, width: int = WIDTH) -> str:
    """What `print_incident` prints, as text without colour.

    Args:
        incident: What was found.
        width: In columns.
    """
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=False, no_color=True, highlight=False)
    _print(incident, console, max_rows=MAX_ROWS)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _print(incident: Incident, console: Console, *, max_rows: int, more: Sequence[tuple[str, str]] = ()) -> None:
    # Whatever encoding the output has, a token's text ends nothing; it is cut first, so that its mark stays.
    incident = dataclasses.replace(incident, tokens=tuple(short_token(token) for token in incident.tokens))
    incident = _with_texts(
        incident, lambda text: printable(text).encode(console.encoding, "backslashreplace").decode(console.encoding)
    )
    lines = [("", incident.summary)] if incident.summary else []
    print_block(console, incident_title(incident), [*lines, *incident_lines(incident), *more])
    for table in incident_tables(incident, max_rows=max_rows):
        console.print()
        console.print(table, width=min(console.width, MAX_WIDTH))


def incident_title(incident: Incident) -> str:
    """What, when, and of which type.

    Args:
        incident: It.
    """
    optimizer = f", optimizer {incident.optimizer_index}" if incident.optimizer_index else ""
    return f"Gradient spike at step {incident.step}{optimizer}: {incident.type}, {TYPE_NAMES[incident.type]}"


def _with_texts(value: Any, function: Callable[[str], str]) -> Any:
    """The same dataclass with all texts in it changed."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, tuple):
        return tuple(_with_texts(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return dataclasses.replace(value, **{f.name: _with_texts(getattr(value, f.name), function) for f in fields})
    return value


def incident_lines(incident: Incident) -> list[tuple[str, str]]:
    """What there is to say of an incident beside its tables, as name and text.

    Args:
        incident: It.
    """
    times = incident.observed_norm / incident.threshold if incident.threshold > 0 else math.nan
    over = f", {times:.3g} times the threshold" if math.isfinite(times) else ""
    lines = [
        ("norm", number(incident.observed_norm) + over),
        ("threshold", f"{number(incident.threshold)}, of {incident.threshold_of}"),
    ]
    if incident.counterfactual_norm is not None:
        bound = "at most " if incident.counterfactual_is_bound else ""
        lines.append(("without them", f"{bound}{number(incident.counterfactual_norm)}, the norm of all other tokens"))
    if incident.reproducible is not None:
        lines.append(("reproducible", ("yes" if incident.reproducible else "no") + _replay(incident)))
    if not incident.is_complete:
        what = "budget" if incident.error is None else "search"
        lines.append(("incomplete", f"the {what} ended before the cause was known"))
    if incident.origin is not None:
        lines.append(("begins in", _origin(incident.origin)))
    cost = f"{incident.num_passes} backward and {incident.num_forwards} forward passes, {incident.seconds:.2f} s"
    if incident.num_rebuild_passes:
        cost += f"; {incident.num_rebuild_passes} passes to rebuild the gradient"
    lines += [("cost", cost), ("action", incident.action), ("ratios", incident.ratio)]
    if incident.error is not None and incident.error not in incident.summary:
        lines.append(("error", incident.error))
    return lines + [("note", note) for note in incident.notes]


def _replay(incident: Incident) -> str:
    """Local norms, which are not to be taken for the step's above them."""
    if incident.replayed_norm is None:
        return ""
    if incident.local_norm is None:
        return f": a micro-batch's local norm is {number(incident.replayed_norm)} in a replay"
    norms = f"local norm {number(incident.local_norm)}, replayed {number(incident.replayed_norm)}"
    return f": {norms} (rank {incident.replayed_rank}, micro-batch {incident.replayed_micro_batch})"


def _origin(origin: Origin) -> str:
    what = f"{origin.kind}, {origin.value:.3g}" if origin.kind else f"{origin.value:.3g}"
    places = [("rank", origin.rank), ("micro-batch", origin.micro_batch)]
    places += [
        (name, value) for name, value in (("row", origin.row), ("position", origin.position)) if value is not None
    ]
    return f"{origin.layer} ({what}): {', '.join(f'{name} {value}' for name, value in places)}"
