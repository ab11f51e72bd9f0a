"""What the package says when something is wrong."""

from __future__ import annotations

import logging
import warnings

__all__ = ["StabilizerWarning", "TrainingStoppedError", "logger", "warn"]

logger = logging.getLogger("stabilizer")


class StabilizerWarning(UserWarning):
    """A condition that training survives and a person should know."""


class TrainingStoppedError(RuntimeError):
    """A callback was told to end the run in such a case (`on_nonfinite="raise"`, too many skipped steps).

    Raised on every rank at the same step; before the update, or after a step that was skipped.
    """


def warn(message: str | StabilizerWarning) -> None:
    """Warn on the process that speaks for all (rank 0).

    Args:
        message: The condition, the value and the way out; or a warning of ours that says them.
    """
    from stabilizer.notices import shown_as_ours
    from stabilizer.reduction import rank, world_size

    if rank() != 0:
        return
    try:
        # The caller's line says nothing to a user: every warning names what it is about.
        with shown_as_ours():
            if isinstance(message, StabilizerWarning):
                # With no registry: what a run tells, the next one in the same process tells again.
                warnings.warn_explicit(message, type(message), __file__, 1, module="stabilizer")
            else:
                warnings.warn(message, StabilizerWarning, stacklevel=3)
    except StabilizerWarning:
        if world_size() == 1:
            raise
        # Where warnings are errors, one rank would leave while the others wait for it in a collective.
        logger.error(str(message))
