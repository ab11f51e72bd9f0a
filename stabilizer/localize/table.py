"""An incident as a table that a person reads, in 80 columns."""

from __future__ import annotations

import dataclasses
import io
import math
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stabilizer.localize.incident import Incident, Origin
from stabilizer.localize.rows import incident_tables, number

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["TYPE_NAMES", "incident_text", "print_incident", "printable"]

TYPE_NAMES = {
    "A.1": "importance ratio of a token",
    "A.2": "importance ratio of a sequence",
    "B": "some layers only",
    "N": "not finite",
    "T": "transient",
    "X": "outside the tokens",
    "D": "data",
}

_WIDTH, _MAX_WIDTH, _INDENT = 80, 120, 16


def print_incident(incident: Incident, console: Console | None = None) -> None:
    """Print an incident, without colour where the output is no terminal.

    Args:
        incident: What was found.
        console: Where; default stdout.
    """
    if console is None:
        from rich.console import Console

        # Variables such as FORCE_COLOR would put colour codes into a file.
        plain: dict[str, Any] = {} if sys.stdout.isatty() else {"force_terminal": False, "no_color": True}
        console = Console(file=sys.stdout, highlight=False, **plain)
    _print(incident, console)


def incident_text(incident: Incident, *, width: int = _WIDTH) -> str:
    """What `print_incident` prints, as text without colour.

    Args:
        incident: What was found.
        width: In columns.
    """
    from rich.console import Console

    stream = io.StringIO()
    _print(incident, Console(file=stream, width=width, force_terminal=False, no_color=True, highlight=False))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def printable(text: str, *, limit: int = 2000) -> str:
    r"""Text that changes nothing on a terminal: control characters and line breaks as escapes, and not too long.

    Args:
        text: Any.
        limit: Largest number of characters.

    Example:
        >>> printable("a\n\x1b[31mb")
        'a\\n\\x1b[31mb'
    """
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def _print(incident: Incident, console: Console) -> None:
    from rich.text import Text

    # Whatever encoding the output has, a token's text ends nothing.
    incident = _with_texts(
        incident, lambda text: printable(text).encode(console.encoding, "backslashreplace").decode(console.encoding)
    )
    width = min(console.width, _MAX_WIDTH)
    optimizer = f", optimizer {incident.optimizer_index}" if incident.optimizer_index else ""
    title = f"Gradient spike at step {incident.step}{optimizer}: {incident.type}, {TYPE_NAMES[incident.type]}"
    console.print(Text(title, style="bold"), width=width)
    lines = [("", incident.summary)] if incident.summary else []
    for name, value in lines + _lines(incident):
        indent = f"  {name:<{_INDENT - 2}}" if name else ""
        wrapped = textwrap.fill(value, width, initial_indent=indent, subsequent_indent=" " * len(indent))
        console.print(Text(wrapped, no_wrap=True, overflow="fold"), width=width)
    for table in incident_tables(incident):
        console.print()
        console.print(table, width=width)


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


def _lines(incident: Incident) -> list[tuple[str, str]]:
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
    if incident.error is not None:
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
