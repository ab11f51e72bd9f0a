"""What cannot be calibrated."""

from __future__ import annotations

__all__ = ["CalibrationError"]


class CalibrationError(Exception):
    """A log that gives no thresholds; the message, one line, is all that a user sees."""
