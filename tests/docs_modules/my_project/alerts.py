"""Alerts of the reader's own."""

from __future__ import annotations

from typing import Any


def page(event: Any) -> None:
    """Wakes nobody."""
