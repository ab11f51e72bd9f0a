"""Preflight: a table of facts about a run that rank 0 prints when training starts. It stops nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from stabilizer.callbacks.facts import Fact, Setting, facts
from stabilizer.console import make_console
from stabilizer.errors import logger
from stabilizer.reduction import rank

__all__ = ["Fact", "Setting", "facts", "preflight", "show"]

_shown: list[tuple[str, list[Fact]]] = []


def preflight(setting: Setting | Callable[[], Setting]) -> None:
    """Print the table on rank 0, unless `STABILIZER_PREFLIGHT=0`; never raises and starts no collective.

    Args:
        setting: What the host knows; a function that finds out is called on rank 0 only, and may raise.
    """
    if rank() != 0 or os.environ.get("STABILIZER_PREFLIGHT", "").strip().lower() in ("0", "false", "no"):
        return
    try:
        found = setting() if callable(setting) else setting
        rows = facts(found)
        # A loop that attaches in every epoch, or a Trainer that fits again, says nothing new.
        if (found.host, rows) not in _shown:
            _shown.append((found.host, rows))
            show(rows, title=f"Stabilizer preflight ({found.host})")
    except Exception:
        logger.exception("the preflight table failed; training goes on without it")


def show(facts: Sequence[Fact], *, title: str = "Stabilizer preflight") -> None:
    """Print facts as one table on stdout, without colour where that is no terminal.

    Args:
        facts: The rows.
        title: Over the table.
    """
    from rich.table import Table
    from rich.text import Text

    is_marked = any(fact.advice for fact in facts)
    caption = "! practice advises otherwise; " if is_marked else ""
    table = Table(title=Text(title), caption=Text(f"{caption}off with STABILIZER_PREFLIGHT=0"), show_header=False)
    table.title_justify = table.caption_justify = "left"
    table.add_column(width=1)
    table.add_column(overflow="fold", max_width=26)
    table.add_column(overflow="fold")
    for fact in facts:
        value = Text(fact.value)
        if fact.advice:
            value.append(f"\n-> {fact.advice}", style="yellow")
        # Text, never markup: a callback may be called GradNormCallback[vision].
        table.add_row(Text("!" if fact.advice else "", style="bold yellow"), Text(fact.name), value)
    make_console().print(table)
