"""What the package says when something is wrong."""

from __future__ import annotations

import logging
import warnings

__all__ = ["StabilizerWarning", "logger", "warn"]

logger = logging.getLogger("stabilizer")


class StabilizerWarning(UserWarning):
    """A condition that training survives and a person should know."""


def warn(message: str) -> None:
    """Warn on the process that speaks for all (rank 0).

    Args:
        message: The condition, the value and the way out.
    """
    from stabilizer.reduction import rank

    if rank() == 0:
        # The caller's line says nothing to a user: every warning names what it is about.
        warnings.warn(message, StabilizerWarning, stacklevel=3)
